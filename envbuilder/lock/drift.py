"""Is a lock still what its environment asks for? A comparison of values with named differences, never of a hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.lock.model import LockInput, Target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from envbuilder.lock.model import Lock
    from envbuilder.spec.environment import Environment

ARCHITECTURE = "x86_64"


@dataclass(frozen=True)
class Difference:
    """One way in which two things differ: where, what it was, what it is; None means absent."""

    place: str
    was: str | None
    now: str | None

    def __str__(self) -> str:
        if self.was is None:
            return f"{self.place}: + {self.now}"
        if self.now is None:
            return f"{self.place}: - {self.was}"
        return f"{self.place}: {self.was} -> {self.now}"


def lock_input(environment: Environment) -> LockInput:
    """Return what is resolved for an environment, in canonical order."""
    return LockInput(
        extends=environment.extends,
        exclude_newer=environment.exclude_newer.isoformat().replace("+00:00", "Z"),
        requires=tuple(sorted(environment.wanted())),
        constraints=tuple(sorted(environment.constraints)),
        builds=tuple(sorted((b.package, tuple(sorted(b.env.items()))) for b in environment.builds)),
        indexes=tuple(sorted((i.name, i.url, tuple(sorted(i.packages))) for i in environment.indexes)),
    )


def lock_target(environment: Environment) -> Target:
    """Return what an environment's wheels are chosen for."""
    return Target(environment.python, ARCHITECTURE, environment.glibc)


def drift(lock: Lock, environment: Environment, parent: Lock | None) -> tuple[Difference, ...]:
    """Return how the environment (and the lock of what it extends) differs from what was locked; empty when fresh."""
    was, now = lock.input, lock_input(environment)
    target = lock_target(environment)
    pairs = [
        ("extends", was.extends, now.extends),
        ("exclude-newer", was.exclude_newer, now.exclude_newer),
        ("python", lock.target.python, target.python),
        ("glibc", lock.target.glibc, target.glibc),
        ("architecture", lock.target.architecture, target.architecture),
        ("cuda", lock.cuda, environment.cuda),
    ]
    found = [Difference(place, old, new) for place, old, new in pairs if old != new]
    found += set_differences("packages.requires", was.requires, now.requires)
    found += set_differences("packages.constraints", was.constraints, now.constraints)
    found += set_differences("build", map(str, was.builds), map(str, now.builds))
    found += set_differences("index", map(str, was.indexes), map(str, now.indexes))
    if parent is not None:
        inherited = [p for p in parent.packages if lock.by_name.get(p.name) != p]
        for package in inherited:
            own = lock.by_name.get(package.name)
            found.append(
                Difference(f"{parent.environment}.{package.name}", own.version if own else None, package.version)
            )
    return tuple(found)


def set_differences(place: str, was: Iterable[str], now: Iterable[str]) -> list[Difference]:
    """Return what is in one of two sets only: what has gone, then what has come, each sorted."""
    old, new = set(was), set(now)
    gone = [Difference(place, text, None) for text in sorted(old - new)]
    return gone + [Difference(place, None, text) for text in sorted(new - old)]
