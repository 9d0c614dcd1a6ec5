"""``envbuilder push ENV REF``: an image of the store -> a registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from envbuilder.images.cachedbuild import Built
    from envbuilder.images.push import Pushed
    from envbuilder.oci.model import Image
    from envbuilder.registry.reference import Reference
    from envbuilder.store.store import Store

EPILOG = """\
Prints the reference with the image's digest, and nothing else, on stdout. Layers that the registry has are not sent
again; what was broken off is continued by the next push. Next to an environment's image its lock and its SBOM are
published; `envbuilder show --referrers REF` lists them.

examples:
  envbuilder push ai-v4 registry.example.com/ml/ai:v4
  envbuilder build ai-v4 && envbuilder push ai-v4 localhost:5000/ai
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "environment", metavar="ENV", help="the environment, built before, or the name of a pulled image"
    )
    parser.add_argument("reference", metavar="REF", help="registry/repository:tag; without a tag, `latest`")
    parser.add_argument("--json", action="store_true", help="a JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Push, print the reference."""
    from envbuilder.cli.stored import stored_image
    from envbuilder.store.store import Store, default_root

    reference = destination(args.reference)
    store = Store(default_root())
    pushed = _push(stored_image(store, args.environment), store, reference)
    print(_document(pushed) if args.json else pushed.reference)
    return 0


def destination(text: str) -> Reference:
    """Return where to push to; raise InputError when the text is no reference."""
    from envbuilder.registry.reference import Reference

    return Reference.parse(text)


def push_built(built: Built, store: Store, reference: Reference) -> Reference:
    """Push what was built, and return its reference by digest. Layers that only a cache has are taken from there.

    Raises: as ``images.push.push`` and ``images.remotecache.offer``.
    """
    if built.hits:
        from envbuilder.images.remotecache import offer
        from envbuilder.registry.client import open_repository

        offer(built.hits, open_repository(reference, push=True), store)
    return _push(built.image, store, reference).reference


def _push(image: Image, store: Store, reference: Reference) -> Pushed:
    """Push an image and what is published next to it, and say what that moved."""
    from envbuilder import report
    from envbuilder.cli.console import format_size
    from envbuilder.images.artifacts import publish_artifacts
    from envbuilder.images.push import push
    from envbuilder.store.store import NotInStoreError

    pushed = push(image, store, reference)
    try:
        publish_artifacts(image, store, reference)
    except NotInStoreError as error:  # layers that the registry took over from a cache
        report.warning(f"lock and SBOM are not published next to the image: {error.message}")
    parts = [("sent", pushed.sent), ("taken over", pushed.mounted), ("there already", pushed.present)]
    report.step(f"pushed: {', '.join(f'{format_size(size)} {how}' for how, size in parts if size)}")
    return pushed


def _document(pushed: Pushed) -> str:
    import json

    counts = {"sent": pushed.sent, "mounted": pushed.mounted, "present": pushed.present}
    document = {
        "schema": 1,
        "reference": str(pushed.reference),
        "digest": str(pushed.reference.digest),
        "bytes": counts,
    }
    return json.dumps(document, indent=2)
