"""Which wheel of a package a target takes: PEP 425 tags, newest glibc first (PEP 600)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from packaging.tags import Tag

    from envbuilder.lock.model import Target

_LEGACY = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}


def platforms(target: Target) -> tuple[str, ...]:
    """Return the platform tags that a target accepts, best first."""
    newest = int(target.glibc.partition(".")[2])
    tags = []
    for minor in range(newest, 4, -1):
        tags.append(f"manylinux_2_{minor}_{target.architecture}")
        if (2, minor) in _LEGACY:
            tags.append(f"{_LEGACY[2, minor]}_{target.architecture}")
    return (*tags, f"linux_{target.architecture}")


def supported_tags(target: Target) -> tuple[Tag, ...]:
    """Return every tag that the target's CPython accepts, best first."""
    version = tuple(int(part) for part in target.python.split("."))
    interpreter = f"cp{''.join(target.python.split('.'))}"
    names = platforms(target)
    return (
        *cpython_tags(version, abis=[interpreter], platforms=names),
        *compatible_tags(version, interpreter=interpreter, platforms=names),
    )


def best_wheel(files: Iterable[str], tags: Sequence[Tag]) -> str | None:
    """Return the file name of the wheel that an installer would take, or None when none is accepted.

    Ties are broken by the higher build number, then by name, so that the order of ``files`` does not matter.
    """
    rank = {tag: number for number, tag in enumerate(tags)}
    best: tuple[int, tuple[int, str], str] | None = None
    for file in sorted(files):
        try:
            _, _, build, own = parse_wheel_filename(file)
        except InvalidWheelFilename:
            continue
        ranks = [rank[tag] for tag in own if tag in rank]
        if not ranks:
            continue
        candidate = (-min(ranks), build or (0, ""), file)
        if best is None or candidate > best:
            best = candidate
    return best[2] if best else None
