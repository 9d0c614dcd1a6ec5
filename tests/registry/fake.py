"""An OCI registry in this process, on 127.0.0.1, that can be told to fail. Use it through ``tests.registries``."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from envbuilder.oci.digest import Digest
from envbuilder.oci.model import MANIFEST, Descriptor, canonical_json

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests that match, after ``after`` of them went well.

    ``match`` is a glob for ``METHOD /path``, such as ``GET */blobs/*`` or ``PATCH *``. An answer: ``status`` with
    ``code`` and ``retry_after``; else what would be answered, but ``cut`` off after so many bytes of the body (with
    ``reset`` as a broken connection; ``cut=-1`` closes before any answer, after the work was done), ``corrupt`` (the
    last byte inverted), ``short`` (so many bytes fewer, and a Content-Length that agrees), ``slow`` (so many seconds
    before each 64 KiB), ``drip`` (the same, before each 100 bytes), ``digest`` (another one stated), ``body`` (another one altogether). For requests with a body: ``take`` reads so many bytes of it,
    keeps them, and breaks the connection.
    """

    match: str
    status: int | None = None
    code: str = "UNKNOWN"
    message: str = "told to fail"
    retry_after: str | None = None
    cut: int | None = None
    reset: bool = False
    corrupt: bool = False
    short: int = 0
    slow: float = 0.0
    drip: float = 0.0
    digest: str | None = None
    body: bytes | None = None
    take: int | None = None
    after: int = 0
    times: int = 1_000_000


