"""The reporter that commands run under: it makes the console when there is something to show, and not before.

Importing rich takes as long as a build in which nothing has changed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from envbuilder.report import Kind

if TYPE_CHECKING:
    from types import TracebackType

    from envbuilder.cli.console import Console
    from envbuilder.report import Task


class ConsoleReporter:
    """Passes on to a ``Console`` made at the first need. Use as a context manager."""

    def __init__(self, *, quiet: bool, verbose: bool, progress: bool) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self._bars = progress
        self._made: Console | None = None
        self._guard = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            self._made.close()

    def message(self, text: str, kind: Kind) -> None:
        """Show a message, unless nobody wants to see its kind."""
        if kind is Kind.WARNING or (kind is Kind.STEP and not self._quiet) or (kind is Kind.DETAIL and self._verbose):
            self._console.message(text, kind)

    def begin(self, label: str, total: int | None) -> Task:
        """Begin a task."""
        return self._console.begin(label, total)

    def end(self, task: Task) -> None:
        """End a task."""
        self._console.end(task)

    @property
    def _console(self) -> Console:
        with self._guard:
            if self._made is None:
                from envbuilder.cli.console import Console

                self._made = Console(quiet=self._quiet, verbose=self._verbose, progress=self._bars)
            return self._made
