"""``envbuilder lock ENV...``: resolve environments into locks, or say whether their locks are stale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from envbuilder.lock.model import Lock, Package
    from envbuilder.spec.catalog import Catalog
    from envbuilder.spec.environment import Environment


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "Exit codes: 0 written or fresh, 1 stale (--check) or another CUDA than promised, 2 cannot be resolved,\n"
        "3 the index is out of reach.\n\nexample: envbuilder lock base-v4 ai-v4"
    )
    parser.add_argument("environments", metavar="ENV", nargs="+")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a lock is stale, saying how")
    parser.add_argument("--index-url", metavar="URL", help="the package index, instead of the configured one")


def run(args: argparse.Namespace) -> int:
    """Lock the environments, what they extend first when both are named."""
    from envbuilder.spec.catalog import find_catalog

    catalog = find_catalog(Path.cwd())
    environments = [catalog.environment(name) for name in dict.fromkeys(args.environments)]
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
    wheels = LockedWheels(store, indexes, python, environment, moment)

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
