"""Debian packages → one layer: resolve with the host's apt, fetch into the store, unpack into a layer.

Three things are remembered in the store, so that a build in which nothing changed asks nobody: the plan (for
``PLAN_AGE``), the packages by digest, and the layer by its key.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuilder import parallel, report
from envbuilder.atomic import explain_full_disk
from envbuilder.errors import UnreachableError
from envbuilder.memory import release_large_buffers, trim
from envbuilder.oci import layer as layer_module
from envbuilder.oci.blob import Compression
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import Layer, canonical_json
from envbuilder.system import spool
from envbuilder.system.apt import Apt, DebianPackage, Host, StalePackageError, architecture, choose
from envbuilder.system.dpkgdb import database
from envbuilder.system.effects import all_effects
from envbuilder.system.rootfs import keep, merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from envbuilder.spec.recipe import DebianBase
    from envbuilder.store.store import Store

#: A plan younger than this is used without asking apt (seconds). After it, an update of the archive comes in.
PLAN_AGE = 24 * 3600
#: Enters the layer's key: whatever in this room changes the bytes must change this.
REVISION = "debian 2"
_PLAN_FORMAT = 2
_BATCH = 24 << 20  # packages are fetched by so many bytes at a time: what is done counts, should the rest fail
FETCHERS = 3


@dataclass(frozen=True)
class SystemPlan:
    """What a base made of Debian packages resolved to; ``packages`` are sorted by name."""

    suite: str
    distribution: str
    packages: tuple[DebianPackage, ...]

    @property
    def glibc(self) -> str | None:
        """The version of glibc that programs find in the base, ``2.36``; None when it holds none."""
        versions = (package.version for package in self.packages if package.name == "libc6")
        return next((version.rpartition(":")[2].partition("-")[0] for version in versions), None)

    @cached_property
    def layer_key(self) -> str:
        """That of the gzip layer."""
        return self.key(Compression.GZIP)

    def key(self, compression: Compression) -> str:
        """Return what the layer's bytes are a function of, as a hash. Where packages come from is no part of it."""
        content = [[package.name, package.version, package.digest.hex] for package in self.packages]
        envelope = [REVISION, layer_module.revision(compression), list(spool.ALONE), content]
        return hashlib.sha256(canonical_json(envelope)).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        packages = [asdict(package) | {"digest": str(package.digest)} for package in self.packages]
        return {"suite": self.suite, "distribution": self.distribution, "packages": packages}

    @classmethod
    def from_json(cls, document: Any) -> SystemPlan:
        """Read what ``to_json`` wrote; raise KeyError, TypeError or ValueError for anything else."""
        packages = [DebianPackage(**(p | {"digest": Digest.parse(p["digest"])})) for p in document["packages"]]
        return cls(document["suite"], document["distribution"], tuple(packages))


def resolve(base: DebianBase, work: Path, *, host: Host | None = None, refresh: bool = False) -> SystemPlan:
    """Return what the base's packages resolve to, asked of the host's apt in a private root below ``work``.

    A package name may give alternatives, ``libglib2.0-0t64 | libglib2.0-0``: the first that the release has counts.

    Raises:
        InputError: a package is unknown, or they cannot be installed together.
        HostError: apt is missing, or the machine's sources do not offer the suite.
        UnreachableError: the mirror cannot be reached.

    """
    host = host or Host()
    suite = base.suite or host.codename()
    apt = Apt(work / suite, suite, host)
    distribution = apt.prepare(refresh=refresh)
    alternatives = any("|" in name for name in base.packages)
    # Sorted: in which order a recipe names its packages must not decide between providers.
    names = sorted(set(choose(base.packages, apt.names() if alternatives else ())))
    return SystemPlan(suite, distribution, apt.plan(names))


def system_plan(base: DebianBase, store: Store, *, host: Host | None = None, refresh: bool = False) -> SystemPlan:
    """Return the base's plan: the one remembered when it is younger than ``PLAN_AGE``, else a new one.

    When the mirror is out of reach the remembered one is used whatever its age, with a warning. Raises as ``resolve``.
    """
    host = host or Host()
    suite = base.suite or host.codename()
    key = canonical_json([_PLAN_FORMAT, suite, architecture(), list(base.packages)]).decode()
    remembered = store.recall("system-plan", key)
    if remembered and not refresh and 0 <= time.time() - remembered["time"] < PLAN_AGE:
        return SystemPlan.from_json(remembered["plan"])
    try:
        with store.lock(f"apt-{suite}"):
            plan = resolve(base, work_folder(store), host=host, refresh=refresh)
    except UnreachableError as error:
        if not remembered or refresh:
            raise
        report.warning(f"{error.message}; the packages resolved before are used")
        return SystemPlan.from_json(remembered["plan"])
    store.remember("system-plan", key, {"time": int(time.time()), "plan": plan.to_json()})
    return plan


