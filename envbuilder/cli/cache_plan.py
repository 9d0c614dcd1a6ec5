"""``envbuilder cache plan``: what hosts must still fetch, and what that costs a registry."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envbuilder.images.fleet import FleetPlan, Listing, Piece, Share
    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Manifest
    from envbuilder.registry.reference import Reference
    from envbuilder.spec.catalog import Catalog
    from envbuilder.store.store import Store


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "An image is an environment, the name of an image in the store, or a reference (registry/repository:tag), of\n"
        "which only the manifest is read. If one of the environments was not built on this machine, all are estimated\n"
        "by their locks: a layer weighs what its packages' files do, and the interpreter is left out.\n\n"
        "example: envbuilder cache plan ai-v4 --have base-v4 --hosts 2000 --bandwidth 25"
    )
    parser.add_argument("images", nargs="+", metavar="ENV|REF", help="what the hosts are to have")
    parser.add_argument("--have", action="append", nargs="+", default=[], metavar="ENV|REF", help="what they have")
    parser.add_argument("--hosts", type=_at_least_one, default=1, metavar="N", help="how many hosts (1)")
    parser.add_argument(
        "--bandwidth", type=_positive, default=10.0, metavar="GBIT", help="of the registry, in Gbit a second (10)"
    )


def run(args: argparse.Namespace) -> int:
    """Print what each image adds, and the sums for a host and for all."""
    from envbuilder.images.fleet import fleet_plan

    having = [name for names in args.have for name in names]
    wanted, had = _listings(args.images, having)
    plan = fleet_plan(wanted, had, args.hosts)
    if args.json:
        print(json.dumps(_document(plan, args.bandwidth), indent=2))
        return 0
    _show(plan, args.bandwidth)
    return 0


def _listings(wanted: Sequence[str], having: Sequence[str]) -> tuple[list[Listing], list[Listing]]:
    """Return the layers of all images, all as they were built or all estimated."""
    from envbuilder import report

    reader = _Reader()
    names = list(dict.fromkeys([*wanted, *having]))
    if estimated := [name for name in names if reader.needs_estimate(name)]:
        report.warning(f"{', '.join(estimated)}: not built on this machine, so all sizes are estimates by the locks")
    found = {name: reader.estimate(name) if estimated else reader.built(name) for name in names}
    return [found[name] for name in wanted], [found[name] for name in having]


@dataclass(frozen=True)
class _Reader:
    """Finds the layers of images by name."""

    @cached_property
    def store(self) -> Store:
        from envbuilder.store.store import Store, default_root

        return Store(default_root())

    @cached_property
    def catalog(self) -> Catalog:
        from envbuilder.spec.catalog import find_catalog

        return find_catalog(Path.cwd())

    @cached_property
    def tar_sizes(self) -> Mapping[Digest, int]:
        from envbuilder.images.packages import tar_sizes

        return tar_sizes(self.store)

    def needs_estimate(self, name: str) -> bool:
        """Return whether there is only a lock to go by."""
        return name in self.catalog.names() and self.store.find_image(name) is None

    def built(self, name: str) -> Listing:
        """Return the layers of an image of the store, or of a registry."""
        from envbuilder.images.fleet import listing_of_image, listing_of_manifest

        if (digest := self.store.find_image(name)) is not None:
            return listing_of_image(name, self.store.image(digest), self.tar_sizes)
        from envbuilder.errors import InputError, did_you_mean
        from envbuilder.registry.reference import Reference

        if "/" not in name:
            known = [*self.catalog.names(), *self.store.images()]
            raise InputError(f"no environment and no image is named `{name}`", hint=did_you_mean(name, known))
        return listing_of_manifest(name, _manifest(Reference.parse(name)))

    def estimate(self, name: str) -> Listing:
        """Return the layers of an environment by its lock."""
        from envbuilder.cli.build import read_source
        from envbuilder.errors import InputError
        from envbuilder.images.build import stages_of
        from envbuilder.images.fleet import listing_of_plan

        if name not in self.catalog.names():
            raise InputError(
                f"`{name}` cannot be compared with environments that were not built: it has no lock",
                hint="build the environments first, or pull them",
            )
        source = read_source(self.catalog, name)
        return listing_of_plan(name, stages_of(source), source.system.plan if source.system is not None else None)


def _manifest(reference: Reference) -> Manifest:
    """Return an image's manifest as a registry has it, of an index the one for this machine."""
    from envbuilder.oci.model import DOCKER_INDEX, INDEX, Index, Manifest
    from envbuilder.oci.platform import choose, this_platform
    from envbuilder.registry.client import open_repository

    repository = open_repository(reference)
    found = repository.manifest(reference.target)
    if found.descriptor.media_type in {INDEX, DOCKER_INDEX}:
        chosen = choose(Index.from_bytes(found.data), this_platform(), str(reference))
        found = repository.manifest(str(chosen.digest))
    return Manifest.from_bytes(found.data)


def _show(plan: FleetPlan, bandwidth: float) -> None:
    from envbuilder.cli.console import format_size, show_table

    rows = [
        (
            f"{share.listing.name}{' (estimate)' if share.listing.estimated else ''}",
            str(len(share.listing.pieces)),
            format_size(share.listing.size),
            str(len(share.missing)),
            format_size(share.size),
            _unpacked(share),
        )
        for share in plan.shares
    ]
    show_table(("image", "layers", "size", "to fetch", "bytes", "unpacked"), rows)
    having = f"has {', '.join(plan.having)}" if plan.having else "has nothing"
    print(f"a host that {having} fetches {format_size(plan.size)}")
    speed = f"at {bandwidth:g} Gbit/s"
    alone, once = (_time(plan.seconds(size, bandwidth)) for size in (plan.total, plan.size))
    print(f"{_hosts(plan)} cost one registry {_large(plan.total)}: {alone} {speed}")
    if plan.hosts > 1:
        print(f"it gives {format_size(plan.size)} once, {once}, when a mirror or the hosts themselves do the rest")


def _document(plan: FleetPlan, bandwidth: float) -> dict[str, Any]:
    return {
        "schema": 1,
        "have": list(plan.having),
        "estimated": any(share.listing.estimated for share in plan.shares),
        "images": [
            {
                "name": share.listing.name,
                "layers": len(share.listing.pieces),
                "bytes": share.listing.size,
                "fetch": {"layers": [_piece(piece) for piece in share.missing], "bytes": share.size},
                "unpacked": {"bytes": share.unpacked, "layers-not-known": share.unmeasured},
            }
            for share in plan.shares
        ],
        "host": {"bytes": plan.size},
        "registry": {
            "hosts": plan.hosts,
            "bytes": plan.total,
            "gigabits-per-second": bandwidth,
            "seconds": round(plan.seconds(plan.total, bandwidth), 3),
            "seconds-once": round(plan.seconds(plan.size, bandwidth), 3),
        },
    }


def _piece(piece: Piece) -> dict[str, Any]:
    return {"id": piece.id, "title": piece.title, "bytes": piece.size, "unpacked-bytes": piece.unpacked}


def _unpacked(share: Share) -> str:
    from envbuilder.cli.console import format_size

    if share.unmeasured == len(share.missing) > 0:
        return "-"
    return f"{'at least ' if share.unmeasured else ''}{format_size(share.unpacked)}"


def _large(size: int) -> str:
    from envbuilder.cli.console import format_size

    return f"{size / 1e12:.3g} TB" if size >= 1e12 else format_size(size)


def _hosts(plan: FleetPlan) -> str:
    return "1 host" if plan.hosts == 1 else f"{plan.hosts} hosts"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, not `{text}`")
    return int(text)


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, not `{text}`")
