"""Make a base from its lock: exactly the locked packages, wherever this machine's archives still have them."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from envbuilder import parallel, report
from envbuilder.errors import EnvbuilderError, InputError, UnreachableError
from envbuilder.oci.blob import Compression
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import canonical_json
from envbuilder.spec.recipe import DebianBase
from envbuilder.system import debian
from envbuilder.system.apt import Apt, Host, StalePackageError, architecture
from envbuilder.system.lockfile import SystemLock, echo, moved
from envbuilder.system.sources import machine_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.oci.model import Layer
    from envbuilder.spec.recipe import Recipe
    from envbuilder.store.store import Store
    from envbuilder.system.apt import DebianPackage
    from envbuilder.system.debian import SystemPlan

#: How many of the packages that moved on a warning names.
_NAMED = 5


class WrongPackageError(EnvbuilderError):
    """An archive has other bytes where the locked package lay; they were not kept."""

    def __init__(self, package: DebianPackage, expected: str, actual: str) -> None:
        super().__init__(
            f"the mirror's {package.file} has {actual} instead of the locked {expected}",
            hint="the file was replaced there, or a proxy on the way alters it: try another mirror",
        )


class PackagesGoneError(EnvbuilderError):
    """No archive of this machine has some of the locked packages any more; ``names`` says which, sorted."""

    def __init__(self, suite: str, names: Sequence[str]) -> None:
        super().__init__(f"the mirror of `{suite}` has {len(names)} of the locked packages no longer: {names[0]} ...")
        self.names = tuple(names)


def lock_system(recipe: Recipe, store: Store, *, host: Host | None = None) -> SystemLock:
    """Resolve a recipe's base anew, by fresh lists, and return its lock for the recipe's suite or this machine's.

    Raises:
        InputError: the base is not made of Debian packages, or they cannot be installed.
        EnvbuilderError: as ``debian.resolve``.

    """
    if not isinstance(recipe.base, DebianBase):
        raise InputError(f"{recipe.file}: base: only a base of Debian packages has a lock of its own")
    plan = debian.system_plan(recipe.base, store, host=host, refresh=True)
    return SystemLock(recipe.name, architecture(), echo(recipe.base), plan)


def make_locked_system(
    lock: SystemLock,
    base: DebianBase,
    store: Store,
    compression: Compression = Compression.GZIP,
    *,
    renew: str,
    host: Host | None = None,
) -> tuple[SystemPlan, Layer]:
    """Return the locked plan and its layer, the same on every machine.

    When packages are gone from every archive of this machine, the base is resolved anew, with a warning that tells
    what moved on; ``renew`` is the command that it recommends.

    Raises:
        WrongPackageError: an archive has other bytes than the locked ones.
        UnreachableError: the mirror cannot be reached.
        EnvbuilderError: as ``debian.system_layer`` and, when packages are gone, as ``debian.make_system``.

    """
    host = host or Host()
    layer = debian.known_layer(lock.plan, store, compression)
    if layer is not None:
        return lock.plan, layer
    try:
        _fetch(lock.plan, store, host)
    except PackagesGoneError as error:
        plan, layer = debian.make_system(base, store, compression, host=host)
        report.warning(_explain(error, lock.plan, plan, renew))
        return plan, layer
    return lock.plan, debian.system_layer(lock.plan, store, compression, host=host)


def _explain(gone: PackagesGoneError, was: SystemPlan, now: SystemPlan, renew: str) -> str:
    changes = moved(was, now)
    named = ", ".join(str(change) for change in changes[:_NAMED])
    more = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    return (
        f"the mirror has {len(gone.names)} of {len(was.packages)} locked packages of {was.suite} no longer, so the base "
        f"was resolved anew; {len(changes)} moved on ({named}{more}), and the image's digest differs from that of "
        f"other builds of this lock; `{renew}` renews the lock"
    )


def _fetch(plan: SystemPlan, store: Store, host: Host) -> None:
    """Have the plan's packages in the store: those that the lists still have by apt, others from where they once lay.

    That packages are gone is remembered for a day, as a plan is, or until the machine has other sources.
    """
    if not debian.missing_packages(plan, store):
        return
    key = canonical_json([plan.layer_key, [source.stanza() for source in machine_sources(host.etc)]]).decode()
    known = store.recall("system-gone", key)
    if known and 0 <= time.time() - known["time"] < debian.PLAN_AGE:
        raise PackagesGoneError(plan.suite, known["names"])
    apt = Apt(debian.work_folder(store) / plan.suite, plan.suite, host)
    with store.lock(f"apt-{plan.suite}"):
        apt.prepare()
    _fetch_listed(plan, store, apt, host)
    try:
        _fetch_by_path(plan, store, apt)
    except PackagesGoneError as error:
        store.remember("system-gone", key, {"time": int(time.time()), "names": list(error.names)})
        raise


def _fetch_listed(plan: SystemPlan, store: Store, apt: Apt, host: Host) -> None:
    missing = debian.missing_packages(plan, store)
    listed = apt.listed(package.name for package in missing)
    here = tuple(package for package in missing if package.digest in listed)
    try:
        debian.fetch(replace(plan, packages=here), store, host=host)
    except StalePackageError as error:
        # The lists may be a day old, or the bytes wrong: asking for the files themselves tells.
        report.detail(error.message)


def _fetch_by_path(plan: SystemPlan, store: Store, apt: Apt) -> None:
    """Ask each archive for what is missing.

    Raises:
        PackagesGoneError: none has some of it.

    """
    could_tell = True
    for root in apt.roots():
        missing = debian.missing_packages(plan, store)
        if not missing:
            return
        total = sum(package.size for package in missing)
        with report.task(
            f"Fetching {len(missing)} packages of {plan.suite} that its lists have no longer", total
        ) as task:

            def get(batch: Sequence[DebianPackage], root: str = root, task: report.Task = task) -> bool:
                return _get(batch, root, store, apt, task)

            could_tell &= all(parallel.run_all(get, debian.batches(missing), workers=debian.FETCHERS))
    gone = [package.name for package in debian.missing_packages(plan, store)]
    if gone and not could_tell:
        raise UnreachableError(
            f"{len(gone)} of {len(plan.packages)} locked packages of `{plan.suite}` could not be fetched",
            hint="check the machine's network, proxy and apt sources: `apt-get update`",
        )
    if gone:
        raise PackagesGoneError(plan.suite, gone)


def _get(batch: Sequence[DebianPackage], root: str, store: Store, apt: Apt, task: report.Task) -> bool:
    """Fetch what an archive has of the packages; return whether the others are not there, for all that it says."""
    with tempfile.TemporaryDirectory(dir=store.temporary_name().parent, prefix=".tmp-") as folder:
        targets = {f"{root}/{quote(package.file)}": Path(folder) / package.digest.hex for package in batch}
        could_tell = apt.fetch(targets)
        for package, path in zip(batch, targets.values(), strict=True):
            if path.exists():
                _check(package, path)
                store.adopt(path, package.digest)
                task.advance(package.size)
    return could_tell


def _check(package: DebianPackage, path: Path) -> None:
    """Raise WrongPackageError when a file is not the locked package."""
    if (size := path.stat().st_size) != package.size:
        raise WrongPackageError(package, f"{package.size} bytes", str(size))
    if (digest := Digest.of_file(path)) != package.digest:
        raise WrongPackageError(package, str(package.digest), str(digest))
