"""What the user sees: messages, progress bars, errors, tables. The only module that imports rich."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from envbuilder.report import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import TaskID

    from envbuilder.errors import EnvbuilderError
    from envbuilder.report import Task

#: In a log, where no bars are drawn, only tasks of at least this many bytes get a line.
_LARGE = 1_000_000


class _Bar:
    def __init__(self, progress: Progress | None, number: TaskID | None) -> None:
        self._progress = progress
        self.number = number

    def advance(self, amount: int) -> None:
        if self._progress is not None and self.number is not None:
            self._progress.update(self.number, advance=amount)


class Console:
    """A reporter that writes to stderr: bars on a terminal, a line for each large item elsewhere."""

    def __init__(self, *, quiet: bool, verbose: bool, progress: bool) -> None:
        self._quiet = quiet
        self._rich = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        # Verbose hides the bars: they would interleave with the lines.
        bars = progress and not quiet and not verbose and self._rich.is_terminal
        self._progress = _make_progress(self._rich) if bars else None
        self._guard = threading.Lock()
        self._shown = 0

    def close(self) -> None:
        """Remove what is still shown of the progress."""
        if self._progress is not None:
            self._progress.stop()

    def message(self, text: str, kind: Kind) -> None:
        """Print a message of its kind."""
        if kind is Kind.WARNING:
            self._rich.print(Text.assemble(("warning: ", "bold yellow"), text))
        else:
            self._rich.print(Text(text, style="dim" if kind is Kind.DETAIL else ""))

    def begin(self, label: str, total: int | None) -> Task:
        """Begin a bar, or write a line when the item is large."""
        if self._progress is not None:
            # Only now: the display hides the cursor, which a command that is launched would miss.
            with self._guard:
                self._shown += 1
                self._progress.start()
            return _Bar(self._progress, self._progress.add_task(label, total=total))
        if total is not None and total >= _LARGE and not self._quiet:
            self.message(f"{label} ({format_size(total)})", Kind.STEP)
        return _Bar(None, None)

    def end(self, task: Task) -> None:
        """Remove a bar."""
        if self._progress is not None and isinstance(task, _Bar) and task.number is not None:
            self._progress.remove_task(task.number)
            with self._guard:
                self._shown -= 1
                if self._shown == 0:
                    self._progress.stop()


def show_error(error: EnvbuilderError, *, verbose: bool) -> None:
    """Print an error, what caused it, and its hint; with ``verbose`` the traceback too."""
    console = RichConsole(stderr=True, highlight=False, soft_wrap=True)
    if verbose:
        console.print(Text("".join(traceback.format_exception(error)), style="dim"))
    console.print(Text.assemble(("error: ", "bold red"), error.message))
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold cyan"), error.hint))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout: aligned for people on a terminal, tab-separated elsewhere."""
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(row) + "\n" for row in rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    RichConsole(highlight=False).print(table)


def format_size(size: int) -> str:
    """Return a size in decimal units, as registries and indexes state it: ``3.65 GB``."""
    for unit, factor in (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def _make_progress(console: RichConsole) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)
