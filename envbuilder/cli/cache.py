"""``envbuilder cache``: what lies in the store, and how it is kept small and sound. Each action is a module of its own."""

from __future__ import annotations

import argparse
import importlib

EPILOG = """\
examples:
  envbuilder cache ls
  envbuilder cache gc --budget 50GB --dry-run
  envbuilder cache verify --all

The store lies below XDG_CACHE_HOME (default ~/.cache). ENVBUILDER_BUDGET is the budget of `gc` when none is given.
"""
#: Action -> what it does. Each is a module ``cache_<action>`` of this package with ``configure`` and ``run``.
ACTIONS = {
    "ls": "list the images",
    "du": "show what takes up how much room",
    "gc": "remove what is worthless, and with a budget what was not used for longest",
    "verify": "look for damage, and move what is damaged aside",
    "warm": "have images on this host, unpacked, before jobs arrive",
    "plan": "what hosts must still fetch, and what that costs a registry",
    "pin": "keep an image from being evicted",
    "rm": "remove an image's name; `gc` frees its bytes",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    parser.epilog = EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    for name, summary in ACTIONS.items():
        own = actions.add_parser(
            name, help=summary, description=summary.capitalize() + ".", formatter_class=argparse.RawTextHelpFormatter
        )
        importlib.import_module(f"envbuilder.cli.cache_{name}").configure(own)
        own.add_argument("--json", action="store_true", help="a JSON document on stdout")
        for option in ("-q/--quiet", "-v/--verbose", "--no-progress"):  # as `cache` itself has them
            own.add_argument(*option.split("/"), action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    code: int = importlib.import_module(f"envbuilder.cli.cache_{args.action}").run(args)
    return code
