"""A lock as frozen dataclasses: ``lockfiles/<name>.lock.toml``. It names no URL and no host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from envbuilder.oci.digest import Digest

SCHEMA = 1


@dataclass(frozen=True)
class Build:
    """How a package is built from its source archive: the variables its build sees."""

    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Package:
    """One locked package. ``name`` is canonical (PEP 503); ``requires`` are its Requires-Dist, canonical, sorted.

    ``file`` is a wheel's name, or a source archive's when ``build`` is given. ``index`` names an index of the
    environment's ``[[index]]``; None is the default one.
    """

    name: str
    version: str
    file: str
    digest: Digest
    size: int
    requires: tuple[str, ...]
    requires_python: str | None = None
    index: str | None = None
    build: Build | None = None


@dataclass(frozen=True)
class Target:
    """What the wheels were chosen for: CPython minor, machine architecture, the least glibc."""

    python: str
    architecture: str
    glibc: str


@dataclass(frozen=True)
class LockInput:
    """An echo of what was resolved, so that staleness is a comparison of values with named differences."""

    extends: str | None
    exclude_newer: str
    requires: tuple[str, ...]
    constraints: tuple[str, ...]
    builds: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    indexes: tuple[tuple[str, str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Lock:
    """What an environment resolved to. ``packages`` are sorted by name and include those of what it extends."""

    environment: str
    input: LockInput
    target: Target
    cuda: str
    packages: tuple[Package, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Package]:
        """The packages by canonical name."""
        return {package.name: package for package in self.packages}
