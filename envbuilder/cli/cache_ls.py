"""``envbuilder cache ls``: the images of the store."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "Sizes are of the compressed layers; `own` is what no other image of the store has.\n\nexample: envbuilder cache ls"


def run(args: argparse.Namespace) -> int:
    """Print name, digest, size, own bytes, whether unpacked and pinned, and last use of every image."""
    from envbuilder.cli.console import format_size, show_table
    from envbuilder.store.overview import image_entries
    from envbuilder.store.pins import read_pins
    from envbuilder.store.store import Store, default_root

    store = Store(default_root())
    entries = image_entries(store)
    if args.json:
        images = [
            {
                "name": entry.name,
                "digest": str(entry.digest),
                "size": entry.size,
                "own": entry.own,
                "unpacked": entry.unpacked,
                "pinned": entry.pinned,
                "last-used": _moment(entry.used),
            }
            for entry in entries
        ]
        print(json.dumps({"schema": 1, "images": images, "pins": list(read_pins(store))}, indent=2))
        return 0
    rows = [
        (
            entry.name,
            str(entry.digest),
            format_size(entry.size),
            format_size(entry.own),
            ", ".join(word for word, true in (("unpacked", entry.unpacked), ("pinned", entry.pinned)) if true) or "-",
            _moment(entry.used) or "not in the store",
        )
        for entry in entries
    ]
    show_table(("image", "digest", "size", "own", "", "last used"), rows)
    return 0


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
