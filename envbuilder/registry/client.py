"""One repository of a registry: the OCI distribution specification 1.1 as a few methods.

Every error is of ``envbuilder.registry.errors`` and so of the tree. Mirrors are read from before the registry itself,
which is asked when they lack something or fail; nothing is ever written to them.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from envbuilder import report
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import DOCKER_INDEX, DOCKER_MANIFEST, INDEX, MANIFEST, Descriptor
from envbuilder.registry import reading
from envbuilder.registry.credentials import find_credentials
from envbuilder.registry.endpoint import MOST_BODY, Ask, Endpoint, Patience
from envbuilder.registry.errors import (
    AccessRefusedError,
    NotInRegistryError,
    RegistryError,
    RejectedError,
    WrongAnswerError,
)
from envbuilder.registry.hosts import find_places
from envbuilder.registry.reference import Reference, check_repository, check_target
from envbuilder.registry.referrers import add_by_tag, list_referrers, subject_of
from envbuilder.registry.upload import BlobSource, Outgoing, has_blob, upload

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager

    import requests

    from envbuilder.registry.hosts import Place

__all__ = ["PATIENCE", "BlobSource", "Fetched", "Patience", "Repository", "open_repository"]

#: What is used when nothing else is given; tests that make a registry fail replace it.
PATIENCE = Patience()

T = TypeVar("T")

_TYPES = (MANIFEST, INDEX, DOCKER_MANIFEST, DOCKER_INDEX)
_ACCEPT = ", ".join(_TYPES)
#: An answer to HEAD that says too little, or cannot say why it is none, is asked for in full by GET.
_HEAD = frozenset({200, 400, 401, 403, 404, 405, 501})
_PAGE = 1000
_MOST_PAGES = 100_000


@dataclass(frozen=True)
class Fetched:
    """A manifest or index as the registry has it: its descriptor (type, digest, size) and bytes, verified."""

    descriptor: Descriptor
    data: bytes


def open_repository(reference: Reference, *, push: bool = False, patience: Patience | None = None) -> Repository:
    """Return the reference's repository, set up from Docker's configuration, registries.conf and the environment.

    Nothing is asked of the network yet. With ``push``, mirrors are left out (what is missing in the registry itself
    must be found missing) and the right to push is asked for from the start.

    Raises:
        InputError: the machine's configuration files are wrong, or block the registry.

    """
    patience = patience or PATIENCE
    places = find_places(reference)

    def endpoint(place: Place) -> Endpoint:
        there = Reference(place.host, place.repository)
        return Endpoint(place, lambda: find_credentials(there), patience, push=push)

    mirrors = () if push else tuple(endpoint(mirror) for mirror in places.mirrors)
    return Repository(reference.name, endpoint(places.origin), mirrors)


class Repository:
    """One repository; safe to share between threads. ``name`` is ``registry/repository``, for messages."""

    def __init__(self, name: str, origin: Endpoint, mirrors: tuple[Endpoint, ...] = ()) -> None:
        self.name = name
        self._origin = origin
        self._mirrors = mirrors
        self._begun: dict[Digest, str] = {}

    @property
    def ranges(self) -> bool:
        """Whether asking for parts of blobs pays: False once somebody was seen to send the whole instead."""
        return all(endpoint.ranges for endpoint in (self._origin, *self._mirrors))

    def check(self) -> None:
        """Raise unless the registry answers, is a registry, and takes our credentials for this repository."""
        what = f"{self.name}: checking the registry"
        try:
            with self._origin.ask(Ask("GET", "/v2/", what)):
                pass
        except NotInRegistryError as error:
            raise WrongAnswerError(f"{self._origin.place.host}: is no registry (status {error.status})") from error

    def resolve(self, target: str) -> Descriptor | None:
        """Return the descriptor of a tag or digest (HEAD), None when the repository has none."""
        check_target(self.name, target)

        def ask(endpoint: Endpoint) -> Descriptor:
            what = self._what(target)
            with endpoint.ask(Ask("HEAD", f"manifests/{target}", what, _HEAD, {"Accept": _ACCEPT})) as response:
                found = _descriptor_of_head(response, target)
            if response.status_code == 404:
                raise NotInRegistryError(f"{what}: the registry has none (status 404)", status=404)
            return found or self._manifest(endpoint, target).descriptor

        try:
            return self._first(ask, target)
        except NotInRegistryError:
            return None

    def manifest(self, target: str) -> Fetched:
        """Return a manifest or index by tag or digest ("Pulling manifests").

        Raises:
            NotInRegistryError: there is none.
            WrongAnswerError: its bytes do not have the digest that was asked for or that the registry states.

        """
        check_target(self.name, target)
        return self._first(lambda endpoint: self._manifest(endpoint, target), target)

    def put_manifest(self, data: bytes, media_type: str, target: str) -> Digest:
        """Put a manifest or index under a tag or its digest ("Pushing Manifests"). Its blobs must be there.

        One with a ``subject`` is found by ``referrers`` afterwards, also on registries without the referrers API.
        """
        check_target(self.name, target)
        digest, what = Digest.of(data), f"{self.name}: putting the manifest {target}"
        if target.startswith("sha256:") and target != str(digest):
            raise WrongAnswerError(f"{what}: its digest is {digest}")
        headers = {"Content-Type": media_type}
        ask = Ask("PUT", f"manifests/{target}", what, frozenset({201}), headers, lambda: data, push=True)
        with self._origin.ask(ask) as response:
            stated = response.headers.get("Docker-Content-Digest", str(digest))
            knows_referrers = "OCI-Subject" in response.headers
        if stated.startswith("sha256:") and stated != str(digest):
            raise WrongAnswerError(f"{what}: the registry made something else of it, {stated} instead of {digest}")
        subject = subject_of(data)
        if subject is not None and not knows_referrers:
            add_by_tag(self._origin, subject, data, media_type)
        return digest

    def has_blob(self, digest: Digest) -> bool:
        """Return whether the registry itself (not a mirror) has the blob in this repository."""
        return has_blob(self._origin, digest)

    def mount(self, digest: Digest, source: str) -> bool:
        """Take over a blob from another repository (``team/other``) of this registry; False when it did not.

        Section "Mounting a blob from another repository". A registry that does not, or not for us, begins an upload
        instead, which ``put_blob`` goes on with.
        """
        check_repository(f"{self._origin.place.host}/{source}", source)
        what = f"{self.name}: mounting {digest} from {source}"
        path = f"blobs/uploads/?mount={digest}&from={source}"
        ask = Ask("POST", path, what, frozenset({201, 202}), push=True, mounts=source)
        try:
            with self._origin.ask(ask) as response:
                if response.status_code == 202 and "Location" in response.headers:
                    self._begun[digest] = self._origin.absolute(response.headers["Location"], response, what)
                return response.status_code == 201
        except (AccessRefusedError, NotInRegistryError, RejectedError) as error:
            report.detail(error.message)  # not the right to read there, or no such repository: then it is uploaded
            return False

    def put_blob(self, digest: Digest, size: int, source: BlobSource, progress: Callable[[int], None]) -> None:
        """Upload a blob that is not there. ``progress`` is told of bytes sent; negative when they must be sent again.

        Raises:
            RegistryError: of the kind that the failure is, after repetitions.
            UnreadableBlobError: the source fails.

        """
        upload(self._origin, Outgoing(digest, size, source, progress), self._begun.pop(digest, None))

    def read_blob(
        self, digest: Digest, start: int = 0, stop: int | None = None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Give the bytes [start, stop) of a blob (to the end with None), continued after breaks; the caller verifies.

        Errors are raised while iterating. Pieces have at most ``http.CHUNK`` bytes.
        """
        return closing(self._pieces(digest, start, stop))

    def blob(self, digest: Digest) -> bytes:
        """Return a small blob whole, verified."""

        def read(endpoint: Endpoint) -> bytes:
            pieces, size, what = [], 0, self._what(str(digest))
            for piece in reading.stream(endpoint, digest, 0, None):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_BODY:
                    raise WrongAnswerError(f"{what}: is larger than {MOST_BODY} bytes")
            data = b"".join(pieces)
            if Digest.of(data) != digest:
                raise WrongAnswerError(f"{what}: the registry sends other bytes, {Digest.of(data)}")
            return data

        return self._first(read, str(digest))

    def tags(self) -> Iterator[str]:
        """Yield all tags in the registry's order ("Listing Tags"), page by page."""
        what = f"{self.name}: listing tags"
        url: str | None = f"tags/list?n={_PAGE}"
        for _ in range(_MOST_PAGES):
            if url is None:
                return
            response, data = self._origin.read(Ask("GET", url, what))
            try:
                tags = [str(tag) for tag in json.loads(data)["tags"] or []]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise WrongAnswerError(f"{what}: the registry's list is not valid") from error
            yield from tags
            following = response.links.get("next", {}).get("url")
            url = self._origin.absolute(following, response, what) if following else None
        raise WrongAnswerError(f"{what}: the list does not end")

    def referrers(self, digest: Digest, artifact_type: str | None = None) -> list[Descriptor]:
        """Return what refers to a manifest ("Listing Referrers"), filtered by artifact type."""
        return [referrer.descriptor for referrer in list_referrers(self._origin, digest, artifact_type)]

    def _what(self, target: str) -> str:
        return f"{self.name}{'@' if target.startswith('sha256:') else ':'}{target}"

    def _readers(self, target: str) -> list[Endpoint]:
        """Return where to read from, in order; the registry itself is the last."""
        by_digest = target.startswith("sha256:")
        mirrors = [m for m in self._mirrors if not m.failed and (m.place.digests if by_digest else m.place.tags)]
        return [*mirrors, self._origin]

    def _first(self, read: Callable[[Endpoint], T], target: str) -> T:
        *mirrors, origin = self._readers(target)
        for mirror in mirrors:
            try:
                return read(mirror)
            except RegistryError as error:
                _give_up(mirror, error)
        return read(origin)

    def _pieces(self, digest: Digest, start: int, stop: int | None) -> Generator[bytes, None, None]:
        *mirrors, origin = self._readers(str(digest))
        for mirror in mirrors:
            try:
                for piece in reading.stream(mirror, digest, start, stop):
                    start += len(piece)
                    yield piece
            except RegistryError as error:
                _give_up(mirror, error)
            else:
                return
        yield from reading.stream(origin, digest, start, stop)

    def _manifest(self, endpoint: Endpoint, target: str) -> Fetched:
        what = self._what(target)
        response, data = endpoint.read(Ask("GET", f"manifests/{target}", what, headers={"Accept": _ACCEPT}))
        digest = Digest.of(data)
        stated = target if target.startswith("sha256:") else response.headers.get("Docker-Content-Digest", "")
        if stated.startswith("sha256:") and stated != str(digest):
            raise WrongAnswerError(f"{what}: the registry sends other bytes, {digest} instead of {stated}")
        return Fetched(Descriptor(_media_type(response, data, what), digest, len(data)), data)


