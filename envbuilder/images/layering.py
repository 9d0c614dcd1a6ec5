"""Which wheels go into which layer: a pure function with a total order and a budget.

Big wheels lie alone, heaviest first. The others fall into buckets by a stable hash of their name, so that one update
touches one bucket. An environment that extends another begins with that one's layers. No outside data.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envbuilder.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.lock.model import Lock, Package
    from envbuilder.spec.recipe import Layering

#: Layers beside those with packages: system, interpreter, and one of metadata for each environment in the chain.
_OTHER_LAYERS = 4


class LayerBudgetError(InputError):
    """The plan needs more layers than the recipe allows."""


@dataclass(frozen=True)
class Group:
    """The packages of one layer, sorted by name, and what the layer is called."""

    title: str
    packages: tuple[Package, ...]

    @property
    def size(self) -> int:
        """Bytes of the packages' files."""
        return sum(package.size for package in self.packages)


@dataclass(frozen=True)
class Stage:
    """The layers that one environment of the chain adds; a metadata layer follows them."""

    lock: Lock
    groups: tuple[Group, ...]


def plan(lock: Lock, parent: Lock | None, layering: Layering) -> tuple[Stage, ...]:
    """Return the stages of an image: what it extends, then its own.

    Raises:
        LayerBudgetError: more layers than the budget; it says what takes them and which setting helps.

    """
    inherited = {package.name for package in parent.packages} if parent is not None else set()
    own = [package for package in lock.packages if package.name not in inherited]
    shares = [(lock, own)] if parent is None else [(parent, parent.packages), (lock, own)]
    _check_budget([packages for _, packages in shares], layering)
    return tuple(Stage(of, _groups(packages, layering)) for of, packages in shares)


def bucket_of(name: str, buckets: int) -> int:
    """Return the bucket of a small package: a function of its canonical name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % buckets


def _groups(packages: Sequence[Package], layering: Layering) -> tuple[Group, ...]:
    big = sorted((p for p in packages if p.size >= layering.alone), key=lambda p: (-p.size, p.name))
    small: dict[int, list[Package]] = {}
    for package in sorted(packages, key=lambda p: p.name):
        if package.size < layering.alone:
            small.setdefault(bucket_of(package.name, layering.buckets), []).append(package)
    alone = (Group(f"{package.name} {package.version}", (package,)) for package in big)
    buckets = (
        Group(f"bucket {number}: {len(inner)} packages", tuple(inner)) for number, inner in sorted(small.items())
    )
    return (*alone, *buckets)


def _check_budget(shares: Sequence[Sequence[Package]], layering: Layering) -> None:
    def count(alone: int) -> int:
        inner = replace(layering, alone=alone)
        return _OTHER_LAYERS + sum(len(_groups(packages, inner)) for packages in shares)

    layers = count(layering.alone)
    if layers <= layering.budget:
        return
    heavy = sorted(p.size for packages in shares for p in packages if p.size >= layering.alone)
    enough = next((size >> 20 for size in heavy if count(((size >> 20) + 1) << 20) <= layering.budget), None)
    raise LayerBudgetError(
        f"the plan has {layers} layers, {layers - layering.budget} more than the budget of {layering.budget}: "
        f"{len(heavy)} packages of at least {layering.alone >> 20} MiB lie alone",
        hint="set `layering.buckets` lower in the recipe"
        if enough is None
        else f"set `layering.alone-mib` to {enough + 1} in the recipe",
    )
