"""Download one URL into the store: continued where it broke off, verified while it streams, kept only when whole."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder import http, report
from envbuilder.atomic import explain_full_disk
from envbuilder.store.partial import WrongBytesError, open_partial

if TYPE_CHECKING:
    from collections.abc import Callable

    import requests

    from envbuilder.oci.digest import Digest
    from envbuilder.store.partial import Partial
    from envbuilder.store.store import Store

#: How often in a row a download may break off without a single new byte.
_FRUITLESS = 4
_WAIT_SECONDS = 0.1


@dataclass(frozen=True)
class Source:
    """A file to download: where it is, its digest, and its size in bytes when that is known."""

    url: str
    digest: Digest
    size: int | None


def download(source: Source, store: Store, session: requests.Session, on_bytes: Callable[[int], None]) -> None:
    """Bring a file into the store, unless it is there; safe to run in many threads and processes at once.

    ``on_bytes`` is told of bytes as they are had, also of those that an earlier run left; the number is negative
    when bytes turn out to be worthless.

    Raises:
        WrongBytesError: size or digest differ; nothing is kept.
        NotFoundError, OutOfReachError: the server does not have or give it; what has arrived stays for the next run.
        DiskFullError: there was no room; what has arrived stays for the next run.

    """
    with explain_full_disk(store.root), open_partial(store, source.digest, source.size) as arrived:
        if arrived is None:
            on_bytes(store.blob(source.digest).stat().st_size)
            return
        arrived.complete(http.redact(source.url), lambda: _receive(source, session, arrived), on_bytes)


def _receive(source: Source, session: requests.Session, arrived: Partial) -> None:
    """Ask for what is missing until the server has sent its last byte."""
    fruitless = 0
    while source.size is None or arrived.size < source.size:
        before = arrived.size
        try:
            if _receive_once(source, session, arrived):
                return
            error = http.BrokenOffError(source.url, "the server does not send what it is asked for")
        except http.BrokenOffError as broken:
            error = broken
        fruitless = 0 if arrived.size > before else fruitless + 1
        if fruitless >= _FRUITLESS:
            raise error
        report.detail(f"{error.message}; continuing at byte {arrived.size}")
        time.sleep(_WAIT_SECONDS * 2**fruitless)


def _receive_once(source: Source, session: requests.Session, arrived: Partial) -> bool:
    """Ask once for the rest; return whether the file is whole as far as the server is concerned."""
    headers = {"Accept-Encoding": "identity"}
    if arrived.size:
        headers["Range"] = f"bytes={arrived.size}-"
    with http.get(session, source.url, headers=headers) as response:
        if response.status_code == 416:
            # There is nothing after what we have: with the size unknown that is the end, or ours is too long.
            if source.size is None and _total(response) == arrived.size:
                return True
            arrived.reset()
            return False
        if arrived.size and (response.status_code != 206 or _start(response) != arrived.size):
            arrived.reset()
            if response.status_code == 206:
                return False
        if source.size is not None and _total(response) not in {None, source.size}:
            arrived.reset()
            raise WrongBytesError(http.redact(source.url), f"{source.size} bytes", f"{_total(response)}")
        for data in http.chunks(response):
            arrived.add(data)
            if source.size is not None and arrived.size > source.size:
                arrived.reset()
                raise WrongBytesError(http.redact(source.url), f"{source.size} bytes", "more")
        # A server may answer with less than the whole rest.
        return response.status_code == 200 or _total(response) in {None, arrived.size}


def _start(response: requests.Response) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _total(response: requests.Response) -> int | None:
    """Return the size of the whole file, as the answer to a request for all or a part of it states it."""
    text = response.headers.get("Content-Length", "")
    if response.status_code != 200:
        text = response.headers.get("Content-Range", "").rpartition("/")[2]
    elif "Content-Encoding" in response.headers:
        text = ""
    return int(text) if text.isdecimal() else None
