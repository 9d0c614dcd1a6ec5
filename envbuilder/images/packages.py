"""Groups of locked packages -> layers: what is known is not made again, what is not is fetched and converted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from envbuilder import parallel, report
from envbuilder.oci.blob import Compression
from envbuilder.oci.model import ImageFormatError, Layer
from envbuilder.wheels.bytecode import Compiler
from envbuilder.wheels.layer import layer_key, write_wheels
from envbuilder.wheels.remembered import BytecodeCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envbuilder.images.layering import Group
    from envbuilder.lock.model import Package
    from envbuilder.store.store import Store
    from envbuilder.wheels.layer import BytecodeOf, InstallPrefix, WheelFile

_KIND = "layer"


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
        missing = [job for job in jobs if job.known is None]
        if missing:
            self.supply.provide([package for job in missing for package in job.group.packages])
            self._convert(missing)
        return [job.known or self._remembered(job.key) for job in jobs]

    def _job(self, group: Group, wheels: list[WheelFile]) -> _Job:
        key = layer_key(wheels, self.prefix, self.python_version, self.compression)
        try:
            layer = Layer.from_json(self.store.recall(_KIND, key))
        except ImageFormatError:
            return _Job(group, wheels, key, None)
        return _Job(group, wheels, key, layer if self.store.has(layer.digest) else None)

    def _convert(self, jobs: Sequence[_Job]) -> None:
        cores = parallel.cores()
        total = sum(job.group.size for job in jobs)
        report.step(f"making {len(jobs)} layers of {sum(len(job.wheels) for job in jobs)} wheels")
        # Heaviest first, so that the last to finish is a small one; more threads than cores, because each waits for
        # bytecode now and then.
        order = sorted(jobs, key=lambda job: -job.group.size)
        with report.task("layers", total) as task, Compiler(self.python, workers=cores) as compiler:
            remembered = BytecodeCache(self.store, compiler, f"{self.python_version} {self.prefix.site_packages}")

            def convert(job: _Job) -> None:
                # A wheel that lies alone is only written again when it has changed: not worth remembering.
                self._write(job, remembered.of if len(job.wheels) > 1 else lambda _: nullcontext(compiler))
                task.advance(job.group.size)

            parallel.run_all(convert, order, workers=cores + 1)

    def _write(self, job: _Job, bytecode_of: BytecodeOf) -> None:
        with self.store.writer() as blob:
            layer = write_wheels(job.wheels, self.prefix, bytecode_of, blob.file, self.compression)
            blob.commit(layer.digest)
        self.store.remember(_KIND, job.key, layer.to_json())
        report.detail(f"layer {layer.digest} ({layer.size} bytes): {job.group.title}")

    def _remembered(self, key: str) -> Layer:
        return Layer.from_json(self.store.recall(_KIND, key))


@dataclass(frozen=True)
class _Job:
    group: Group
    wheels: list[WheelFile]
    key: str
    known: Layer | None
