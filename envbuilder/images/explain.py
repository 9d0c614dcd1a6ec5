"""Explain a plan of layers: what lies where, what it weighs, who shares it, and what an update would cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envbuilder.images.layering import Group, Stage


@dataclass(frozen=True)
class Row:
    """One layer of a plan. ``size`` is the bytes of the packages' files, close to the layer's own.

    ``shared`` are the other environments whose plans have the same layer. A new version of any package in it costs
    about ``size`` bytes anew.
    """

    environment: str
    title: str
    packages: tuple[str, ...]
    size: int
    shared: tuple[str, ...]


def explain(stages: Sequence[Stage], others: Mapping[str, Sequence[Stage]]) -> list[Row]:
    """Return the rows of a plan, from the base up; ``others`` are the plans of other environments by name."""
    having: dict[tuple[str, ...], set[str]] = {}
    for name, plan in others.items():
        for group in (group for stage in plan for group in stage.groups):
            having.setdefault(content(group), set()).add(name)
    return [
        Row(
            environment=stage.lock.environment,
            title=group.title,
            packages=tuple(f"{package.name} {package.version}" for package in group.packages),
            size=group.size,
            shared=tuple(sorted(having.get(content(group), ()))),
        )
        for stage in stages
        for group in stage.groups
    ]


def content(group: Group) -> tuple[str, ...]:
    """Return what makes two layers the same: the packages' files, by digest and in order, and how they are built."""
    return tuple(f"{package.digest}{package.build or ''}" for package in group.packages)
