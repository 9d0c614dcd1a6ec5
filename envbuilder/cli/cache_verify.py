"""``envbuilder cache verify``: look for damage in the store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from envbuilder.store.verify import Incomplete

EPILOG = """\
Every blob is read and hashed. A damaged one is moved to the store's folder `quarantine`, and what was known or unpacked
of it is dropped, so that the next build makes it again. With --all every unpacked file is compared with its layer as well
(content, not modes and owners).

Exit codes: 0 all is sound, 1 something was damaged or is missing.

example: envbuilder cache verify
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("--all", action="store_true", help="compare unpacked files with their layers, too")


def run(args: argparse.Namespace) -> int:
    """Verify; print what is wrong and how it is repaired."""
    from envbuilder.cli.console import format_size
    from envbuilder.store.store import Store, default_root
    from envbuilder.store.verify import verify

    done = verify(Store(default_root()), trees=args.all)
    if args.json:
        document = {
            "schema": 1,
            "clean": done.clean,
            "blobs": done.blobs,
            "bytes": done.size,
            "damaged": [
                {"name": damage.name, "reason": damage.reason, "quarantine": str(damage.quarantine)}
                for damage in done.damaged
            ],
            "forgotten": done.forgotten,
            "trees": done.trees,
            "damaged-trees": [str(digest) for digest in done.wrong],
            "dropped": [str(digest) for digest in done.dropped],
            "incomplete": [
                {
                    "name": image.name,
                    "digest": str(image.digest),
                    "missing": [str(digest) for digest in image.missing],
                    "repair": repair(image),
                }
                for image in done.incomplete
            ],
        }
        print(json.dumps(document, indent=2))
        return 0 if done.clean else 1
    for damage in done.damaged:
        print(f"damaged: {damage.name}: {damage.reason}; moved to {damage.quarantine}")
    for digest in done.wrong:
        print(f"damaged: the unpacked layer {digest}; it is unpacked again when it is needed")
    for image in done.incomplete:
        print(f"incomplete: `{image.name}` misses {len(image.missing)} blobs; run `{repair(image)}`")
    trees = f", {done.trees} unpacked layers" if args.all else ""
    print(f"{done.blobs} blobs ({format_size(done.size)}){trees}: {'sound' if done.clean else 'damaged'}")
    return 0 if done.clean else 1


def repair(image: Incomplete) -> str:
    """Return the command that makes an image whole again: names with a slash came from a registry."""
    if "/" in image.name:
        return f"envbuilder pull {image.name}"
    environment, *extras = image.name.split("+")
    return " ".join(["envbuilder build", environment, *(f"--extra {extra}" for extra in extras)])
