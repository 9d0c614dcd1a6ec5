"""Inflate a layer's blob in threads of its own, several parts at once where one can begin at several places.

A gzip layer is a run of members, and a table of contents (``oci.toc``) says where many of them begin. What it says is
not trusted and need not be: a part is what lies between two of the places, each part must be whole members that have
the CRC-32 and the size they state, and the parts are put together in order. So a place at which no member begins ends
in an error, and what ends well is exactly what inflating from the first byte to the last gives.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from queue import Empty, Full, Queue
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, cast

import zstandard
from isal import igzip

from envbuilder import parallel
from envbuilder.parallel import StoppedError, checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from envbuilder.store.arriving import Arriving, BlobStream

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BLOCK = 1 << 19  # what passes between the threads at once
_AHEAD = 16  # blocks of a part that wait to be read: with those of the other parts at most 40 MiB for a layer
_PART = 1 << 20  # bytes of the blob; smaller parts are not worth the change
_MOST_THREADS = 4  # about so many inflate what one thread writes into files
_LOOK_UP = 0.2  # seconds after which a thread that waits looks whether it is still wanted


class _Block(NamedTuple):
    """A buffer, how many bytes at its start are inflated data, and how many bytes of the blob were read for them."""

    buffer: bytearray
    size: int
    read: int


class _Part(NamedTuple):
    """A part that is being inflated: its blocks, then None; then the future has its error, if there was one."""

    blocks: Queue[_Block | None]
    done: Future[None]


class _Reader(Protocol):
    def readinto(self, buffer: bytearray, /) -> int | None: ...


def cut(places: Iterable[int], size: int) -> list[int]:
    """Return where the parts of a blob of ``size`` bytes begin: 0, and so many of the places that no part is tiny."""
    starts = [0]
    for place in sorted(places):
        if starts[-1] + _PART <= place <= size - _PART:
            starts.append(place)
    return starts


@contextmanager
def inflated(
    blob: Arriving, starts: Sequence[int] = (0,), progress: Callable[[int], None] = lambda _: None
) -> Iterator[Iterator[memoryview]]:
    """Give the bytes in a blob, gzip, zstd or a plain tar, in order; its parts begin at ``starts`` (see ``cut``).

    They come in blocks, each valid until the next is asked for. Reading them raises what is wrong with the blob: EOFError, igzip.BadGzipFile, igzip_lib.IsalError,
    zstandard.ZstdError, or the error of its writer. ``progress`` is told of the bytes of the blob that were read.
    """
    crew = _Crew(blob, starts)
    with ThreadPoolExecutor(crew.threads) as pool:
        try:
            yield crew.blocks(pool, progress)
        finally:
            crew.stop.set()


class _Crew:
    """Inflates parts in threads, a few parts ahead of the one who reads."""

    def __init__(self, blob: Arriving, starts: Sequence[int]) -> None:
        self._blob = blob
        self._ranges = list(zip(starts, [*starts[1:], blob.size], strict=True))
        self.threads = min(parallel.cores(), _MOST_THREADS, len(starts))
        self._spare: list[bytearray] = []  # buffers are used again: fresh memory costs more than what is done in it
        self.stop = threading.Event()

    def blocks(self, pool: ThreadPoolExecutor, progress: Callable[[int], None]) -> Iterator[memoryview]:
        """Yield all bytes in order."""
        ranges, parts = iter(self._ranges), list[_Part]()
        while True:
            # The pool begins with the parts that are read first, so that none waits for a later one.
            while len(parts) <= self.threads and (following := next(ranges, None)) is not None:
                (start, stop), blocks = following, Queue[_Block | None](_AHEAD)
                parts.append(_Part(blocks, pool.submit(copy_context().run, self._inflate, start, stop, blocks)))
            if not parts:
                return
            part = parts.pop(0)
            while (block := _next(part.blocks)) is not None:
                progress(block.read)
                yield memoryview(block.buffer)[: block.size]
                self._spare.append(block.buffer)
            part.done.result()

    def _inflate(self, start: int, stop: int, blocks: Queue[_Block | None]) -> None:
        try:
            stream = self._blob.stream(start, stop, self.stop)
            reader, seen = _opened(stream, self._blob.read(0, 4, self.stop)), start
            while size := reader.readinto(buffer := self._buffer()):
                self._put(_Block(buffer, size, stream.tell() - seen), blocks)
                seen = stream.tell()
        finally:
            self._put(None, blocks)

    def _buffer(self) -> bytearray:
        try:
            return self._spare.pop()
        except IndexError:
            return bytearray(_BLOCK)

    def _put(self, block: _Block | None, blocks: Queue[_Block | None]) -> None:
        while True:
            checkpoint()
            if self.stop.is_set():
                raise StoppedError
            try:
                return blocks.put(block, timeout=_LOOK_UP)
            except Full:
                continue


def _next(blocks: Queue[_Block | None]) -> _Block | None:
    while True:
        checkpoint()
        try:
            return blocks.get(timeout=_LOOK_UP)
        except Empty:
            continue


def _opened(stream: BlobStream, magic: bytes) -> _Reader:
    if magic.startswith(_GZIP):
        return cast("_Reader", igzip.IGzipFile(fileobj=stream, mode="rb"))  # type: ignore[no-untyped-call]
    if magic == _ZSTD:
        file = cast("IO[bytes]", stream)
        return zstandard.ZstdDecompressor().stream_reader(file, read_size=_BLOCK, read_across_frames=True)
    return stream
