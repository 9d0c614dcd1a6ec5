"""A blob on its way into the store: continued where it broke off, hashed while it comes, kept only when whole.

What has arrived lies in ``partial/<hex>`` and carries an exclusive lock while someone brings it, so that two processes
that want the same blob take turns, and the second finds it done. The lock ends with the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.errors import EnvbuilderError
from envbuilder.oci.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from envbuilder.store.store import Store

_WAIT_SECONDS = 0.1


class WrongBytesError(EnvbuilderError):
    """What came is not the blob that was to come; nothing of it was kept. ``name`` says what, fit to be shown."""

    def __init__(self, name: str, expected: str, actual: str) -> None:
        super().__init__(
            f"{name}: has {actual} instead of {expected}",
            hint="the file was replaced there, or a proxy on the way alters it; nothing of it was kept",
        )
        self.name = name
        self.expected = expected
        self.actual = actual


class Partial:
    """The part of a blob that is there, from its first byte on: bytes on disk, their hash and number."""

    def __init__(self, store: Store, digest: Digest, total: int | None, file: IO[bytes]) -> None:
        self.wanted = digest
        self.total = total
        self.size = 0
        self._store = store
        self._file = file
        self._on_bytes: Callable[[int], None] = lambda _: None
        self._hash = hashlib.sha256()

    @property
    def path(self) -> Path:
        """The file, until the blob is complete."""
        return self._store.partial(self.wanted)

    @property
    def digest(self) -> Digest:
        """The digest of what is there."""
        return Digest(self._hash.hexdigest())

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._count(data)

    def reset(self) -> None:
        """Drop what is there."""
        self._file.truncate(0)
        self._file.seek(0)
        self._hash = hashlib.sha256()
        dropped, self.size = self.size, 0
        self._on_bytes(-dropped)

    def complete(self, name: str, receive: Callable[[], None], on_bytes: Callable[[int], None]) -> None:
        """Bring the blob into the store: ``receive`` adds what is missing until nothing more comes.

        ``on_bytes`` is told of bytes as they are had, also of those that an earlier run left; the number is negative
        when bytes turn out to be worthless. ``size`` counts them already when it is called.

        Raises:
            WrongBytesError: what came is another blob; nothing is kept.
            EnvbuilderError: of ``receive``; what has arrived stays for the next run.

        """
        self._on_bytes = on_bytes
        try:
            self._fill(name, receive)
        except WrongBytesError:
            self.path.unlink()
            raise
        os.fsync(self._file.fileno())
        self._store.settle(self.path, self.wanted)

    def _fill(self, name: str, receive: Callable[[], None]) -> None:
        self._rehash()
        left = self.size
        receive()
        if self.digest != self.wanted and left:
            # What was left may come from another server, or from before a power cut: the blob deserves a second chance.
            report.detail(f"{name}: what an earlier run left of it is of no use; starting again")
            self.reset()
            receive()
        if self.digest != self.wanted:
            raise WrongBytesError(name, str(self.wanted), str(self.digest))

    def _rehash(self) -> None:
        """Hash what an earlier run left; drop it when it is more than the whole blob."""
        self._file.seek(0)
        while data := self._file.read(1 << 20):
            parallel.checkpoint()
            self._count(data)
        if self.total is not None and self.size > self.total:
            self.reset()

    def _count(self, data: bytes) -> None:
        self._hash.update(data)
        self.size += len(data)
        self._on_bytes(len(data))


@contextmanager
def open_partial(store: Store, digest: Digest, total: int | None) -> Iterator[Partial | None]:
    """Open what is there of a blob of ``total`` bytes (None: unknown), waiting for others who bring it.

    Gives None when the blob is in the store already, or was brought meanwhile.
    """
    while not store.has(digest, total):
        path = store.partial(digest)
        with path.open("a+b", buffering=0) as file:
            while not _locked(file):
                parallel.checkpoint()
                time.sleep(_WAIT_SECONDS)
            # Whoever had the lock before us may have renamed the file, or removed it: then ours is not it.
            here = store.has(digest, total)
            if not here and path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield Partial(store, digest, total, file)
                return
    yield None


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