def _give_up(mirror: Endpoint, error: RegistryError) -> None:
    """Go on without a mirror: for this time when it only lacks something, for good when it fails."""
    if isinstance(error, NotInRegistryError):
        report.detail(f"{error.message}; asking the next")
    else:
        mirror.failed = True
        report.warning(f"the mirror {mirror.place.host} is left out: {error.message}")


def _descriptor_of_head(response: requests.Response, target: str) -> Descriptor | None:
    """Return the descriptor that an answer to HEAD states; None when it states too little, or something else."""
    stated = response.headers.get("Docker-Content-Digest", "")
    media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
    size = response.headers.get("Content-Length", "")
    if response.status_code != 200 or media_type not in _TYPES or not size.isdecimal():
        return None
    try:
        digest = Digest.parse(stated)
    except ValueError:
        return None
    by_digest = target.startswith("sha256:")
    return None if by_digest and stated != target else Descriptor(media_type, digest, int(size))


def _media_type(response: requests.Response, data: bytes, what: str) -> str:
    """Return a manifest's media type; what the header and the document say must not differ (CVE-2021-41190)."""
    header = response.headers.get("Content-Type", "").partition(";")[0].strip()
    try:
        inside = json.loads(data).get("mediaType")
    except (ValueError, AttributeError, RecursionError) as error:
        raise WrongAnswerError(f"{what}: the registry's answer is no manifest") from error
    if inside and header in _TYPES and inside != header:
        raise WrongAnswerError(f"{what}: the registry says it is `{header}`, the manifest says another type")
    return header if header in _TYPES or not inside else str(inside)
