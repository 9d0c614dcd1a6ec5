"""``envbuilder cache du``: what takes up how much room in the store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

#: How the kinds of ``store.usage`` are called, in the order in which they are shown.
_KINDS = {
    "layer": "layers",
    "wheel": "wheels",
    "deb": "Debian packages",
    "archive": "source archives and unnamed layers",
    "bytecode": "bytecode",
    "document": "manifests and configurations",
    "other": "other blobs",
    "tree": "unpacked layers",
    "root": "roots (what they do not share with layers)",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "Bytes on the disk; a file with several names counts once.\n\nexample: envbuilder cache du"


def run(args: argparse.Namespace) -> int:
    """Print number and bytes of each kind, and the total."""
    from envbuilder.cli.console import format_size, show_table
    from envbuilder.store.overview import shared_bytes
    from envbuilder.store.store import Store, default_root
    from envbuilder.store.usage import usage

    store = Store(default_root())
    found = usage(store)
    kinds = found.by_kind()
    rest = {name: size for name, size in found.rest.items() if size}
    shared = shared_bytes(store)
    if args.json:
        document = {
            "schema": 1,
            "store": str(store.root),
            "kinds": {name: {"count": kinds[name][0], "bytes": kinds[name][1]} for name in _KINDS if name in kinds},
            "rest": rest,
            "shared": shared,
            "total": found.total,
        }
        print(json.dumps(document, indent=2))
        return 0
    rows = [
        (words, str(kinds[name][0]), format_size(kinds[name][1])) for name, words in _KINDS.items() if name in kinds
    ]
    rows += [(f"{name}", "", format_size(size)) for name, size in sorted(rest.items(), key=lambda pair: -pair[1])]
    rows.append(("total", "", format_size(found.total)))
    rows.append(("in layers that several images share", "", format_size(shared)))
    show_table(("what", "number", "on the disk"), rows)
    return 0
