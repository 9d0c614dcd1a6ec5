"""The images of a store at a glance: how large, what they share, whether they are unpacked, when they were last used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.store.marks import blobs_of
from envbuilder.store.pins import pinned

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.oci.digest import Digest
    from envbuilder.store.store import Store


@dataclass(frozen=True)
class ImageEntry:
    """An image: compressed bytes in all, those that no other image of the store has, and time of last use (seconds).

    ``used`` is None when the manifest is not in the store.
    """

    name: str
    digest: Digest
    size: int
    own: int
    unpacked: bool
    pinned: bool
    used: float | None


def image_entries(store: Store) -> list[ImageEntry]:
    """Return the images of the store, sorted by name."""
    images = store.images()
    sizes = {digest: _blobs(store, digest) for digest in set(images.values())}
    users = Counter(blob for blobs in sizes.values() for blob in blobs)
    pins = pinned(store)
    found = []
    for name, digest in sorted(images.items()):
        blobs = sizes[digest]
        root = store.root / "roots" / digest.hex
        own = sum(size for blob, size in blobs.items() if users[blob] == 1)
        used = max((t for t in (_used(store.blob(digest)), _used(root)) if t is not None), default=None)
        found.append(ImageEntry(name, digest, sum(blobs.values()), own, root.exists(), digest in pins, used))
    return found


def shared_bytes(store: Store) -> int:
    """Return the bytes of the blobs that more than one image has, each counted once."""
    images = [_blobs(store, digest) for digest in set(store.images().values())]
    users = Counter(blob for blobs in images for blob in blobs)
    sizes = {blob: size for blobs in images for blob, size in blobs.items()}
    return sum(size for blob, size in sizes.items() if users[blob] > 1)


def _blobs(store: Store, image: Digest) -> dict[Digest, int]:
    config, layers = blobs_of(store, image)
    return {entry.digest: entry.size for entry in (*config, *layers)}


def _used(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
