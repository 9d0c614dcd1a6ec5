"""``envbuilder lock ENV...``: resolve environments, or their bases, into locks, or say whether these are stale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from envbuilder.lock.model import Lock, Package
    from envbuilder.spec.catalog import Catalog
    from envbuilder.spec.environment import Environment
    from envbuilder.spec.recipe import Recipe


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "Exit codes: 0 written or fresh, 1 stale (--check) or another CUDA than promised, 2 cannot be resolved,\n"
        "3 the index or mirror is out of reach.\n\nexample: envbuilder lock base-v4 ai-v4"
    )
    parser.add_argument("environments", metavar="ENV", nargs="+")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a lock is stale, saying how")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--system",
        action="store_true",
        help="the Debian packages of the environments' bases instead, on this machine's release",
    )
    group.add_argument("--index-url", metavar="URL", help="the package index, instead of the configured one")


def run(args: argparse.Namespace) -> int:
    """Lock the environments, what they extend first when both are named."""
    from envbuilder.spec.catalog import find_catalog

    catalog = find_catalog(Path.cwd())
    environments = [catalog.environment(name) for name in dict.fromkeys(args.environments)]
    if args.system:
        recipes = {recipe.name: recipe for recipe in (catalog.recipe(e.name) for e in environments)}
        if args.check:
            return _check_systems(catalog, tuple(recipes.values()), " ".join(args.environments))
        return _write_systems(catalog, tuple(recipes.values()))
    if args.check:
        return _check(catalog, environments)
    for environment in sorted(environments, key=lambda e: e.extends is not None):
        _write(catalog, environment, args.index_url)
    return 0


def _check(catalog: Catalog, environments: Sequence[Environment]) -> int:
    """Print how each lock differs from what its environment asks for now."""
    from envbuilder.lock.drift import drift
    from envbuilder.lock.files import read_lock

    stale = False
    for environment in environments:
        lock = read_lock(catalog.lock_file(environment.name))
        for difference in drift(lock, environment, _parent_lock(catalog, environment)):
            stale = True
            print(f"{environment.name}: {difference}")
    return 1 if stale else 0


def _write(catalog: Catalog, environment: Environment, index_url: str | None) -> None:
    from envbuilder import http, report
    from envbuilder.lock.files import write_lock
    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.lock.metadata import MetadataSource
    from envbuilder.lock.resolve import Resolver
    from envbuilder.store.store import Store, default_root
    from envbuilder.system.interpreter import find_interpreter
    from envbuilder.wheels.archive import open_wheel
    from envbuilder.wheels.supply import LockedWheels

    store = Store(default_root())
    indexes = Indexes(index_url, environment.indexes, http.new_session())
    # An interpreter of this machine resolves as well as a standalone one, and need not be downloaded.
    python = find_interpreter(environment.python, ("host", "managed"), store).executable
    moment = environment.exclude_newer.isoformat().replace("+00:00", "Z")
    wheels = LockedWheels(store, lambda: indexes, python, environment, moment)

    def build(package: Package) -> bytes:
        built = wheels.build([package])[package.name]
        with open_wheel(store.blob(built.digest), built.file) as wheel:
            return wheel.read_dist_info("METADATA").encode()

    resolver = Resolver(indexes, python, MetadataSource(indexes, build))
    lock = resolver.resolve(environment, _parent_lock(catalog, environment))
    file = catalog.lock_file(environment.name)
    write_lock(lock, file)
    report.step(f"{file}: {len(lock.packages)} packages, torch for CUDA {lock.cuda}")


def _parent_lock(catalog: Catalog, environment: Environment) -> Lock | None:
    from envbuilder.lock.files import read_lock

    parent = catalog.parent(environment)
    return read_lock(catalog.lock_file(parent.name)) if parent is not None else None


def _check_systems(catalog: Catalog, recipes: Sequence[Recipe], names: str) -> int:
    """Print how the recipes' bases differ from what was locked of them, on whatever suite."""
    from envbuilder.spec.recipe import DebianBase
    from envbuilder.system.lockfile import SystemLockMissingError, read_system_lock, system_drift

    stale = False
    for recipe in recipes:
        if not isinstance(recipe.base, DebianBase):
            continue
        files = catalog.system_lock_files(recipe.name)
        if not files:
            hint = f"run `envbuilder lock {names} --system`"
            raise SystemLockMissingError(f"{recipe.file} has no lock of its base", hint=hint)
        for file in files:
            lock = read_system_lock(file)
            for difference in system_drift(lock, recipe.base):
                stale = True
                print(f"{recipe.name} on {lock.plan.suite}: {difference}")
    return 1 if stale else 0


def _write_systems(catalog: Catalog, recipes: Sequence[Recipe]) -> int:
    from envbuilder import report
    from envbuilder.errors import InputError
    from envbuilder.store.store import Store, default_root
    from envbuilder.system.locked import lock_system
    from envbuilder.system.lockfile import moved, read_system_lock, write_system_lock

    for recipe in recipes:
        lock = lock_system(recipe, Store(default_root()))
        file = catalog.system_lock_file(recipe.name, lock.plan.suite)
        try:
            changes = moved(read_system_lock(file).plan, lock.plan)
        except InputError:  # there was none, or it cannot be read any more
            changes = ()
        write_system_lock(lock, file)
        for change in changes:
            report.step(f"  {change}")
        report.step(f"{file}: {len(lock.plan.packages)} packages, {len(changes)} changed")
    return 0
