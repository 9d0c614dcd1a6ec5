"""Write files and folders so that they are there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from envbuilder.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Temporary names begin like this; a later run may remove those that no process holds.
PREFIX = ".tmp-"


class DiskFullError(HostError):
    """No room is left for what had to be written; what was there before is untouched."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path}: no space left on the device",
            hint="make room, or set XDG_CACHE_HOME to a folder on a larger disk; the store is intact",
        )
        self.path = path


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn "no space left" and "quota exceeded" inside the block into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFullError(path) from error
        raise


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Open a temporary file beside ``path``; when the block ends well, sync it and rename it to ``path``.

    Raises:
        DiskFullError: there was no room; nothing is left behind.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=PREFIX)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(mode)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a temporary folder beside ``path``; when the block ends well, rename it to ``path``.

    When another process made ``path`` meanwhile, ours is dropped: equal names mean equal content here.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(path):
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=PREFIX))
        try:
            yield temporary
            try:
                temporary.rename(path)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                remove_tree(temporary)
        except BaseException:
            remove_tree(temporary)
            raise


def remove_tree(path: Path) -> None:
    """Remove a folder tree even where folders in it are not writable; one that is absent is fine."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        for folder, _, _ in os.walk(path):
            Path(folder).chmod(0o700)
        shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Have the names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
