"""The wheels of a lock: fetched from an index, or built from source archives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from envbuilder.errors import EnvbuilderError
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


class OtherWheelError(EnvbuilderError):
    """A built wheel was damaged in the store, and building it anew gave another one."""

    def __init__(self, file: str) -> None:
        super().__init__(
            f"{file} was damaged in the store, and building it anew gave other bytes",
            hint="run the command again: it takes the new wheel",
        )


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
        """Fetch the wheels that are not in the store, or are damaged there; build those anew that were built.

        A layer is remembered as what its wheels make, so they are hashed once more. RECORD and CRC-32 would not tell
        all: who may execute a file stands in the archive's directory alone, and a deflate stream has bits to spare.

        Raises:
            OtherWheelError: a built wheel was damaged, and building it anew gave another one.
            EnvbuilderError: as ``fetch`` and ``build``.

        """
        from envbuilder.store.verify import verify_blobs  # noqa: PLC0415 (see the class)
        from envbuilder.wheels.fetch import fetch  # noqa: PLC0415 (see the class)

        fetched = [package for package in packages if package.build is None]
        sources = [package for package in packages if package.build is not None]
        built = self.build(sources)
        verify_blobs(self.store, [*(package.digest for package in fetched), *(w.digest for w in built.values())])
        fetch(fetched, self.store, self._indexes)
        for name, wheel in self.build(sources).items():
            if wheel != built[name]:
                raise OtherWheelError(wheel.file)

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
        from envbuilder.store.verify import verify_blobs  # noqa: PLC0415 (see the class)
        from envbuilder.wheels.fetch import fetch  # noqa: PLC0415 (see the class)
        from envbuilder.wheels.source import Builder  # noqa: PLC0415

        verify_blobs(self.store, [package.digest for package in packages])
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
