# ruff: noqa: PTH  (strings: a layer has 100,000 members, and a Path costs more than the system call it is for)
"""Unpack a layer into a folder, once, and verify it on the way.

A layer comes from anywhere, so its member names are hostile until proven otherwise: nothing is written through a
symbolic link or outside the folder. The folder is made empty and private and every directory in it is made here, so
that the set of directories made is a complete answer to "is the parent a real directory?", with no race.

Owners, the setuid and setgid bits and times are kept as a container engine keeps them, the first two only when root
unpacks. Of directories the time is not kept.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from isal import igzip, igzip_lib

from envbuilder import report
from envbuilder.errors import EnvbuilderError
from envbuilder.oci.untar import DIRECTORY, FILE, HARDLINK, SPECIAL, SYMLINK, Member, TarError, TarStream
from envbuilder.parallel import checkpoint
from envbuilder.store.atomic import atomic_folder, remove_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Descriptor
    from envbuilder.oci.untar import Source
    from envbuilder.store.store import Store

#: A whiteout, ``.wh.<name>``, removes ``name`` of the layers below; an opaque one removes all of the directory.
#: Other names with WHITEOUT twice are a storage driver's own and mean nothing here.
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
#: Stands in a directory that no member of the layer states: it takes mode and place of the one below.
IMPLIED = ".wh..wh.implied"

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UnpackError(EnvbuilderError):
    """A layer cannot be unpacked: it is damaged, or a member would land where it must not."""


def unpack_layer(
    store: Store, layer: Descriptor, diff_id: Digest, progress: Callable[[int], None] = lambda _: None
) -> Path:
    """Return the folder that holds the layer's files, unpacked now or at an earlier call; whiteouts stay as files.

    ``progress`` is told the compressed bytes read. Threads and processes may ask for the same layer at once. The
    files are shared by every root made of them: never write to them.

    Raises:
        UnpackError: the layer is damaged, is not what ``diff_id`` says, or has a member that must not be unpacked.
        NotInStoreError: the layer's blob is not in the store.

    """
    tree = store.root / "trees" / diff_id.hex
    if tree.exists():
        return tree
    private_folder(tree.parent)
    with store.lock(f"tree-{diff_id.hex}"):
        if not tree.exists():
            report.detail(f"unpacking layer {layer.digest}")
            with _opened(store, layer, progress) as stream, atomic_folder(tree) as folder:
                writer = _TreeWriter(folder)
                for member in stream.members():
                    checkpoint()
                    writer.add(member, stream)
                if (actual := stream.finish()) != diff_id:
                    raise UnpackError(f"layer {layer.digest} unpacks to {actual}, not to {diff_id}")
                folder.chmod(0o755)
    return tree


def private_folder(path: Path) -> None:
    """Make a folder that other users cannot enter: setuid programs of an image are not for them."""
    path.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _opened(store: Store, layer: Descriptor, progress: Callable[[int], None]) -> Iterator[TarStream]:
    """Open a layer, gzip or plain; turn every way in which it can be damaged into UnpackError."""
    seen = 0

    def advance() -> None:
        nonlocal seen
        checkpoint()
        position = file.tell()
        progress(position - seen)
        seen = position

    with store.open(layer.digest) as file:
        try:
            yield TarStream(_source(file, layer), advance)
        except TarError as error:
            raise UnpackError(f"layer {layer.digest}: {error.message}") from error
        except (igzip.BadGzipFile, igzip_lib.IsalError, EOFError) as error:
            raise UnpackError(f"layer {layer.digest} is not valid gzip: {error}") from error


def _source(file: IO[bytes], layer: Descriptor) -> Source:
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(_GZIP):
        return igzip.IGzipFile(fileobj=file, mode="rb")  # type: ignore[return-value]
    if magic == _ZSTD:
        raise UnpackError(
            f"layer {layer.digest} is compressed with zstd, which is not supported yet",
            hint="take a build of the image with gzip layers (`skopeo copy --dest-compress-format gzip`)",
        )
    return file  # type: ignore[return-value]


class _TreeWriter:
    """Writes members below ``folder``, which must be empty and of this process alone."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder)
        self._directories = {""}
        self._is_root = os.geteuid() == 0
        # Without root, what the image's owner may not read would be closed to the caller as well.
        self._mode_mask, self._file_bits, self._directory_bits = (0o7777, 0, 0) if self._is_root else (0o1777, 0o400, 0o700)

    def add(self, member: Member, stream: TarStream) -> None:
        """Write one member, and before it the parents that are missing.

        Raises:
            UnpackError: it would land outside the folder or below something that is no directory.

        """
        path = _inside(member.name, member.name)
        parent, _, name = path.rpartition("/")
        if not path:
            return  # "./", the root itself
        if name.startswith(WHITEOUT) and name.removeprefix(WHITEOUT) in {"", ".", ".."}:
            raise UnpackError(f"`{member.name}` would remove a directory from inside")
        if member.kind in SPECIAL:
            report.detail(f"`{path}` is a {SPECIAL[member.kind]} and is left out")
            return
        if parent not in self._directories:
            self._imply(parent, member.name)
        match member.kind:
            case _ if member.kind == DIRECTORY:
                self._directory(path, member)
            case _ if member.kind == FILE:
                self._file(path, member, stream)
            case _ if member.kind == SYMLINK:
                self._anew(path, lambda target: os.symlink(member.link, target))
                self._finish(path, member)
            case _ if member.kind == HARDLINK:
                self._hardlink(path, member)
            case _:
                raise UnpackError(f"`{member.name}` is of the unknown kind {member.kind!r}")
