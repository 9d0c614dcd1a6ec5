"""What refers to a manifest: by the referrers API, or by the index under the tag ``sha256-<hex>`` where that is missing.

Follows the sections "Listing Referrers" and "Pushing Manifests with Subject", with "Referrers Tag Schema" as fallback.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envbuilder import report
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import INDEX, Descriptor, ImageFormatError, canonical_json
from envbuilder.registry.endpoint import Ask
from envbuilder.registry.errors import NotInRegistryError, RegistryUnreachableError, RejectedError, WrongAnswerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from envbuilder.registry.endpoint import Endpoint

_MOST_PAGES = 1000
_ATTEMPTS = 4


@dataclass(frozen=True)
class Referrer:
    """An entry of an index of referrers. ``document`` is its JSON object, kept whole: others may have put more in it."""

    descriptor: Descriptor
    artifact_type: str
    document: Mapping[str, Any]


def list_referrers(endpoint: Endpoint, digest: Digest, artifact_type: str | None) -> list[Referrer]:
    """Return what refers to a manifest, in the registry's order, filtered here: registries need not."""
    what = f"{endpoint.place.host}/{endpoint.place.repository}: referrers of {digest}"
    found = _by_api(endpoint, digest, artifact_type, what)
    if found is None:
        found = _by_tag(endpoint, digest, what)
    return [referrer for referrer in found if artifact_type is None or referrer.artifact_type == artifact_type]


def subject_of(data: bytes) -> Digest | None:
    """Return the digest of what a manifest refers to; None when it refers to nothing."""
    try:
        subject = json.loads(data).get("subject")
        return None if subject is None else Digest.parse(subject["digest"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def add_by_tag(endpoint: Endpoint, subject: Digest, data: bytes, media_type: str) -> None:
    """Enter a manifest that refers to ``subject`` into the index under the subject's tag.

    Nobody can lock a tag. So it is read again afterwards, and written again when another client's index replaced ours.
    """
    what = f"{endpoint.place.host}/{endpoint.place.repository}: index of what refers to {subject}"
    entry = _entry(data, media_type)
    for _ in range(_ATTEMPTS):
        known = _by_tag(endpoint, subject, what)
        if any(referrer.document == entry for referrer in known):
            return
        others = [dict(referrer.document) for referrer in known if str(referrer.descriptor.digest) != entry["digest"]]
        manifests = sorted([*others, entry], key=lambda document: str(document["digest"]))
        _put(endpoint, subject, canonical_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}), what)
    if not any(referrer.document == entry for referrer in _by_tag(endpoint, subject, what)):
        raise RegistryUnreachableError(f"{what}: other clients replace it at the same time", hint="run again")


def _by_api(endpoint: Endpoint, digest: Digest, artifact_type: str | None, what: str) -> list[Referrer] | None:
    """Ask the referrers API; None when the registry has none."""
    # A media type has no other characters that a query would not take as they are.
    query = f"?artifactType={artifact_type.replace('+', '%2B')}" if artifact_type is not None else ""
    url: str | None = f"referrers/{digest}{query}"
    found: list[Referrer] = []
    for _ in range(_MOST_PAGES):
        if url is None:
            return found
        try:
            response, data = endpoint.read(Ask("GET", url, what, frozenset({200}), {"Accept": INDEX}))
        except (NotInRegistryError, RejectedError):
            return None  # registries without the API answer 404, 400 or 405
        if not response.headers.get("Content-Type", "").startswith(INDEX):
            report.detail(f"{what}: the registry answers with something else than an index")
            return None
        found += _read(data, what)
        following = response.links.get("next", {}).get("url")
        url = endpoint.absolute(following, response, what) if following else None
    raise WrongAnswerError(f"{what}: the list does not end")


def _by_tag(endpoint: Endpoint, digest: Digest, what: str) -> list[Referrer]:
    ask = Ask("GET", f"manifests/{_tag(digest)}", what, frozenset({200, 404}), {"Accept": INDEX})
    response, data = endpoint.read(ask)
    return [] if response.status_code == 404 else _read(data, what)


def _put(endpoint: Endpoint, subject: Digest, index: bytes, what: str) -> None:
    path, headers = f"manifests/{_tag(subject)}", {"Content-Type": INDEX}
    with endpoint.ask(Ask("PUT", path, what, frozenset({201}), headers, lambda: index, push=True)):
        pass


def _tag(digest: Digest) -> str:
    return f"sha256-{digest.hex}"


def _read(data: bytes, what: str) -> list[Referrer]:
    try:
        documents: Iterable[Any] = json.loads(data)["manifests"] or []
        return [
            Referrer(Descriptor.from_json(document), str(document.get("artifactType") or ""), document)
            for document in documents
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ImageFormatError) as error:
        raise WrongAnswerError(f"{what}: the registry's index is not valid") from error


def _entry(data: bytes, media_type: str) -> dict[str, Any]:
    """Return the entry that the specification wants: the manifest's artifact type, else its configuration's type."""
    manifest = json.loads(data)
    entry = Descriptor(media_type, Digest.of(data), len(data), dict(manifest.get("annotations") or {})).to_json()
    artifact_type = manifest.get("artifactType") or (manifest.get("config") or {}).get("mediaType")
    return entry | ({"artifactType": artifact_type} if artifact_type else {})
