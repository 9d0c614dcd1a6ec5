"""The wheels of a lock: fetched from an index, or built from source archives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from envbuilder.wheels.fetch import fetch
from envbuilder.wheels.layer import WheelFile
from envbuilder.wheels.source import Builder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.lock.model import Package
    from envbuilder.spec.environment import Environment
    from envbuilder.store.store import Store
    from envbuilder.wheels.source import BuiltWheel


@dataclass(frozen=True)
class LockedWheels:
    """Supplies wheels to the store. ``python`` builds what has none; ``builds`` are the words of the environment."""

    store: Store
    indexes: Indexes
    python: Path
    environment: Environment
    exclude_newer: str

    def wheels(self, packages: Sequence[Package]) -> Mapping[str, WheelFile]:
        """Return the wheel of each package by its name; only those that are built from source are made sure of."""
        built = self.build([package for package in packages if package.build is not None])
        found = {}
        for package in packages:
            if package.build is None:
                found[package.name] = WheelFile(package.file, package.digest, self.store.blob(package.digest))
            else:
                wheel = built[package.name]
                found[package.name] = WheelFile(wheel.file, wheel.digest, self.store.blob(wheel.digest))
        return found

    def provide(self, packages: Sequence[Package]) -> None:
        """Fetch the wheels that are not in the store."""
        fetch([package for package in packages if package.build is None], self.store, self.indexes)

    def build(self, packages: Sequence[Package]) -> Mapping[str, BuiltWheel]:
        """Return the built wheel of each package by its name, having built those that never were.

        Raises:
            BuildFailedError: a package does not build on this host.
            UnreachableError: an archive or what its build needs cannot be fetched.

        """
        known = {package.name: self._builder.known(package) for package in packages}
        missing = [package for package in packages if known[package.name] is None]
        fetch(missing, self.store, self.indexes)
        needs = {setting.package: setting.needs for setting in self.environment.builds}
        for package in missing:
            known[package.name] = self._builder.build(package, needs.get(package.name, ()))
        return {name: wheel for name, wheel in known.items() if wheel is not None}

    @cached_property
    def _builder(self) -> Builder:
        return Builder(self.store, self.python, self.indexes, self.exclude_newer)
