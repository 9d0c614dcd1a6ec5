"""``envbuilder build ENV``: environment -> lock -> wheels -> layers -> image -> store, engine, folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder.cli.buildcache import configure_cache

if TYPE_CHECKING:
    import argparse

    from envbuilder.images.build import Source
    from envbuilder.images.cachedbuild import Wanted
    from envbuilder.oci.model import Image
    from envbuilder.spec.catalog import Catalog
    from envbuilder.spec.recipe import Recipe
    from envbuilder.store.store import Store
    from envbuilder.system.lockfile import SystemLock


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "Prints the image's reference with its digest, and nothing else, on stdout; with --push, that in the registry.\n\n"
        "example: docker run --rm $(envbuilder build base-v4 --load docker) python -c 'import torch'"
    )
    parser.add_argument("environment", metavar="ENV")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME", help="add an optional part (flash-attn)"
    )
    parser.add_argument(
        "--base",
        metavar="REF",
        help="build on this image, by tag or digest, instead of the recipe's base (docs/IMAGE.md)",
    )
    parser.add_argument("--load", choices=("docker", "podman"), help="put the image into this engine")
    parser.add_argument("--push", metavar="REF", help="push the image to a registry: registry/repository:tag")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write the image as an OCI layout to DIR")
    parser.add_argument(
        "--compression", choices=("gzip", "zstd", "none"), help="of all layers, instead of the recipe's choice"
    )
    parser.add_argument("--explain", action="store_true", help="show the plan of layers and build nothing")
    parser.add_argument("--json", action="store_true", help="with --explain: a JSON document on stdout")
    parser.add_argument("--index-url", metavar="URL", help="the package index, instead of the configured one")
    configure_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Build, deliver, print the reference."""
    from envbuilder.cli.buildcache import make, means_for
    from envbuilder.cli.push import destination, push_built
    from envbuilder.images.build import with_base
    from envbuilder.spec.catalog import find_catalog
    from envbuilder.store.store import Store, default_root

    catalog = find_catalog(Path.cwd())
    target = destination(args.push) if args.push is not None else None
    source = read_source(catalog, args.environment, base=args.base)
    if args.compression is not None:
        layering = replace(source.recipe.layering, compression=args.compression)
        source = replace(source, recipe=replace(source.recipe, layering=layering))
    if args.explain:
        return _explain(catalog, source, as_json=args.json)
    store = Store(default_root())

    source = with_base(source, store)
    # The layers of an image that is only pushed need not come here: the registry may have them.
    here = target is None or args.load is not None or args.output is not None
    built = make(args, catalog, _wanted(args, source), means_for(source, store, args.index_url), fetch=here)
    image, source = built.image, built.source
    if here or all(store.has(layer.digest, layer.size) for layer in image.manifest.layers):
        store.put_image(image, source.name)
    delivered = _deliver(args, image, store, source.name)
    print(delivered if target is None else push_built(built, store, target))
    return 0


def _wanted(args: argparse.Namespace, source: Source) -> Wanted:
    """Return what is to be made: the environment with its extras."""
    from envbuilder.images.cachedbuild import Wanted

    if not args.extra:
        return Wanted(source, ())
    from envbuilder.images.extras import find_extra

    return Wanted(source, tuple(find_extra(source.environment, name) for name in dict.fromkeys(args.extra)))


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


def read_source(catalog: Catalog, name: str, *, base: str | None = None) -> Source:
    """Read an environment, its recipe and their locks, and make sure that these are not stale.

    ``base`` refers to an image that takes the place of the recipe's base.
    """
    from envbuilder import report
    from envbuilder.errors import NoError
    from envbuilder.images.build import Source
    from envbuilder.lock.drift import drift
    from envbuilder.lock.files import read_lock
    from envbuilder.spec.recipe import ImageBase

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
    if base is not None:
        recipe = replace(recipe, base=ImageBase(base))
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
