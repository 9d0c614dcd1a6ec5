"""``python -m envbuilder``: the command line."""

from envbuilder.cli.main import entry

entry()
