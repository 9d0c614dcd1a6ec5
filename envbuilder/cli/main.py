"""The entry point: parses the command line, runs the command, and is the only place that catches errors."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from envbuilder import __version__
from envbuilder.errors import EnvbuilderError, InputError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Command -> what it does. Each is a module of this package with ``configure`` and ``run``.
COMMANDS = {
    "list": "list the environments",
    "show": "show an environment and its packages",
    "lock": "resolve environments into locks",
    "build": "build an environment's image",
    "push": "push an environment's image to a registry",
    "pull": "pull an image from a registry, ready to run",
    "launch": "run a command in an environment's image",
    "cache": "look after the store on this machine",
}
_ISSUES = "the project's issue tracker"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        hint = f"see `{self.prog} --help`"
        if "invalid choice" in message:
            word = message.split("'")[1]
            known = [str(name) for action in self._actions for name in action.choices or ()]
            hint = did_you_mean(word, known) or hint
        raise InputError(message, hint=hint)


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser. With ``command`` only that one's module is imported, so that others cost nothing."""
    parser = _Parser(
        prog="envbuilder",
        description="Build, check and run versioned GPU Python environments.",
        epilog="example: envbuilder build ai-v4",
    )
    parser.add_argument("--version", action="version", version=f"envbuilder {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, summary in COMMANDS.items():
        own = commands.add_parser(
            name, help=summary, description=summary.capitalize() + ".", formatter_class=argparse.RawTextHelpFormatter
        )
        if name == command:
            group = own.add_argument_group("output")
            group.add_argument("-q", "--quiet", action="store_true", help="only warnings and errors")
            group.add_argument("-v", "--verbose", action="store_true", help="details, and tracebacks of errors")
            group.add_argument("--no-progress", action="store_true", help="no progress bars")
            importlib.import_module(f"envbuilder.cli.{name}").configure(own)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 yes, 1 no, 2 wrong input, 3 could not tell, 4 the host does not fit."""
    command = next((word for word in argv if not word.startswith("-")), None)
    verbose = False
    try:
        parser = make_parser(command)
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        verbose = args.verbose
        return _run(args)
    except EnvbuilderError as error:
        from envbuilder.cli.console import show_error

        show_error(error, verbose=verbose)
        return error.exit_code


def _run(args: argparse.Namespace) -> int:
    from envbuilder import report
    from envbuilder.cli.reporter import ConsoleReporter

    reporter = ConsoleReporter(quiet=args.quiet, verbose=args.verbose, progress=not args.no_progress)
    with reporter, report.using(reporter):
        code: int = importlib.import_module(f"envbuilder.cli.{args.command}").run(args)
        return code


def entry() -> NoReturn:
    """Run the command line as a program."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        # At once: threads may be stuck in a read, and whatever they had not finished is a temporary file.
        sys.stderr.write("\ninterrupted\n")
        sys.stderr.flush()
        os._exit(130)
    except BrokenPipeError:
        os._exit(141)
    except Exception:
        sys.stderr.write(f"this is a bug in envbuilder {__version__}; please report what follows to {_ISSUES}:\n")
        raise
    sys.exit(code)
