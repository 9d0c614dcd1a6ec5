"""Upload a blob: in one piece when it is small, else in chunks that are taken up again where a connection broke.

Follows the section "Pushing Blobs" of the distribution specification: POST begins a session, PATCH adds a chunk, PUT
ends it with the digest, which the registry verifies. A session that the registry has lost is begun anew.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from envbuilder import parallel, report
from envbuilder.errors import HostError
from envbuilder.registry.endpoint import Ask
from envbuilder.registry.errors import NotInRegistryError, RegistryError, RegistryUnreachableError, RejectedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import requests

    from envbuilder.oci.digest import Digest
    from envbuilder.registry.endpoint import Endpoint, Patience

#: Opens the bytes of a blob as a seekable binary file that the caller closes; called again after a break. Only called
#: when the registry lacks the blob. For a file: ``lambda: path.open("rb")``; for bytes: ``lambda: io.BytesIO(data)``.
BlobSource: TypeAlias = Callable[[], BinaryIO]

_PIECE = 1 << 20
_BINARY = "application/octet-stream"


class UnreadableBlobError(HostError):
    """The bytes that are to be uploaded cannot be read."""

    def __init__(self, digest: Digest, reason: str) -> None:
        super().__init__(f"{digest}: cannot be read: {reason}", hint="`envbuilder cache verify` finds damaged blobs")


@dataclass(frozen=True)
class Outgoing:
    """A blob to upload; ``progress`` is told of bytes sent, of a negative number when they must be sent again."""

    digest: Digest
    size: int
    source: BlobSource
    progress: Callable[[int], None]


def upload(endpoint: Endpoint, blob: Outgoing, session: str | None = None) -> None:
    """Upload a blob, in the upload session at the URL ``session`` when one was begun already.

    Raises:
        RegistryError: of the kind that the failure is, after ``patience.retries`` failures without a new byte.
        UnreadableBlobError: the blob's source fails.

    """
    work = _Upload(endpoint, blob, session)
    failures, furthest = 0, 0
    while True:
        try:
            work.run()
        except RegistryError as error:
            # Only what is further than ever counts: else a session that is lost again and again would go on for ever.
            failures = 1 if work.offset > furthest else failures + 1
            furthest = max(furthest, work.offset)
            if failures > endpoint.patience.retries or not work.can_go_on(error):
                raise
            report.detail(f"{error.message}; trying again from byte {work.offset}")
            pause(endpoint.patience, failures, error.wait)
        else:
            return


def pause(patience: Patience, failures: int, asked: float | None = None) -> None:
    """Wait before trying again: as long as the registry asked, else longer with every failure in a row."""
    seconds = patience.backoff * 2 ** (failures - 1) * random.uniform(0.5, 1.5)  # noqa: S311 (jitter)
    end = time.monotonic() + (seconds if asked is None else asked)
    while (left := end - time.monotonic()) > 0:
        parallel.checkpoint()
        time.sleep(min(left, 0.2))


class _Upload:
    """The state of one upload: the session's URL, and the offset up to which the registry has the bytes."""

    def __init__(self, endpoint: Endpoint, blob: Outgoing, session: str | None) -> None:
        self._endpoint = endpoint
        self._blob = blob
        self._url = session
        self._what = f"{endpoint.place.host}/{endpoint.place.repository}: uploading {blob.digest}"
        self._chunk = endpoint.patience.chunk
        self._in_chunks = blob.size > endpoint.patience.monolithic
        self._resumed = False  # the registry must be asked how far it got
        self._out_of_step = 0  # how often in a row a chunk brought nothing
        self._told = 0
        self.offset = 0

    def run(self) -> None:
        """Do what is left to do."""
        if self._url is None:
            self._begin()
        elif self._resumed:
            self._ask_how_far()
        while self._in_chunks and self.offset < self._blob.size:
            self._send_chunk()
        self._commit()

    def can_go_on(self, error: RegistryError) -> bool:
        """Prepare for another ``run`` after an error; return False when it would not help."""
        if isinstance(error, RegistryUnreachableError):
            self._resumed = self._url is not None
            if not self._in_chunks:
                self._restart()  # what came of a single piece is worth nothing
            return error.temporary
        if self._url is None:
            return False
        if isinstance(error, NotInRegistryError):  # BLOB_UPLOAD_UNKNOWN: the session is lost, or it had ended well
            self._restart()
            return True
        if not isinstance(error, RejectedError):
            return False
        again = self._resumed or (self._in_chunks and self.offset == 0)
        # A registry that takes no chunks, or that does not know where a broken chunk ended, gets all in one piece.
        self._in_chunks = False
        self._restart()
        return again

    def _restart(self) -> None:
        self._url = None
        self._resumed = False
        self.offset = 0
        self._tell(0)

    def _begin(self) -> None:
        ask = Ask("POST", "blobs/uploads/", self._what, frozenset({202}), push=True)
        with self._endpoint.ask(ask) as response:
            self._take_location(response)
            least = response.headers.get("OCI-Chunk-Min-Length", "")
            if least.isdecimal():
                self._chunk = max(self._chunk, int(least))
        self.offset = 0
        self._tell(0)

    def _ask_how_far(self) -> None:
        """Section "Resuming an upload": GET answers with the range that has arrived."""
        if self.offset == self._blob.size and self._is_there():
            return
        ask = Ask("GET", self._url or "", self._what, frozenset({204}), push=True)
        with self._endpoint.ask(ask) as response:
            self._take_location(response)
            self.offset = self._arrived(response, otherwise=0)
        self._tell(self.offset)

    def _send_chunk(self) -> None:
        start, stop = self.offset, min(self.offset + self._chunk, self._blob.size)
        headers = {"Content-Type": _BINARY, "Content-Range": f"{start}-{stop - 1}"}
        ask = self._sending(("PATCH", self._url or "", frozenset({202, 416})), start, stop, headers)
        with self._endpoint.ask(ask) as response:
            accepted = response.status_code == 202
            if accepted:
                self._take_location(response)
            self.offset = self._arrived(response, otherwise=stop if accepted else -1)
        self._out_of_step = 0 if self.offset > start else self._out_of_step + 1
        if self._out_of_step > self._endpoint.patience.retries:
            raise RejectedError(f"{self._what}: the registry takes no bytes after {start}", status=response.status_code)
        if self.offset < 0 or self.offset > stop:
            self._ask_how_far()
        self._tell(self.offset)

    def _commit(self) -> None:
        start, stop = (self.offset if self._in_chunks else 0), self._blob.size
        url = f"{self._url}{'&' if '?' in (self._url or '') else '?'}digest={self._blob.digest}"
        ask = self._sending(("PUT", url, frozenset({201})), start, stop, {"Content-Type": _BINARY})
        try:
            with self._endpoint.ask(ask):
                pass
        except NotInRegistryError:
            # A commit whose answer was lost has ended the session.
            if not self._is_there():
                raise
        self.offset = stop
        self._tell(stop)

    def _is_there(self) -> bool:
        return has_blob(self._endpoint, self._blob.digest)

    def _sending(self, how: tuple[str, str, frozenset[int]], start: int, stop: int, headers: Mapping[str, str]) -> Ask:
        method, url, fine = how

        def body() -> bytes | _Part:
            self._tell(start)  # it may be the second time, after a token has expired
            return _Part(self._blob, start, stop, self._count) if stop > start else b""

        silence = self._endpoint.patience.commit_seconds
        return Ask(method, url, self._what, fine, headers, body, push=True, once=True, read_seconds=silence)

    def _take_location(self, response: requests.Response) -> None:
        self._url = self._endpoint.absolute(response.headers.get("Location"), response, self._what)

    def _arrived(self, response: requests.Response, *, otherwise: int) -> int:
        """Return the number of bytes that an answer says have arrived (``Range: 0-<last>``)."""
        found = re.fullmatch(r"(?:bytes=)?0-(\d+)", response.headers.get("Range", "").strip())
        if found is None:
            return otherwise
        # "0-0" is what registries say of no byte, and of one. Sending the first one again is the safe reading.
        last = int(found[1])
        return last + 1 if last else 0

    def _count(self, amount: int) -> None:
        self._told += amount
        self._blob.progress(amount)

    def _tell(self, offset: int) -> None:
        """Correct what ``progress`` was told to what the registry has."""
        if offset != self._told:
            self._count(offset - self._told)


