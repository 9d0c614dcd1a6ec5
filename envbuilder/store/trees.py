"""Whether an unpacked folder, a layer's tree or an image's root, is still whole after a power cut.

The files of a tree are not synced one by one, which would cost more than unpacking does. A folder gets its name when
all is written, so within one run of the kernel it is whole; but a power cut within about half a minute of that leaves
files cut short under a name that survived. So number and size of the files are noted when a folder is made, and
compared once after every boot: a walk, without reading a file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.store.leases import boot
from envbuilder.store.store import touch

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.store.store import Store

_KIND = "unpacked"


def private_folder(path: Path) -> None:
    """Make a folder that other users cannot enter: setuid programs of an image are not for them."""
    path.mkdir(mode=0o700, exist_ok=True)


def note_made(store: Store, target: Path, folder: Path) -> None:
    """Note what ``folder``, which was just written and is about to be renamed to ``target``, holds."""
    files, size = _count(folder)
    store.remember(_KIND, _key(target), {"folder": _key(target), "files": files, "bytes": size, "boot": boot()})


def is_whole(store: Store, folder: Path) -> bool:
    """Return whether a tree or root is there and has lost nothing in a power cut, as far as sizes tell.

    If so it counts as used now. If not, who makes it anew must remove what is left of it first.
    """
    if not folder.exists():
        return False
    match store.recall(_KIND, _key(folder)):
        case {"boot": str(made)} if made == boot():
            touch(folder)
            return True
        case {"files": int(files), "bytes": int(size)}:
            if _count(folder) != (files, size):
                report.warning(f"{folder} has lost files in a power cut; it is made again")
                return False
        case _:  # made by a version that took no notes
            pass
    note_made(store, folder, folder)
    touch(folder)
    return True


def _key(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _count(folder: Path) -> tuple[int, int]:
    """Return the number and the bytes of the files and links below a folder."""
    files = size = 0
    pending = [str(folder)]
    while pending:
        parallel.checkpoint()
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_size
    return files, size
