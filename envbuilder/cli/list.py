"""``envbuilder list``: the environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = "example: envbuilder list"
    parser.add_argument("--json", action="store_true", help="a JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print name, Python, CUDA, status, end of support and title of every environment."""
    from envbuilder.cli.console import show_table
    from envbuilder.spec.catalog import find_catalog

    catalog = find_catalog(Path.cwd())
    environments = [catalog.environment(name) for name in catalog.names()]
    columns = ("name", "python", "cuda", "status", "end-of-support", "title")
    rows = [(e.name, e.python, e.cuda, e.status, e.end_of_support.isoformat(), e.title) for e in environments]
    if args.json:
        entries = [dict(zip(columns, row, strict=True)) for row in rows]
        print(json.dumps({"schema": 1, "environments": entries}, indent=2))
    else:
        show_table(columns, rows)
    return 0