class _Part:
    """The bytes [start, stop) of a blob as the body of a request."""

    def __init__(self, blob: Outgoing, start: int, stop: int, count: Callable[[int], None]) -> None:
        self._blob = blob
        self._start = start
        self._stop = stop
        self._count = count

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[bytes]:
        left = len(self)
        with self._open() as file:
            while left:
                parallel.checkpoint()
                data = self._read(file, min(left, _PIECE))
                left -= len(data)
                yield data
                self._count(len(data))

    def _open(self) -> BinaryIO:
        try:
            file = self._blob.source()
            file.seek(self._start)
        except OSError as error:  # as it is, it would be taken for the connection's
            raise UnreadableBlobError(self._blob.digest, str(error)) from error
        return file

    def _read(self, file: BinaryIO, most: int) -> bytes:
        try:
            data = file.read(most)
        except OSError as error:
            raise UnreadableBlobError(self._blob.digest, str(error)) from error
        if not data:
            raise UnreadableBlobError(self._blob.digest, f"it has fewer than {self._blob.size} bytes")
        return data


def has_blob(endpoint: Endpoint, digest: Digest) -> bool:
    """Return whether the repository has a blob (section "Checking if content exists in the registry").

    A redirect to where the blob lies says yes as well; that place is not asked.
    """
    what = f"{endpoint.place.host}/{endpoint.place.repository}: blob {digest}"
    fine = frozenset({200, 404, 301, 302, 303, 307, 308})
    with endpoint.ask(Ask("HEAD", f"blobs/{digest}", what, fine, leave=True)) as response:
        return response.status_code != 404
