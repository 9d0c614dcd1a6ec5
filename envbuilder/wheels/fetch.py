"""Bring every file of a lock into the store: found on its index by name, downloaded in parallel, verified by hash.

Nothing is asked of any index for what is there already. A URL is trusted for nothing: what counts is the digest in
the lock.
"""

from __future__ import annotations

import shutil
from functools import partial
from queue import Empty, PriorityQueue
from typing import TYPE_CHECKING

from envbuilder import http, parallel, report
from envbuilder.errors import HostError, InputError, UnreachableError
from envbuilder.lock.index import ProjectNotFoundError
from envbuilder.store.download import Source, download
from envbuilder.store.partial import WrongBytesError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.lock.model import Package
    from envbuilder.store.store import Store

#: Connections at once, a file on each. Of 2, 4, 8 and 16, eight were fastest on two cores (2.9 GB of torch's wheels).
#: Files are not split: eight ranges of one file came slower than the file in one stream.
DOWNLOADS = 8
LOOKUPS = 16
_WAIT_SECONDS = 0.2


class FileNotOnIndexError(InputError):
    """The index has the project, but not the file that the lock names."""


class NoRoomError(HostError):
    """The disk of the store has less room than what is still to be fetched."""


class FetchInterruptedError(UnreachableError):
    """An index went out of reach before everything was there. ``files`` and ``size`` say how much is missing."""

    def __init__(self, files: int, size: int, cause: http.OutOfReachError) -> None:
        count = "1 file" if files == 1 else f"{files} files"
        super().__init__(
            f"{cause.message}; {count} ({_megabytes(size)}) still to be fetched",
            hint=f"{cause.hint}: what has arrived is kept, and the downloads continue where they stopped",
        )
        self.files = files
        self.size = size


def missing(packages: Iterable[Package], store: Store) -> tuple[Package, ...]:
    """Return the packages whose file is not in the store, the largest first, each file once."""
    absent = {package.digest: package for package in packages if not store.has(package.digest, package.size)}
    return tuple(sorted(absent.values(), key=lambda package: (-package.size, package.file)))


def fetch(packages: Sequence[Package], store: Store, indexes: Indexes) -> None:
    """Bring the wheels and source archives of all packages into the store, as blobs under their digests.

    Raises:
        FetchInterruptedError: an index is out of reach; what has arrived is kept.
        FileNotOnIndexError: an index does not have a file, or not its project.
        WrongBytesError: an index has another file under the name; nothing of it is kept.
        NoRoomError, DiskFullError: the disk is full, or would be.

    """
    absent = missing(packages, store)
    if not absent:
        return
    _check_room(absent, store)
    report.step(f"fetching {len(absent)} of {len(packages)} files ({_megabytes(_total(absent))})")
    try:
        _find_and_download(absent, store, indexes)
    except http.OutOfReachError as error:
        left = missing(packages, store)
        raise FetchInterruptedError(len(left), _total(left) - _arrived(left, store), error) from error


def _find_and_download(absent: Sequence[Package], store: Store, indexes: Indexes) -> None:
    """Look files up and download what is found meanwhile, the largest first."""
    found: PriorityQueue[tuple[int, str, Source]] = PriorityQueue()

    def find(package: Package) -> None:
        found.put((-package.size, package.file, _find(package, indexes)))

    def load(task: report.Task) -> None:
        _, file, source = _next(found)
        report.detail(f"downloading {file}")
        download(source, store, indexes.session, task.advance)

    with report.task("fetching", _total(absent)) as task:
        finding = partial(parallel.run_all, find, absent, workers=LOOKUPS)
        loading = partial(parallel.run_all, load, [task] * len(absent), workers=DOWNLOADS)
        parallel.run_all(lambda work: work(), (finding, loading), workers=2)


def _find(package: Package, indexes: Indexes) -> Source:
    """Find the file on its project's page, and refuse it there when the index states another digest or size."""
    index = indexes.of(package.index)
    try:
        found = index.find(package.name, package.file)
    except ProjectNotFoundError as error:
        raise FileNotOnIndexError(f"{error.message}; the lock needs {package.file}", hint=error.hint) from error
    if found is None:
        raise FileNotOnIndexError(
            f"{package.file} is not on the index {index}",
            hint="the index may be another one than the lock was made with; choose one with --index-url, or lock anew",
        )
    if found.digest not in {None, package.digest}:
        raise WrongBytesError(http.redact(found.url), str(package.digest), str(found.digest))
    if found.size not in {None, package.size}:
        raise WrongBytesError(http.redact(found.url), f"{package.size} bytes", str(found.size))
    return Source(found.url, package.digest, package.size)


def _next(found: PriorityQueue[tuple[int, str, Source]]) -> tuple[int, str, Source]:
    while True:
        parallel.checkpoint()
        try:
            return found.get(timeout=_WAIT_SECONDS)
        except Empty:
            continue


def _check_room(absent: Sequence[Package], store: Store) -> None:
    needed, free = _total(absent) - _arrived(absent, store), shutil.disk_usage(store.root).free
    if needed > free:
        raise NoRoomError(
            f"{store.root}: {_megabytes(needed)} are to be fetched, but only {_megabytes(free)} are free",
            hint="make room, or set XDG_CACHE_HOME to a folder on a larger disk",
        )


def _arrived(packages: Iterable[Package], store: Store) -> int:
    """Return how many bytes of the packages lie half downloaded."""
    partials = (store.partial(package.digest) for package in packages)
    return sum(path.stat().st_size for path in partials if path.exists())


def _total(packages: Iterable[Package]) -> int:
    return sum(package.size for package in packages)


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
