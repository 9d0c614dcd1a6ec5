"""``envbuilder build ENV``: environment -> lock -> wheels -> layers -> image -> store, engine, folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from envbuilder.images.build import Source
    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.oci.model import Image
    from envbuilder.spec.catalog import Catalog
    from envbuilder.spec.recipe import Recipe
    from envbuilder.store.store import Store
    from envbuilder.system.lockfile import SystemLock


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "Prints the image's reference with its digest, and nothing else, on stdout.\n\n"
        "example: docker run --rm $(envbuilder build base-v4 --load docker) python -c 'import torch'"
    )
    parser.add_argument("environment", metavar="ENV")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME", help="add an optional part (flash-attn)"
    )
    parser.add_argument("--load", choices=("docker", "podman"), help="put the image into this engine")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write the image as an OCI layout to DIR")
    parser.add_argument("--compression", choices=("gzip", "zstd", "none"), help="instead of the recipe's choice")
    parser.add_argument("--explain", action="store_true", help="show the plan of layers and build nothing")
    parser.add_argument("--json", action="store_true", help="with --explain: a JSON document on stdout")
    parser.add_argument("--index-url", metavar="URL", help="the package index, instead of the configured one")


def run(args: argparse.Namespace) -> int:
    """Build, deliver, print the reference."""
    from envbuilder.images.build import build
    from envbuilder.spec.catalog import find_catalog
    from envbuilder.store.store import Store, default_root
    from envbuilder.wheels.supply import LockedWheels

    catalog = find_catalog(Path.cwd())
    source = read_source(catalog, args.environment)
    if args.compression is not None:
        layering = replace(source.recipe.layering, compression=args.compression)
        source = replace(source, recipe=replace(source.recipe, layering=layering))
    if args.explain:
        return _explain(catalog, source, as_json=args.json)
    store = Store(default_root())

    def open_indexes() -> Indexes:
        from envbuilder import http
        from envbuilder.lock.indexconfig import Indexes

        return Indexes(args.index_url, source.environment.indexes, http.new_session())

    if args.extra:
        from envbuilder.images.extras import find_extra, provide_extra

        found = [find_extra(source.environment, name) for name in dict.fromkeys(args.extra)]
        source = replace(
            source, extras=tuple(provide_extra(extra, source.lock, store, open_indexes()) for extra in found)
        )
    image = build(
        source,
        store,
        lambda python: LockedWheels(store, open_indexes, python, source.environment, source.lock.input.exclude_newer),
    )
    store.put_image(image, source.name)
    print(_deliver(args, image, store, source.name))
    return 0


def _deliver(args: argparse.Namespace, image: Image, store: Store, name: str) -> str:
    """Put the image where it was asked for, and return the reference that is right there."""
    if args.output is not None:
        from envbuilder.images.layout import write_layout

        write_layout(image, store, args.output, name)
    if args.load is not None:
        from envbuilder.images.load import load

        return load(image, store, args.load, name)
    return f"{name}@{image.digest}"


def _explain(catalog: Catalog, source: Source, *, as_json: bool) -> int:
    """Print the plan: a row for each layer with packages."""
    import json
    from dataclasses import asdict

    from envbuilder.cli.console import format_size, show_table
    from envbuilder.images.explain import explain
    from envbuilder.images.layering import plan
    from envbuilder.lock.files import read_lock

    others = {}
    for name in catalog.names():
        if name != source.environment.name and catalog.lock_file(name).exists():
            parent = catalog.parent(catalog.environment(name))
            parent_lock = read_lock(catalog.lock_file(parent.name)) if parent is not None else None
            others[name] = plan(read_lock(catalog.lock_file(name)), parent_lock, catalog.recipe(name).layering)
    rows = explain(plan(source.lock, source.parent, source.recipe.layering), others)
    if as_json:
        document = {"schema": 1, "environment": source.environment.name, "layers": [asdict(row) for row in rows]}
        print(json.dumps(document, indent=2))
        return 0
    cells = [
        (str(number), row.environment, row.title, format_size(row.size), ", ".join(row.shared) or "-")
        for number, row in enumerate(rows, start=1)
    ]
    show_table(("layer", "of", "holds", "size, and cost of an update", "shared with"), cells)
    shared = sum(row.size for row in rows if row.shared)
    total = sum(row.size for row in rows)
    print(f"{len(rows)} layers, {format_size(total)}; {format_size(shared)} shared with other environments")
    return 0


def read_source(catalog: Catalog, name: str) -> Source:
    """Read an environment, its recipe and their locks, and make sure that these are not stale."""
    from envbuilder import report
    from envbuilder.errors import NoError
    from envbuilder.images.build import Source
    from envbuilder.lock.drift import drift
    from envbuilder.lock.files import read_lock

    environment = catalog.environment(name)
    parent = catalog.parent(environment)
    parent_lock = read_lock(catalog.lock_file(parent.name)) if parent is not None else None
    lock = read_lock(catalog.lock_file(name))
    if differences := drift(lock, environment, parent_lock):
        listing = "\n".join(f"  {difference}" for difference in differences[:20])
        raise NoError(f"the lock of {name} is stale:\n{listing}", hint=f"run `envbuilder lock {name}`")
    if environment.status == "deprecated":
        report.warning(f"{name} is deprecated; it is supported until {environment.end_of_support}")
    recipe = catalog.recipe(name)
    return Source(environment, lock, parent_lock, recipe, system=_read_system_lock(catalog, recipe, name))


def _read_system_lock(catalog: Catalog, recipe: Recipe, name: str) -> SystemLock | None:
    """Return the lock of the recipe's base for the suite that is built on, and make sure that it is not stale."""
    from envbuilder import report
    from envbuilder.errors import NoError
    from envbuilder.spec.recipe import DebianBase
    from envbuilder.system.apt import Host, architecture
    from envbuilder.system.lockfile import read_system_lock, system_drift

    if not isinstance(recipe.base, DebianBase):
        return None
    suite = recipe.base.suite or Host().codename()
    file = catalog.system_lock_file(recipe.name, suite)
    lock = read_system_lock(file) if file.exists() else None
    if lock is None or lock.architecture != architecture():
        report.detail(f"{recipe.file.name} has no lock for {suite} on {architecture()}: resolved anew each day")
        return None
    if differences := system_drift(lock, recipe.base):
        listing = "\n".join(f"  {difference}" for difference in differences[:20])
        raise NoError(f"{file} is stale:\n{listing}", hint=f"run `envbuilder lock {name} --system`")
    return lock
