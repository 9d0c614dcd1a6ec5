"""``envbuilder cache rm``: let an image go."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "The layers stay until `envbuilder cache gc --budget ...` needs their room, and a build takes them up again.\n\n"
        "example: envbuilder cache rm base-v3"
    )
    parser.add_argument("names", metavar="IMAGE", nargs="+")


def run(args: argparse.Namespace) -> int:
    """Remove the names; print them.

    Raises:
        InputError: there is no image of a name, or it is pinned; nothing is removed then.

    """
    from envbuilder.errors import InputError, did_you_mean
    from envbuilder.store.pins import read_pins
    from envbuilder.store.store import Store, default_root

    store = Store(default_root())
    images, pins = store.images(), read_pins(store)
    for name in args.names:
        if name not in images:
            raise InputError(f"no image is named `{name}`", hint=did_you_mean(name, images) or "there are no images")
        if name in pins:
            raise InputError(f"`{name}` is pinned", hint=f"`envbuilder cache pin --remove {name}` removes the pin")
    for name in args.names:
        store.drop_image(name)
    if args.json:
        print(json.dumps({"schema": 1, "removed": list(args.names)}, indent=2))
    else:
        for name in args.names:
            print(name)
    return 0
