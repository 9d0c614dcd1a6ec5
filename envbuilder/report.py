"""How library code speaks: messages and progress go to the reporter in force; only ``cli`` draws.

The reporter lives in a ContextVar, so that tests and library users see nothing of the terminal. Threads started by
``envbuilder.parallel`` inherit it.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kind(Enum):
    """What a message is: a step of the work, a detail (shown with -v), a warning."""

    STEP = "step"
    DETAIL = "detail"
    WARNING = "warning"


class Task(Protocol):
    """A piece of long work whose progress is shown."""

    def advance(self, amount: int) -> None:
        """Count ``amount`` more units (bytes) as done. Safe to call from any thread."""


class Reporter(Protocol):
    """Receives what the library has to say."""

    def message(self, text: str, kind: Kind) -> None:
        """Take one message."""

    def begin(self, label: str, total: int | None) -> Task:
        """Begin a task of ``total`` bytes (None: unknown)."""

    def end(self, task: Task) -> None:
        """End a task, finished or not."""


class _SilentTask:
    def advance(self, amount: int) -> None:
        """Ignore it."""


class LogReporter:
    """The default: messages go to the ``envbuilder`` logger, progress nowhere."""

    _levels = {Kind.STEP: logging.INFO, Kind.DETAIL: logging.DEBUG, Kind.WARNING: logging.WARNING}  # noqa: RUF012

    def message(self, text: str, kind: Kind) -> None:
        """Log the text at the level of its kind."""
        logging.getLogger("envbuilder").log(self._levels[kind], "%s", text)

    def begin(self, label: str, total: int | None) -> Task:  # noqa: ARG002
        """Return a task that shows nothing."""
        return _SilentTask()

    def end(self, task: Task) -> None:
        """Do nothing."""


_reporter: ContextVar[Reporter] = ContextVar("reporter", default=LogReporter())  # noqa: B039 (stateless)


@contextmanager
def using(reporter: Reporter) -> Iterator[None]:
    """Send messages and progress to ``reporter`` inside the block."""
    token = _reporter.set(reporter)
    try:
        yield
    finally:
        _reporter.reset(token)


def step(text: str) -> None:
    """Report a step of the work."""
    _reporter.get().message(text, Kind.STEP)


def detail(text: str) -> None:
    """Report something that only a curious user wants to see."""
    _reporter.get().message(text, Kind.DETAIL)


def warning(text: str) -> None:
    """Report something that is not as it should be, but does not stop the work."""
    _reporter.get().message(text, Kind.WARNING)


@contextmanager
def task(label: str, total: int | None = None) -> Iterator[Task]:
    """Show progress on ``label`` inside the block; call ``advance`` with the bytes done."""
    reporter = _reporter.get()
    current = reporter.begin(label, total)
    try:
        yield current
    finally:
        reporter.end(current)
