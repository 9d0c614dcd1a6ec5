"""The error tree: every error that a user can cause or meet is one of these.

Each carries a message (what happened and where), an optional hint (what to do next) and the exit code of the
command. Rooms subclass the one that fits; ``cli.main`` is the only place that catches.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class EnvbuilderError(Exception):
    """Base of all errors. ``message`` is one sentence without a full stop; ``hint`` says what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class NoError(EnvbuilderError):
    """The answer is no: incompatible, drifted, failed. Exit code 1."""

    exit_code = 1


class InputError(EnvbuilderError):
    """What the caller gave is wrong: a name, a file, an option. Exit code 2."""

    exit_code = 2


class UnreachableError(EnvbuilderError):
    """It could not be told or done because an index, registry or mirror is out of reach. Exit code 3."""

    exit_code = 3


class HostError(EnvbuilderError):
    """This host does not fit: a program, a driver, room on the disk is missing. Exit code 4."""

    exit_code = 4


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a hint that names the nearest of ``known``, or all of them when there are few; None when there are none."""
    names = sorted(set(known))
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if nearest:
        return f"did you mean `{nearest[0]}`?"
    if names:
        return "known: " + ", ".join(f"`{name}`" for name in names[:20])
    return None
