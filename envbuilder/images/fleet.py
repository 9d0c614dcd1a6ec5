"""What hosts must still fetch to have images, and what that costs a registry: arithmetic over lists of layers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.images.explain import content

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from envbuilder.images.layering import Stage
    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Image, Manifest
    from envbuilder.system.debian import SystemPlan


@dataclass(frozen=True)
class Piece:
    """What is fetched as one. Pieces of equal ``id`` are the same; sizes in bytes, ``unpacked`` None when not known."""

    id: str
    title: str
    size: int
    unpacked: int | None = None


@dataclass(frozen=True)
class Listing:
    """An image by its pieces, from the base up. ``estimated``: by its lock, because it was not built yet."""

    name: str
    pieces: tuple[Piece, ...]
    estimated: bool = False

    @property
    def size(self) -> int:
        """Bytes of all pieces, each once."""
        return sum(piece.size for piece in _distinct(self.pieces))


@dataclass(frozen=True)
class Share:
    """What one image adds to what a host has by then: the pieces ``missing``."""

    listing: Listing
    missing: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return sum(piece.size for piece in self.missing)

    @property
    def unpacked(self) -> int:
        """Bytes that what is fetched takes when unpacked, as far as that is known: see ``unmeasured``."""
        return sum(piece.unpacked for piece in self.missing if piece.unpacked is not None)

    @property
    def unmeasured(self) -> int:
        """How many of the pieces to fetch are of unknown size when unpacked."""
        return sum(piece.unpacked is None for piece in self.missing)


@dataclass(frozen=True)
class FleetPlan:
    """What ``hosts`` hosts that have the images ``having`` must fetch for others, one after the other."""

    having: tuple[str, ...]
    shares: tuple[Share, ...]
    hosts: int

    @property
    def size(self) -> int:
        """Bytes that each host fetches: also what a registry gives away once when mirrors or peers do the rest."""
        return sum(share.size for share in self.shares)

    @property
    def total(self) -> int:
        """Bytes that the registry gives away when every host asks it alone."""
        return self.size * self.hosts

    def seconds(self, size: int, gigabits: float) -> float:
        """Return how long ``size`` bytes take at ``gigabits`` (1e9 bits) a second."""
        return size * 8 / (gigabits * 1e9)


def fleet_plan(wanted: Sequence[Listing], having: Sequence[Listing], hosts: int = 1) -> FleetPlan:
    """Return what must be fetched. What an image shares with those before it is fetched once."""
    there = {piece.id for listing in having for piece in listing.pieces}
    shares = []
    for listing in wanted:
        missing = tuple(piece for piece in _distinct(listing.pieces) if piece.id not in there)
        there |= {piece.id for piece in missing}
        shares.append(Share(listing, missing))
    return FleetPlan(tuple(listing.name for listing in having), tuple(shares), hosts)


def listing_of_image(name: str, image: Image, tar_sizes: Mapping[Digest, int]) -> Listing:
    """Return the layers of an image; ``tar_sizes`` has the uncompressed size of those of which it is known."""
    histories = image.config.layer_history
    pieces = (
        Piece(
            id=str(layer.digest),
            title=history.created_by.removeprefix("envbuilder: ") or f"layer {number}",
            size=layer.size,
            unpacked=tar_sizes.get(layer.digest),
        )
        for number, (layer, history) in enumerate(zip(image.manifest.layers, histories, strict=True), start=1)
    )
    return Listing(name, tuple(pieces))


def listing_of_manifest(name: str, manifest: Manifest) -> Listing:
    """Return the layers of an image of which only the manifest is at hand."""
    layers = enumerate(manifest.layers, start=1)
    return Listing(name, tuple(Piece(str(layer.digest), f"layer {number}", layer.size) for number, layer in layers))


def listing_of_plan(name: str, stages: Iterable[Stage], system: SystemPlan | None) -> Listing:
    """Estimate the layers of an image that was not built: each weighs what its packages' files do.

    The interpreter and the metadata are left out: nothing says what they weigh before a build.
    """
    pieces = []
    if system is not None:
        title = f"{system.distribution} {system.suite}, {len(system.packages)} packages"
        pieces.append(Piece(system.layer_key, title, sum(package.size for package in system.packages)))
    for group in (group for stage in stages for group in stage.groups):
        key = hashlib.sha256("\n".join(content(group)).encode()).hexdigest()
        pieces.append(Piece(key, group.title, group.size))
    return Listing(name, tuple(pieces), estimated=True)


def _distinct(pieces: Iterable[Piece]) -> list[Piece]:
    return list({piece.id: piece for piece in pieces}.values())
