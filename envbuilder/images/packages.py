"""Groups of locked packages -> layers: what is known is not made again, what is not is fetched and converted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from envbuilder.oci.blob import Compression
from envbuilder.oci.model import ImageFormatError, Layer
from envbuilder.store.marks import known_files
from envbuilder.wheels.key import layer_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envbuilder.images.layering import Group
    from envbuilder.lock.model import Package
    from envbuilder.oci.digest import Digest
    from envbuilder.store.store import Store
    from envbuilder.wheels.key import InstallPrefix, WheelFile

#: What the store remembers layers as.
KIND = "layer"


@dataclass(frozen=True)
class Job:
    """A layer to be made: its title, the bytes of its wheels, the wheels in order, and its key."""

    title: str
    size: int
    wheels: tuple[WheelFile, ...]
    key: str


@dataclass(frozen=True)
class Python:
    """The interpreter that compiles bytecode, and its version (3.12.1)."""

    executable: Path
    version: str


class WheelSupply(Protocol):
    """Provides the wheels of locked packages."""

    def wheels(self, packages: Sequence[Package]) -> Mapping[str, WheelFile]:
        """Return the wheel of each package by its name. Those built from source are built now if they never were."""

    def provide(self, packages: Sequence[Package]) -> None:
        """Bring the wheels of ``packages`` into the store."""


SupplyMaker: TypeAlias = Callable[[Path], WheelSupply]


@dataclass(frozen=True)
class PackageLayers:
    """Makes layers: for ``prefix``, with bytecode by ``python``, which is of ``python_version`` (3.12.1)."""

    store: Store
    prefix: InstallPrefix
    python: Path
    python_version: str
    supply: WheelSupply
    compression: Compression = Compression.GZIP

    def make(self, groups: Sequence[Group]) -> list[Layer]:
        """Return the layer of each group, in order. Each is in the store afterwards."""
        packages = [package for group in groups for package in group.packages]
        wheels = self.supply.wheels(packages)
        jobs = [self._job(group, [wheels[package.name] for package in group.packages]) for group in groups]
        layers = {job.key: layer for job in jobs if (layer := known_layer(self.store, job.key)) is not None}
        if missing := [(group, job) for group, job in zip(groups, jobs, strict=True) if job.key not in layers]:
            # Only now: importing what reads and writes wheels takes longer than all of the above.
            from envbuilder.images.convert import convert  # noqa: PLC0415

            self.supply.provide([package for group, _ in missing for package in group.packages])
            python = Python(self.python, self.python_version)
            made = convert([job for _, job in missing], self.prefix, python, self.compression, self.store)
            layers |= {job.key: layer for (_, job), layer in zip(missing, made, strict=True)}
        return [layers[job.key] for job in jobs]

    def _job(self, group: Group, wheels: Sequence[WheelFile]) -> Job:
        key = layer_key(wheels, self.prefix, self.python_version, self.compression)
        return Job(group.title, group.size, tuple(wheels), key)


def known_layer(store: Store, key: str) -> Layer | None:
    """Return the layer that the store remembers by this key, if it still has it."""
    try:
        layer = Layer.from_json(store.recall(KIND, key))
    except ImageFormatError:
        return None
    return layer if store.has(layer.digest, layer.size) else None


def tar_sizes(store: Store) -> dict[Digest, int]:
    """Return the uncompressed sizes of the layers that were made here or came from a cache."""
    sizes = {}
    for path, document in known_files(store):
        if path.parent.name == KIND:
            with suppress(ImageFormatError):
                layer = Layer.from_json(document)
                sizes[layer.digest] = layer.tar_size
    return sizes
