"""``envbuilder cache gc``: collect what is worthless, evict what was not used for longest."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from envbuilder.store.gc import Doomed

EPILOG = """\
Without a budget only what is worth nothing goes. With one also roots, unpacked layers, and the blobs that no image needs
(layers, wheels, packages, bytecode), least recently used first. Named images go only with --images. What is pinned, what a
running command uses, and what was used within the last ten minutes, stays.

Exit codes: 0 done, 1 the budget could not be kept.

example: envbuilder cache gc --budget 50GB --dry-run
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--budget", metavar="SIZE", help="the store's size on the disk: 50GB, 800MB (default: $ENVBUILDER_BUDGET)"
    )
    parser.add_argument("--images", action="store_true", help="also named images, when the budget needs it")
    parser.add_argument("--now", action="store_true", help="also what was used within the last ten minutes")
    parser.add_argument("--dry-run", action="store_true", help="print what would go, and remove nothing")


def run(args: argparse.Namespace) -> int:
    """Collect; print what went, or would go, and what is left."""
    from envbuilder import report
    from envbuilder.cli.console import format_size
    from envbuilder.store.gc import YOUNG, carry_out, make_plan
    from envbuilder.store.store import Store, default_root

    text = args.budget if args.budget is not None else os.environ.get("ENVBUILDER_BUDGET") or None
    budget = parse_size(text) if text is not None else None
    store = Store(default_root())
    plan = make_plan(store, budget, images=args.images, young=0 if args.now else YOUNG)
    images, gone, left = plan.images, plan.doomed, plan.total - plan.size
    if not args.dry_run:
        done = carry_out(store, plan)
        images, gone, left = done.images, done.removed, done.left
    if args.json:
        print(json.dumps(_document(images, gone, left, budget, dry_run=args.dry_run), indent=2))
    else:
        _show(images, gone, left, dry_run=args.dry_run)
    if budget is not None and left > budget:
        report.warning(
            f"{format_size(left)} are left, which is over the budget of {format_size(budget)}: what is left belongs to "
            "images, is pinned, in use, or was used just now"
        )
        return 1
    return 0


def parse_size(text: str) -> int:
    """Return a size in bytes: ``50GB``, ``1.5 TB``, ``800MiB``, ``1000``; raise InputError for anything else."""
    import re

    from envbuilder.errors import InputError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)[bB]?\s*", text)
    if match is None:
        raise InputError(f"`{text}` is not a size", hint="write a number with a unit: 50GB, 800MB, 20GiB")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _show(images: Sequence[str], gone: Sequence[Doomed], left: int, *, dry_run: bool) -> None:
    from envbuilder.cli.console import format_size, show_table

    rows = [("image", name, "", "its name is dropped to keep to the budget") for name in images]
    rows += [(entry.kind, entry.path.name, format_size(entry.size), entry.reason.value) for entry in gone]
    show_table(("what", "name", "size", "why"), rows)
    size = format_size(sum(entry.size for entry in gone))
    verb = "would be removed" if dry_run else "removed"
    print(f"{len(gone)} {verb}, {size}; {format_size(left)} {'would be ' if dry_run else ''}left")


def _document(
    images: Sequence[str], gone: Sequence[Doomed], left: int, budget: int | None, *, dry_run: bool
) -> dict[str, object]:
    return {
        "schema": 1,
        "dry-run": dry_run,
        "budget": budget,
        "images": list(images),
        "removed": [
            {"kind": entry.kind, "name": entry.path.name, "bytes": entry.size, "reason": entry.reason.name.lower()}
            for entry in gone
        ],
        "bytes": sum(entry.size for entry in gone),
        "left": left,
    }
