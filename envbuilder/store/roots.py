# ruff: noqa: PTH101, PTH102, PTH108, PTH112, PTH113, PTH114, PTH208
"""Make the root folder of an image out of its unpacked layers: directories anew, everything else by hard link.

A second root that shares layers costs directories and links, no bytes. Because the files are shared, a root is only
ever to be used read-only. Names stay strings for the reason given in ``treewriter``.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.atomic import atomic_folder, remove_tree
from envbuilder.store.trees import is_whole, note_made, private_folder
from envbuilder.store.treewriter import IMPLIED, OPAQUE, WHITEOUT, UnpackError

if TYPE_CHECKING:
    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Descriptor, Image
    from envbuilder.store.store import Store

#: What every root has besides the image's own, so that it can be entered without being written to.
MOUNT_FOLDERS = ("dev", "proc", "run", "sys", "tmp", "usr/local/nvidia/bin", "usr/local/nvidia/lib64")
MOUNT_FILES = ("etc/hosts", "etc/resolv.conf")
_AT_ONCE = 8  # layers: each has up to five threads and 40 MiB of buffers (``inflate``)


def root_tree(store: Store, image: Image) -> Path:
    """Return the image's root folder, made now or at an earlier call. Use it read-only.

    Raises:
        UnpackError: a layer is damaged or cannot be unpacked.
        NotInStoreError: a layer is not in the store.

    """
    store.protect(image.digest)
    root = store.root / "roots" / image.digest.hex
    if is_whole(store, root):
        return root
    private_folder(root.parent)
    trees = _unpack_all(store, image)
    with store.lock(f"root-{image.digest.hex}"):
        if not is_whole(store, root):
            remove_tree(root)  # what a power cut left of it
            report.detail(f"making the root of {image.digest}")
            with atomic_folder(root) as folder:
                for tree in trees:
                    _apply(str(tree), str(folder), "")
                _add_mount_points(str(folder))
                folder.chmod(0o755)
                note_made(store, root, folder)
    return root


def _unpack_all(store: Store, image: Image) -> list[Path]:
    from envbuilder.store.unpack import tree_of, unpack_layer  # noqa: PLC0415 (a root that is there needs no inflaters)

    pairs = list(zip(image.manifest.layers, image.config.diff_ids, strict=True))
    missing = sum(layer.size for layer, _ in pairs if not tree_of(store, layer).exists())
    largest_first = sorted(pairs, key=lambda pair: -pair[0].size)
    with report.task("unpacking", missing) as task:

        def unpack(pair: tuple[Descriptor, Digest]) -> Path:
            return unpack_layer(store, *pair, progress=task.advance)

        parallel.run_all(unpack, largest_first, workers=min(parallel.cores(), _AT_ONCE))
    return [tree_of(store, layer) for layer, _ in pairs]


def _apply(tree: str, root: str, below: str) -> None:
    """Put one directory of a layer over the same directory of the root; ``below`` names it in errors."""
    parallel.checkpoint()
    with os.scandir(tree) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    # First what is removed: a whiteout speaks of the layers below, never of its own.
    markers = [entry.name for entry in entries if entry.name.startswith(WHITEOUT)]
    gone = os.listdir(root) if OPAQUE in markers else [name.removeprefix(WHITEOUT) for name in markers]
    for name in gone:
        if not name.startswith(WHITEOUT):  # a storage driver's own
            _remove(f"{root}/{name}")
    for entry in entries:
        if entry.name.startswith(WHITEOUT):
            continue
        target, path = f"{root}/{entry.name}", f"{below}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            _open_directory(entry, target, path)
            _apply(entry.path, target, f"{path}/")
        else:
            _link(entry.path, target)


def _open_directory(entry: os.DirEntry[str], target: str, path: str) -> None:
    """Make ``target`` a directory with the mode and owner of ``entry``, or of the lower one if that states none."""
    implied = os.path.lexists(f"{entry.path}/{IMPLIED}")
    if os.path.isdir(target) and not os.path.islink(target):
        if implied:
            return
    elif implied and os.path.lexists(target):
        raise UnpackError(f"a layer puts files below `{path}`, which is not a directory in the layers under it")
    else:
        _remove(target)
        os.mkdir(target)
    status = entry.stat(follow_symlinks=False)
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid)
    os.chmod(target, status.st_mode & 0o7777)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        _remove(target)
        _link(source, target)
    except OSError as error:
        # A file system boundary inside the store, or more links than the file system can count.
        if error.errno not in {errno.EXDEV, errno.EMLINK}:
            raise
        _remove(target)
        shutil.copy2(source, target, follow_symlinks=False)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        remove_tree(Path(path))
    elif os.path.lexists(path):
        os.unlink(path)


def _add_mount_points(root: str) -> None:
    """Make what must be there to mount on; an image's own link in its place (``/etc/resolv.conf``) makes way."""
    for path in (*MOUNT_FOLDERS, *(file.rpartition("/")[0] for file in MOUNT_FILES)):
        folder = root
        for part in path.split("/"):
            folder = f"{folder}/{part}"
            if os.path.islink(folder) or not os.path.isdir(folder):
                _remove(folder)
                os.mkdir(folder, 0o755)
    for path in MOUNT_FILES:
        target = f"{root}/{path}"
        if os.path.islink(target) or not os.path.isfile(target):
            _remove(target)
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
