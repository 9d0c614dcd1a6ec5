"""What leads to what: from names, pins and leases to manifests, configurations and layers.

Everything is read as it lies there, past the leases: who only looks does not want to keep.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from envbuilder.oci.digest import Digest
from envbuilder.oci.model import Descriptor, ImageFormatError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from envbuilder.store.store import Store

#: A document is at most so large; registries refuse larger manifests.
_LARGEST_DOCUMENT = 16 << 20


def reach(store: Store, roots: Iterable[Digest]) -> set[Digest]:
    """Return the roots and all blobs that they lead to. Trees and roots are named by digests of these."""
    found: set[Digest] = set()
    pending = list(roots)
    while pending:
        digest = pending.pop()
        if digest not in found:
            found.add(digest)
            pending += below(store, digest)
    return found


def below(store: Store, digest: Digest) -> list[Digest]:
    """Return the blobs that a blob refers to: a manifest or an index others, everything else none."""
    document = read_document(store.blob(digest))
    if document is None:
        return []
    entries = [document.get("config"), document.get("subject")]
    for key in ("layers", "manifests", "blobs"):
        listed = document.get(key)
        entries += listed if isinstance(listed, list) else []
    texts = [entry.get("digest") for entry in entries if isinstance(entry, dict)]
    return list(_digests(texts))


def blobs_of(store: Store, image: Digest) -> tuple[list[Descriptor], list[Descriptor]]:
    """Return what a manifest says of its configuration (at most one) and its layers; nothing when it is unreadable."""
    document = read_document(store.blob(image)) or {}
    listed = document.get("layers")
    config, layers = [document.get("config")], listed if isinstance(listed, list) else []
    return list(_descriptors(config)), list(_descriptors(layers))


def read_document(path: Path) -> dict[str, Any] | None:
    """Return a blob as a JSON object; None when it is none, or absent."""
    try:
        with path.open("rb") as file:
            if file.read(1) != b"{":
                return None
            data = b"{" + file.read(_LARGEST_DOCUMENT)
        document = json.loads(data)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def known_files(store: Store) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Yield the files of what is known with what they hold, None when it is no JSON object."""
    for path in sorted((store.root / "known").glob("*/*.json")):
        document = read_document(path)
        if document is not None or path.exists():
            yield path, document


def is_broken(store: Store, document: dict[str, Any] | None, gone: Collection[Digest] = ()) -> bool:
    """Return whether what is known is worth nothing: unreadable, or of a blob or a folder that is absent or ``gone``."""
    if document is None:
        return True
    digest, folder = leads_to(document), document.get("folder")
    if digest is not None and (digest in gone or not store.blob(digest).exists()):
        return True
    return isinstance(folder, str) and not (store.root / folder).exists()


def leads_to(document: dict[str, Any]) -> Digest | None:
    """Return the blob that an entry of what is known leads to, if it leads to one."""
    return next(_digests([document.get("digest")]), None)


def _descriptors(entries: Iterable[object]) -> Iterator[Descriptor]:
    for entry in entries:
        if isinstance(entry, dict):
            with suppress(ImageFormatError):
                yield Descriptor.from_json(entry)


def _digests(texts: Iterable[object]) -> Iterator[Digest]:
    for text in texts:
        if isinstance(text, str):
            with suppress(ValueError):
                yield Digest.parse(text)
