"""``envbuilder cache pin``: keep an image from being evicted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

EPILOG = """\
A name stands for the image that it points at whenever `gc` runs; a digest for one image or blob. What is unpacked of a
pinned image stays, too. Without a name the pins are listed.

example: envbuilder cache pin ai-v4
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("names", metavar="ENV|REF|DIGEST", nargs="*")
    parser.add_argument("--remove", action="store_true", help="remove the pins instead")


def run(args: argparse.Namespace) -> int:
    """Pin or unpin, and print the pins that there are then, one a line."""
    from envbuilder.store.pins import pin, read_pins, unpin
    from envbuilder.store.store import Store, default_root

    store = Store(default_root())
    for name in args.names:
        (unpin if args.remove else pin)(store, name)
    pins = read_pins(store)
    if args.json:
        print(json.dumps({"schema": 1, "pins": list(pins)}, indent=2))
    else:
        for name in pins:
            print(name)
    return 0
