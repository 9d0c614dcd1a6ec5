"""One large blob over several connections: its ranges are fetched side by side and given out in order.

What is given out is always the beginning of the blob, so whoever keeps it can continue from there after any break.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING

from envbuilder import parallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from envbuilder.oci.digest import Digest
    from envbuilder.registry.client import Repository

#: What is asked for at once; ``connections`` times as much is in memory.
RANGE = 8 << 20
_LOOK_UP = 0.2  # seconds after which who waits looks whether the range is still wanted


def connections_for(sizes: Sequence[int], connections: int, at_once: int) -> list[int]:
    """Deal connections to blobs of which ``at_once`` are fetched at a time: to each its part, or by its share of all bytes.

    A network that gives each connection its own rate is then used to the full until the end, also by an image of which
    one layer is the most. Every blob has at least one connection, one of two ranges or less has no more.
    """
    total, part = sum(sizes), connections // at_once
    return [
        max(1, min(size // RANGE, connections, max(part, -(-size * connections // (total or 1))))) for size in sizes
    ]


@contextmanager
def read_ranges(
    repository: Repository, digest: Digest, start: int, stop: int, connections: int
) -> Iterator[Iterator[bytes]]:
    """Give the bytes [start, stop) of a blob in order, over so many connections; errors as ``Repository.read_blob``.

    One connection is used where ranges are not known: each would bring the whole blob.
    """
    if connections < 2 or stop - start <= RANGE or not repository.ranges:
        with repository.read_blob(digest, start, stop) as pieces:
            yield pieces
        return

    def read(begin: int) -> bytes:
        with repository.read_blob(digest, begin, min(begin + RANGE, stop)) as pieces:
            return b"".join(pieces)

    pool = ThreadPoolExecutor(max_workers=connections)
    try:
        ahead: deque[Future[bytes]] = deque()

        def pieces_in_order() -> Iterator[bytes]:
            position = start
            while position < stop and repository.ranges:
                ahead.append(pool.submit(copy_context().run, read, position))
                position += RANGE
                if len(ahead) > connections:
                    yield _result(ahead.popleft())
            while ahead:
                yield _result(ahead.popleft())
            if position < stop:
                with repository.read_blob(digest, position, stop) as rest:
                    yield from rest

        yield pieces_in_order()
    finally:
        # Without waiting: one that is stuck in a read must not hold up an error or Ctrl-C.
        pool.shutdown(wait=False, cancel_futures=True)


def _result(future: Future[bytes]) -> bytes:
    """Wait for a range as long as it is wanted."""
    while not future.done():
        parallel.checkpoint()
        wait([future], timeout=_LOOK_UP)
    return future.result()
