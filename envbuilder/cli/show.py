"""``envbuilder show ENV``: what an environment promises and what it resolved to; what belongs to an image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from envbuilder.oci.digest import Digest
    from envbuilder.registry.client import Repository


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "ENV is an environment; with --sbom, --lock and --referrers it may be an image in a registry.\n\n"
        "example: envbuilder show base-v4\n"
        "example: envbuilder show --sbom registry.example/team/base-v4:latest"
    )
    parser.add_argument("environment", metavar="ENV")
    of_image = parser.add_mutually_exclusive_group()
    of_image.add_argument("--sbom", action="store_true", help="print what the image consists of (CycloneDX JSON)")
    of_image.add_argument("--lock", action="store_true", help="print the lock that the image was made from")
    of_image.add_argument("--referrers", action="store_true", help="list what a registry has next to the image")
    of_image.add_argument(
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

    if args.sbom or args.lock:
        return _show_document(args.environment, "SBOM" if args.sbom else "LOCK")
    if args.referrers:
        return _show_referrers(args.environment, as_json=args.json)
    if args.files:
        return _show_files(args.environment)
    catalog = find_catalog(Path.cwd())
    environment = catalog.environment(args.environment)
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
    from envbuilder.cli.stored import stored_image
    from envbuilder.oci.listing import listing
    from envbuilder.store.store import Store, default_root
    from envbuilder.store.unpack import open_layer

    store = Store(default_root())
    image = stored_image(store, name)
    made = zip(image.manifest.layers, image.config.layer_history, strict=True)
    for number, (layer, history) in enumerate(made, start=1):
        print(f"# layer {number}: {layer.digest} {history.created_by}")
        with open_layer(store, layer) as stream:
            for line in listing(stream):
                print(line)
    return 0


def _show_document(name: str, kind: str) -> int:
    """Print a document that belongs to an image: of one on this machine, or as a registry has it next to one."""
    import sys

    from envbuilder.cli.stored import stored_image
    from envbuilder.errors import InputError
    from envbuilder.images import artifacts
    from envbuilder.store.store import Store, default_root

    media_type = {"SBOM": artifacts.SBOM, "LOCK": artifacts.LOCK}[kind]
    if _is_reference(name):
        data = artifacts.fetch_artifact(*_find(name), media_type)
    else:
        store = Store(default_root())
        found = {a.media_type: a.data for a in artifacts.artifacts_of(stored_image(store, name), store)}
        if media_type not in found:
            raise InputError(f"the image `{name}` is not an environment's: nothing is known of what it was made from")
        data = found[media_type]
    sys.stdout.buffer.write(data)
    return 0


def _show_referrers(name: str, *, as_json: bool) -> int:
    """Print type, digest and size of each manifest that refers to an image in a registry."""
    from envbuilder.cli.console import show_table

    repository, digest = _find(name)
    found = repository.referrers(digest)
    if as_json:
        rows = [{"type": entry.artifact_type, "digest": str(entry.digest), "size": entry.size} for entry in found]
        print(json.dumps({"schema": 1, "image": f"{repository.name}@{digest}", "referrers": rows}, indent=2))
        return 0
    show_table(("type", "manifest", "size"), [(d.artifact_type, str(d.digest), str(d.size)) for d in found])
    return 0


def _is_reference(name: str) -> bool:
    """Return whether a name means an image in a registry: environments have none of these characters."""
    return any(mark in name for mark in "/:@")


def _find(name: str) -> tuple[Repository, Digest]:
    """Return the repository that a reference names, and the digest of the image."""
    from envbuilder.errors import InputError
    from envbuilder.registry.client import open_repository
    from envbuilder.registry.reference import Reference

    reference = Reference.parse(name)
    repository = open_repository(reference)
    found = repository.resolve(reference.target)
    if found is None:
        raise InputError(f"{reference.name} has no image `{reference.target}`")
    return repository, found.digest
