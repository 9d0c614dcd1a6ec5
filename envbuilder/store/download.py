"""Download one URL into the store: continued where it broke off, verified while it streams, kept only when whole.

What has arrived lies in ``partial/<hex>`` and carries an exclusive lock while someone downloads it, so that two
processes that want the same file take turns, and the second finds it done. The lock ends with the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from envbuilder import http, parallel, report
from envbuilder.atomic import explain_full_disk
from envbuilder.errors import EnvbuilderError
from envbuilder.oci.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import requests

    from envbuilder.store.store import Store

#: How often in a row a download may break off without a single new byte.
_FRUITLESS = 4
_WAIT_SECONDS = 0.1


class WrongBytesError(EnvbuilderError):
    """What a URL answered is not the file that was to come; nothing of it was kept. ``url`` is redacted."""

    def __init__(self, url: str, expected: str, actual: str) -> None:
        super().__init__(
            f"{http.redact(url)}: has {actual} instead of {expected}",
            hint="the file was replaced there, or a proxy on the way alters it; nothing of it was kept",
        )
        self.url = http.redact(url)
        self.expected = expected
        self.actual = actual


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
    with explain_full_disk(store.root), _partial(store, source.digest) as file:
        if file is None:
            on_bytes(store.blob(source.digest).stat().st_size)
            return
        path = store.partial(source.digest)
        try:
            _fill(source, session, _Arrived(file, on_bytes))
        except WrongBytesError:
            path.unlink()
            raise
        os.fsync(file.fileno())
        path.chmod(0o644)
        path.rename(store.blob(source.digest))


def _fill(source: Source, session: requests.Session, arrived: _Arrived) -> None:
    arrived.rehash(source.size)
    left = arrived.size
    _receive(source, session, arrived)
    if arrived.digest != source.digest and left:
        # What was left may come from another server, or from before a power cut: the file deserves a second chance.
        report.detail(f"{http.redact(source.url)}: what an earlier run left of it is of no use; starting again")
        arrived.reset()
        _receive(source, session, arrived)
    if arrived.digest != source.digest:
        raise WrongBytesError(source.url, str(source.digest), str(arrived.digest))


class _Arrived:
    """The part of a file that is there: its bytes on disk, their hash and number."""

    def __init__(self, file: IO[bytes], on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._on_bytes = on_bytes
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> Digest:
        return Digest(self._hash.hexdigest())

    def rehash(self, most: int | None) -> None:
        """Hash what an earlier run left; drop it when it is more than the whole file."""
        self._file.seek(0)
        while data := self._file.read(1 << 20):
            parallel.checkpoint()
            self._count(data)
        if most is not None and self.size > most:
            self.reset()

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._count(data)

    def reset(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._hash = hashlib.sha256()
        self._on_bytes(-self.size)
        self.size = 0

    def _count(self, data: bytes) -> None:
        self._hash.update(data)
        self.size += len(data)
        self._on_bytes(len(data))


def _receive(source: Source, session: requests.Session, arrived: _Arrived) -> None:
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


def _receive_once(source: Source, session: requests.Session, arrived: _Arrived) -> bool:
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
            raise WrongBytesError(source.url, f"{source.size} bytes", f"{_total(response)}")
        for data in http.chunks(response):
            arrived.add(data)
            if source.size is not None and arrived.size > source.size:
                arrived.reset()
                raise WrongBytesError(source.url, f"{source.size} bytes", "more")
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


@contextmanager
def _partial(store: Store, digest: Digest) -> Iterator[IO[bytes] | None]:
    """Open the partial file of a blob with an exclusive lock, waiting for others; None when the blob is there."""
    while not store.has(digest):
        path = store.partial(digest)
        with path.open("a+b", buffering=0) as file:
            while not _locked(file):
                parallel.checkpoint()
                time.sleep(_WAIT_SECONDS)
            # Whoever had the lock before us may have renamed the file, or removed it: then ours is not it.
            if not store.has(digest) and path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield file
                return
    yield None


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
