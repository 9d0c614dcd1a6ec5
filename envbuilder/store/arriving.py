"""A blob that is still arriving: one thread writes it to its partial file, others read what is there already.

A layer is unpacked while it is pulled, so that having it takes the longer of the two times and not their sum. A blob
that lies in the store is one that has arrived.
"""

from __future__ import annotations

import os
import threading
from io import RawIOBase
from typing import TYPE_CHECKING, Self

from envbuilder.parallel import StoppedError, checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from _typeshed import WriteableBuffer

_LOOK_UP = 0.2  # seconds after which a reader that waits looks whether it is still wanted


class Arriving:
    """A blob of ``size`` bytes that is being written, front to back, to the file ``path``, which must exist.

    The writer calls ``reach`` as it goes on, and in the end ``finish`` or ``fail``, whatever happens: readers wait
    for it. It needs a thread of its own: in a pool that is full of readers its turn never comes. The file may be
    renamed or removed meanwhile. ``tail`` is the end of the blob, of any length, when that was fetched first: there
    lies the table of contents (``oci.toc.table_start``), by which all cores unpack the layer while it arrives.

    What is read before ``finish`` has been verified by nobody: keep nothing of it under a name before
    ``wait_verified`` has returned. Use as a context manager; all readers must be done when it ends.
    """

    def __init__(self, path: Path, size: int, tail: bytes = b"") -> None:
        self.size = size
        self._tail = tail[-size:] if size else b""
        self._reached = 0
        self._verified = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def whole(cls, path: Path) -> Self:
        """Return a blob that has arrived and was verified on the way; raise FileNotFoundError when it has not."""
        blob = cls(path, 0)
        blob.size = os.fstat(blob._handle).st_size
        blob.finish()
        return blob

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)

    # -- the writer's side ------------------------------------------------------------------------------------

    def reach(self, size: int) -> None:
        """Say that the first ``size`` bytes of the blob are in the file: written, not only buffered."""
        with self._changed:
            self._reached = size
            self._changed.notify_all()

    def finish(self) -> None:
        """Say that the blob is whole and has the digest it should have."""
        with self._changed:
            self._reached, self._verified = self.size, True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Say that no more will come, or that what came is worthless: every reader raises ``error``.

        A writer that must begin again at the first byte fails this blob and makes another.
        """
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # -- the readers' side: any number of threads -------------------------------------------------------------

    def ends_from(self, start: int) -> bool:
        """Return whether all from ``start`` to the end of the blob can be read now."""
        return self._reached == self.size or start >= self.size - len(self._tail)

    def wait(self, stop: int, unwanted: threading.Event | None = None) -> None:
        """Return as soon as the first ``stop`` bytes can be read.

        Raises:
            StoppedError: ``unwanted`` was set, or the thread's work is no longer wanted (``parallel.checkpoint``).
            EnvbuilderError: the writer's error, when it failed.

        """
        self._wait(lambda: self._reached >= stop, unwanted)

    def wait_verified(self) -> None:
        """Return as soon as the blob is whole and verified; raise what ``wait`` raises."""
        self._wait(lambda: self._verified, None)

    def read(self, start: int, stop: int, unwanted: threading.Event | None = None) -> bytes:
        """Return the bytes from ``start`` to ``stop``, or to the end of the blob, as soon as they are there.

        Raises:
            EOFError: the file is shorter than the blob should be.
            StoppedError, EnvbuilderError: see ``wait``.

        """
        start, stop = min(start, self.size), min(stop, self.size)
        data = bytearray(max(0, stop - start))
        self.read_into(memoryview(data), start, unwanted)
        return bytes(data)

    def read_into(self, buffer: memoryview, start: int, unwanted: threading.Event | None = None) -> None:
        """Fill the buffer with the bytes from ``start``, all of which must be in the blob; raise what ``read`` raises."""
        stop, tail_start = start + len(buffer), self.size - len(self._tail)
        if start >= tail_start and self._reached < stop:
            buffer[:] = self._tail[start - tail_start : stop - tail_start]
            return
        self.wait(stop, unwanted)
        if (size := os.preadv(self._handle, [buffer], start)) < len(buffer):
            raise EOFError(f"the file ends at byte {start + size} of {self.size}")

    def stream(self, start: int = 0, stop: int | None = None, unwanted: threading.Event | None = None) -> BlobStream:
        """Return a range of the blob as a file that is read front to back. Closing it leaves the blob open."""
        return BlobStream(self, start, self.size if stop is None else min(stop, self.size), unwanted)

    def _wait(self, ready: Callable[[], bool], unwanted: threading.Event | None) -> None:
        with self._changed:
            while self._error is None and not ready():
                checkpoint()
                if unwanted is not None and unwanted.is_set():
                    raise StoppedError
                self._changed.wait(_LOOK_UP)
            if self._error is not None:
                raise self._error


class BlobStream(RawIOBase):
    """See ``Arriving.stream``. ``tell`` gives the place in the blob."""

    def __init__(self, blob: Arriving, start: int, stop: int, unwanted: threading.Event | None) -> None:
        super().__init__()
        self._blob, self._unwanted = blob, unwanted
        self._position, self._stop = start, stop

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return up to where the blob was read."""
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer, waiting for what has not arrived; return 0 at the end of the range."""
        view = memoryview(buffer).cast("B")[: self._stop - self._position]
        self._blob.read_into(view, self._position, self._unwanted)
        self._position += len(view)
        return len(view)
