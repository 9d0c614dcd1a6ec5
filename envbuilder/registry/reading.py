"""Read a blob in pieces, or a range of one: continued where it broke off, from a mirror or the registry itself.

Follows the section "Pulling blobs" of the distribution specification; ranges as RFC 9110, section 14, has them.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from envbuilder import http, parallel, report
from envbuilder.registry.endpoint import Ask
from envbuilder.registry.errors import RegistryUnreachableError, WrongAnswerError, unreachable
from envbuilder.registry.upload import pause

if TYPE_CHECKING:
    from collections.abc import Iterator

    import requests

    from envbuilder.oci.digest import Digest
    from envbuilder.registry.endpoint import Endpoint, Patience

#: A connection that brings fewer bytes than this, or takes too long for them, has brought next to nothing.
LEAST = 16 << 10


def stream(endpoint: Endpoint, digest: Digest, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the bytes [start, stop) of a blob, to its end with None. They are not verified.

    Raises:
        RegistryError: of the kind that the failure is, after ``patience.retries`` breaks in a row that brought next to
            nothing; bytes that come too slowly are taken for a break.

    """
    what = f"{endpoint.place.host}/{endpoint.place.repository}: blob {digest}"
    position, fruitless = start, 0
    while stop is None or position < stop:
        before = position
        try:
            for data in _once(endpoint, digest, position, stop, what):
                position += len(data)
                yield data
            if stop is None or position >= stop:
                return
            error = RegistryUnreachableError(f"{what}: the registry sends {position} bytes of {stop}")
        except http.BrokenOffError as broken:
            error = unreachable(what, endpoint.place.host, broken)
        fruitless = 0 if position - before >= LEAST else fruitless + 1
        if fruitless > endpoint.patience.retries:
            raise error
        report.detail(f"{error.message}; continuing at byte {position}")
        pause(endpoint.patience, fruitless)


def _once(endpoint: Endpoint, digest: Digest, start: int, stop: int | None, what: str) -> Iterator[bytes]:
    """Ask once, and yield no more than what was asked for, whatever the registry sends."""
    headers = {}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    with endpoint.ask(Ask("GET", f"blobs/{digest}", what, frozenset({200, 206, 416}), headers)) as response:
        if response.status_code == 416:
            _check_ended(response, start, stop, what)
            return
        if response.status_code == 200 and start:
            endpoint.ranges = False
        unwanted = start - _begins_at(response, start, what)
        left = None if stop is None else stop - start
        for data in _lively(response, endpoint.patience):
            piece = data[unwanted:]
            unwanted -= len(data) - len(piece)
            if left is not None:
                piece = piece[:left]
                left -= len(piece)
            if piece:
                yield piece
            if left == 0:
                return


def _lively(response: requests.Response, patience: Patience) -> Iterator[bytes]:
    """Yield a body's bytes as they come; time that the caller takes does not count.

    Raises:
        BrokenOffError: it ended early, stopped coming, or fewer than ``LEAST`` bytes came in ``patience.slow_seconds``.

    """
    waited, came = 0.0, 0
    while True:
        parallel.checkpoint()
        begin = time.monotonic()
        data = http.piece(response)
        waited, came = waited + time.monotonic() - begin, came + len(data)
        if not data:
            return
        yield data
        if came >= LEAST:
            waited, came = 0.0, 0
        elif waited > patience.slow_seconds:
            raise http.BrokenOffError(response.url, f"only {came} bytes came in {waited:.0f} seconds")


def _begins_at(response: requests.Response, start: int, what: str) -> int:
    """Return the offset of an answer's first byte: a registry without ranges answers with the whole."""
    if response.status_code == 200:
        return 0
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if found is None or int(found[1]) > start:
        raise WrongAnswerError(f"{what}: the registry does not send the range that it is asked for")
    return int(found[1])


def _check_ended(response: requests.Response, start: int, stop: int | None, what: str) -> None:
    """Raise unless "no such range" means that there is nothing after what we have."""
    size = response.headers.get("Content-Range", "").rpartition("/")[2]
    if stop is not None or size != str(start):
        raise WrongAnswerError(f"{what}: the blob has no byte {start}", status=response.status_code)