def make_system(
    base: DebianBase, store: Store, compression: Compression = Compression.GZIP, *, host: Host | None = None
) -> tuple[SystemPlan, Layer]:
    """Return the base's plan and layer. A plan whose packages are gone from the mirror is made anew, once.

    Raises:
        StalePackageError: packages are gone although the lists are fresh: the mirror is being updated.
        EnvbuilderError: as ``system_plan`` and ``system_layer``.

    """
    plan = system_plan(base, store, host=host)
    try:
        return plan, system_layer(plan, store, compression, host=host)
    except StalePackageError as error:
        report.detail(f"{error.message}; resolving again")
    plan = system_plan(base, store, host=host, refresh=True)
    return plan, system_layer(plan, store, compression, host=host)


def system_layer(
    plan: SystemPlan, store: Store, compression: Compression = Compression.GZIP, *, host: Host | None = None
) -> Layer:
    """Return the plan's layer; it is made only when the store does not have it.

    Raises:
        StalePackageError: a package is gone from the mirror.
        UnreachableError: the mirror cannot be reached.
        RootError, DebError: the packages do not make a root file system.

    """
    if (known := known_layer(plan, store, compression)) is not None:
        return known
    fetch(plan, store, host=host)
    layer = _make_layer(plan, store, compression)
    trim()
    store.remember("layer", plan.key(compression), layer.to_json())
    return layer


def known_layer(plan: SystemPlan, store: Store, compression: Compression = Compression.GZIP) -> Layer | None:
    """Return the plan's layer when it was made before and is still in the store."""
    remembered = store.recall("layer", plan.key(compression))
    if remembered is None:
        return None
    layer = Layer.from_json(remembered)
    return layer if store.has(layer.digest, layer.size) else None


def fetch(plan: SystemPlan, store: Store, *, host: Host | None = None) -> None:
    """Have every package of the plan in the store, verified by size (apt) and SHA-256 (apt, and the store once more).

    Raises as ``system_layer``.
    """
    missing = missing_packages(plan, store)
    if not missing:
        return
    apt = Apt(work_folder(store) / plan.suite, plan.suite, host or Host())
    with store.lock(f"apt-{plan.suite}"):
        apt.prepare()
    total = sum(package.size for package in missing)
    with report.task(f"Fetching {len(missing)} packages of {plan.suite}", total) as task:

        def get(batch: Sequence[DebianPackage]) -> None:
            with tempfile.TemporaryDirectory(dir=store.temporary_name().parent, prefix=".tmp-") as name:
                files = apt.download(batch, Path(name))
                for package in batch:
                    if not store.has(package.digest, package.size):
                        store.adopt(files[package.name], package.digest)
                    task.advance(package.size)

        parallel.run_all(get, batches(missing), workers=FETCHERS)


def missing_packages(plan: SystemPlan, store: Store) -> list[DebianPackage]:
    """Return the plan's packages that are not in the store."""
    return [package for package in plan.packages if not store.has(package.digest, package.size)]


def _make_layer(plan: SystemPlan, store: Store, compression: Compression) -> Layer:
    report.step(f"Unpacking {len(plan.packages)} packages of {plan.suite}")
    release_large_buffers()
    with (
        explain_full_disk(store.root),
        tempfile.TemporaryDirectory(dir=store.temporary_name().parent, prefix=".tmp-") as name,
    ):
        folder = Path(name)

        def unpack(package: DebianPackage) -> spool.Part:
            out = folder / package.digest.hex
            return spool.unpack(store.blob(package.digest), out, keep, ahead=compression is Compression.GZIP)

        # The largest first: the last to be done should be a short one.
        by_size = sorted(plan.packages, key=lambda package: (-package.size, package.name))
        parts = parallel.run_all(unpack, by_size, workers=parallel.cores())
        parts.sort(key=lambda part: part.name)
        tree = all_effects(merge(parts).with_entries(database(parts)), architecture())
        with store.writer() as writer:
            layer = layer_module.write_layer(tree.ordered(), writer.file, compression)
            writer.commit(layer.digest)
    return layer


def batches(packages: Iterable[DebianPackage]) -> list[list[DebianPackage]]:
    """Return the packages in groups, each for one run of apt."""
    groups: list[list[DebianPackage]] = []
    size = _BATCH
    for package in packages:
        if size >= _BATCH:
            groups.append([])
            size = 0
        groups[-1].append(package)
        size += package.size
    return groups


def work_folder(store: Store) -> Path:
    """Return the folder below which apt's private roots lie, one for each suite."""
    return store.root / "apt"