@dataclass(frozen=True)
class Request:
    """A request that the registry has seen: ``path`` without query, header names in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class FakeRegistry:
    """A running registry. Attributes may be changed at any time; content may be put in with ``add_*`` and looked at.

    Who may come in: ``credentials`` (user and password) and ``identity_token`` are asked for by ``Basic``, or with
    ``tokens`` by a token server at ``/token`` (tokens last ``token_seconds``; ``anonymous`` ones may pull).
    What it can do: ``ranges``, ``mounts``, ``chunks`` (PATCH; ``chunk_least`` is stated as OCI-Chunk-Min-Length),
    ``referrers`` (the API), ``states_digest``, ``checks_manifests`` (their blobs must be there), ``page`` (most tags and referrers in an answer),
    ``redirects`` (blobs are read from ``objects``, a server on another port that answers 400 to credentials),
    ``absolute`` (upload locations with scheme and host).
    """

    credentials: tuple[str, str] | None = None
    identity_token: str | None = None
    tokens: bool = False
    token_seconds: float = 300.0
    anonymous: bool = False
    ranges: bool = True
    mounts: bool = True
    chunks: bool = True
    chunk_least: int | None = None
    referrers: bool = True
    states_digest: bool = True
    checks_manifests: bool = True
    page: int = 1000
    redirects: bool = False
    absolute: bool = False
    tls: ssl.SSLContext | None = None
    address: str = ""
    objects: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    #: Requests at the object store.
    object_requests: list[Request] = field(default_factory=list)
    #: Repository -> digest -> bytes; repository -> digest -> (media type, bytes); repository -> tag -> digest.
    blobs: dict[str, dict[str, bytes]] = field(default_factory=dict)
    manifests: dict[str, dict[str, tuple[str, bytes]]] = field(default_factory=dict)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Upload session -> what has arrived.
    uploads: dict[str, bytearray] = field(default_factory=dict)
    #: Token -> (its scopes, when it ends).
    given: dict[str, tuple[frozenset[str], float]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def reference(self, repository: str, tag: str = "v1") -> str:
        """Return an image's reference here."""
        return f"{self.address}/{repository}:{tag}"

    def fail(self, match: str, **how: Any) -> Fault:
        """Add a fault and return it (``registry.faults.remove(fault)`` ends it)."""
        fault = Fault(match, **how)
        self.faults.append(fault)
        return fault

    def lines(self, match: str = "*") -> list[str]:
        """Return the requests so far that match, as ``METHOD /path``."""
        return [request.line for request in list(self.requests) if fnmatchcase(request.line, match)]

    def add_blob(self, repository: str, data: bytes) -> Digest:
        """Put in a blob."""
        digest = Digest.of(data)
        with self.lock:
            self.blobs.setdefault(repository, {})[str(digest)] = data
        return digest

    def add_manifest(self, repository: str, data: bytes, tag: str | None = None, media_type: str = MANIFEST) -> Digest:
        """Put in a manifest or index, under a tag where one is given."""
        digest = Digest.of(data)
        with self.lock:
            self.manifests.setdefault(repository, {})[str(digest)] = (media_type, data)
            if tag is not None:
                self.tags.setdefault(repository, {})[tag] = str(digest)
        return digest

    def add_image(self, repository: str, tag: str, *layers: bytes) -> Digest:
        """Put in an image of some layers whose configuration says nothing."""
        parts = [(b"{}", "application/vnd.oci.image.config.v1+json")]
        parts += [(layer, "application/vnd.oci.image.layer.v1.tar+gzip") for layer in layers]
        described = [Descriptor(kind, self.add_blob(repository, data), len(data)).to_json() for data, kind in parts]
        document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described[0], "layers": described[1:]}
        return self.add_manifest(repository, canonical_json(document), tag)

    def damage(self, repository: str, digest: Digest) -> None:
        """Invert the last byte of a blob that is kept."""
        with self.lock:
            data = self.blobs[repository][str(digest)]
            self.blobs[repository][str(digest)] = data[:-1] + bytes([data[-1] ^ 0xFF])

    def expire_tokens(self) -> None:
        """Let every token that was given be too old."""
        with self.lock:
            self.given = {token: (scopes, 0.0) for token, (scopes, _) in self.given.items()}

    def lose_uploads(self) -> None:
        """Forget every upload session."""
        with self.lock:
            self.uploads.clear()

    def take_fault(self, line: str) -> Fault:
        """Return the fault in force for a request, counting it down; a harmless one when there is none."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fnmatchcase(line, fault.match):
                    if fault.after > 0:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return Fault(line)

    def new_token(self, scopes: frozenset[str]) -> str:
        """Give a token for the scopes."""
        with self.lock:
            token = f"token-{len(self.given)}-{hashlib.sha256(repr(sorted(scopes)).encode()).hexdigest()[:8]}"
            self.given[token] = (scopes, time.monotonic() + self.token_seconds)
            return token

    def allows(self, token: str, repository: str, action: str) -> bool:
        """Return whether a token is good for an action (``pull``, ``push``) on a repository."""
        with self.lock:
            scopes, until = self.given.get(token, (frozenset[str](), 0.0))
        if time.monotonic() >= until:
            return False
        return not repository or any(
            scope.startswith(f"repository:{repository}:") and action in scope.rpartition(":")[2].split(",")
            for scope in scopes
        )

    def referring(self, repository: str, subject: str) -> list[dict[str, Any]]:
        """Return the descriptors of the manifests that refer to ``subject``, sorted."""
        found = []
        with self.lock:
            manifests = sorted(self.manifests.get(repository, {}).items())
        for digest, (media_type, data) in manifests:
            document = json.loads(data)
            if (document.get("subject") or {}).get("digest") == subject:
                kind = document.get("artifactType") or document.get("config", {}).get("mediaType", "")
                found.append({
                    "mediaType": media_type, "digest": digest, "size": len(data), "artifactType": kind,
                    "annotations": document.get("annotations") or {},
                })  # fmt: skip
        return found


@contextmanager
def serve(registry: FakeRegistry) -> Iterator[FakeRegistry]:
    """Serve the registry and its object store until the block ends."""
    from tests.registry.fakeserver import ObjectHandler, RegistryHandler, start  # noqa: PLC0415 (it imports this module)

    with start(RegistryHandler, registry, registry.tls) as address, start(ObjectHandler, registry, None) as objects:
        registry.address, registry.objects = address, objects
        yield registry
