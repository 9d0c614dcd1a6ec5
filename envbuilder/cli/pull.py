"""``envbuilder pull REF``: an image in a registry -> the store, unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from envbuilder.images.pull import Pulled

EPILOG = """\
Prints the reference with the image's digest, and nothing else, on stdout. Layers that are in the store are not fetched
again; what was broken off is continued by the next pull.

examples:
  envbuilder pull registry.example.com/ml/ai:v4      # an image of ours is called as its environment is
  envbuilder pull debian:bookworm-slim --as debian && envbuilder launch debian -- cat /etc/os-release
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("reference", metavar="REF", help="registry/repository:tag, or @sha256:...")
    parser.add_argument("--as", dest="name", metavar="NAME", help="what the image is called on this machine")
    parser.add_argument("--no-unpack", action="store_true", help="leave unpacking to the first launch")
    parser.add_argument("--json", action="store_true", help="a JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Pull, print the reference."""
    from envbuilder.images.pull import pull
    from envbuilder.registry.reference import Reference
    from envbuilder.store.store import Store, default_root

    reference = Reference.parse(args.reference)
    pulled = pull(reference, Store(default_root()), name=args.name, unpack=not args.no_unpack)
    _say(pulled)
    print(_document(pulled) if args.json else pulled.reference)
    return 0


def _say(pulled: Pulled) -> None:
    from envbuilder import report
    from envbuilder.cli.console import format_size

    parts = [("received", pulled.received), ("there already", pulled.present)]
    said = ", ".join(f"{format_size(size)} {how}" for how, size in parts if size)
    report.step(f"pulled as `{pulled.name}`: {said}")


def _document(pulled: Pulled) -> str:
    import json

    document = {
        "schema": 1,
        "name": pulled.name,
        "reference": str(pulled.reference),
        "digest": str(pulled.image.digest),
        "stated": str(pulled.stated),
        "bytes": {"received": pulled.received, "present": pulled.present},
    }
    return json.dumps(document, indent=2)
