"""The wheels of a lock: fetched from an index, or built from source archives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from envbuilder.wheels.built import build_key, find_tools, recall
from envbuilder.wheels.key import WheelFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.lock.model import Package
    from envbuilder.spec.environment import Environment
    from envbuilder.store.store import Store
    from envbuilder.wheels.built import BuiltWheel, Tools


@dataclass(frozen=True)
class LockedWheels:
    """Supplies wheels to the store. ``python`` builds what has none.

    ``open_indexes`` gives the indexes; a build that has everything never calls it, and never imports what talks HTTP.
    """

    store: Store
    open_indexes: Callable[[], Indexes]
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
        from envbuilder.wheels.fetch import fetch  # noqa: PLC0415 (see the class)

        fetch([package for package in packages if package.build is None], self.store, self._indexes)

    def build(self, packages: Sequence[Package]) -> Mapping[str, BuiltWheel]:
        """Return the built wheel of each package by its name, having built those that never were.

        Raises:
            BuildFailedError: a package does not build on this host.
            UnreachableError: an archive or what its build needs cannot be fetched.

        """
        found = {}
        missing = []
        for package in packages:
            known = recall(self.store, build_key(package, self.exclude_newer, self._tools))
            if known is None:
                missing.append(package)
            else:
                found[package.name] = known
        if missing:
            found |= self._build(missing)
        return found

    def _build(self, packages: Sequence[Package]) -> dict[str, BuiltWheel]:
        from envbuilder.wheels.fetch import fetch  # noqa: PLC0415 (see the class)
        from envbuilder.wheels.source import Builder  # noqa: PLC0415

        fetch(packages, self.store, self._indexes)
        builder = Builder(self.store, self.python, self._indexes, self.exclude_newer, self._tools)
        needs = {setting.package: setting.needs for setting in self.environment.builds}
        return {package.name: builder.build(package, needs.get(package.name, ())) for package in packages}

    @cached_property
    def _tools(self) -> Tools:
        return find_tools(self.python)

    @cached_property
    def _indexes(self) -> Indexes:
        return self.open_indexes()
