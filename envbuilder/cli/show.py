"""``envbuilder show ENV``: what an environment promises and what it resolved to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = "example: envbuilder show base-v4"
    parser.add_argument("environment", metavar="ENV")
    parser.add_argument(
        "--files",
        action="store_true",
        help="list the built image's files, layer by layer: mode, owner, size, sha256, path",
    )
    parser.add_argument("--json", action="store_true", help="a JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print name, version and size of every locked package; with ``--json`` the promise as well."""
    from envbuilder.cli.console import format_size, show_table
    from envbuilder.lock.files import read_lock
    from envbuilder.spec.catalog import find_catalog

    catalog = find_catalog(Path.cwd())
    environment = catalog.environment(args.environment)
    if args.files:
        return _show_files(environment.name)
    lock = read_lock(catalog.lock_file(environment.name))
    if not args.json:
        rows = [(p.name, p.version, format_size(p.size), "from source" if p.build else "") for p in lock.packages]
        show_table(("package", "version", "size", ""), rows)
        return 0
    document = {
        "schema": 1,
        "name": environment.name,
        "title": environment.title,
        "extends": environment.extends,
        "python": environment.python,
        "cuda": environment.cuda,
        "status": environment.status,
        "end-of-support": environment.end_of_support.isoformat(),
        "accelerators": list(environment.accelerators),
        "packages": [
            {"name": p.name, "version": p.version, "file": p.file, "sha256": p.digest.hex, "size": p.size}
            for p in lock.packages
        ],
        "deviations": [
            {"package": d.package, "published": d.published, "ours": d.ours, "reason": d.reason}
            for d in environment.deviations
        ],
    }
    print(json.dumps(document, indent=2))
    return 0


def _show_files(name: str) -> int:
    """Print every member of the image's layers, to compare with another build line by line."""
    from envbuilder.errors import InputError
    from envbuilder.oci.listing import listing
    from envbuilder.store.store import Store, default_root
    from envbuilder.store.unpack import open_layer

    store = Store(default_root())
    digest = store.find_image(name)
    if digest is None:
        raise InputError(f"there is no image of `{name}` on this machine", hint=f"build it: `envbuilder build {name}`")
    image = store.image(digest)
    for number, (layer, history) in enumerate(zip(image.manifest.layers, image.config.history, strict=True), start=1):
        print(f"# layer {number}: {layer.digest} {history.created_by}")
        with open_layer(store, layer) as stream:
            for line in listing(stream):
                print(line)
    return 0
