"""``envbuilder cache warm``: have images on this host, unpacked, before jobs arrive."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envbuilder.oci.model import Image
    from envbuilder.spec.catalog import Catalog
    from envbuilder.store.store import Store


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from envbuilder.cli.buildcache import configure_reading

    parser.epilog = (
        "An environment is built, with layers from the caches where they have them; a reference is pulled. Afterwards\n"
        "the root of each is there, and the next `launch` starts at once. Prints the name and digest of each.\n\n"
        "example: envbuilder cache warm registry.example/team/ai-v4:1"
    )
    parser.add_argument("images", nargs="+", metavar="ENV|REF")
    configure_reading(parser)
    parser.add_argument("--index-url", metavar="URL", help="the package index, instead of the configured one")


def run(args: argparse.Namespace) -> int:
    """Bring each image and make its root."""
    from envbuilder import report
    from envbuilder.cli.buildcache import check_cache_options
    from envbuilder.spec.catalog import find_catalog
    from envbuilder.store.roots import root_tree
    from envbuilder.store.store import Store, default_root

    args = argparse.Namespace(**vars(args), cache_to=None, record=False)
    check_cache_options(args)
    store, catalog = Store(default_root()), find_catalog(Path.cwd())
    rows = []
    for text in dict.fromkeys(args.images):
        begun = time.monotonic()
        name, image = _bring(text, args, catalog, store)
        root_tree(store, image)
        report.step(f"{name} is ready after {time.monotonic() - begun:.1f} s")
        rows.append({"name": name, "digest": str(image.digest)})
        if not args.json:
            print(f"{name}@{image.digest}", flush=True)
    if args.json:
        print(json.dumps({"schema": 1, "images": rows}, indent=2))
    return 0


def _bring(text: str, args: argparse.Namespace, catalog: Catalog, store: Store) -> tuple[str, Image]:
    """Return what an environment or a reference is called in the store, and its image, whose layers are there."""
    if text in catalog.names():
        from envbuilder.cli.build import read_source
        from envbuilder.cli.buildcache import make, means_for
        from envbuilder.images.build import with_base
        from envbuilder.images.cachedbuild import Wanted

        source = with_base(read_source(catalog, text), store)
        built = make(args, catalog, Wanted(source, ()), means_for(source, store, args.index_url))
        store.put_image(built.image, built.source.name)
        return built.source.name, built.image
    from envbuilder.errors import InputError, did_you_mean

    if "/" not in text:
        raise InputError(f"no environment is named `{text}`", hint=did_you_mean(text, catalog.names()))
    from envbuilder.images.pull import pull
    from envbuilder.registry.reference import Reference

    pulled = pull(Reference.parse(text), store)
    return pulled.name, pulled.image
