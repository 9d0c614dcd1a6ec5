"""Run a program: one place that finds it, logs the command line, captures its output and explains a failure."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder import report
from envbuilder.errors import EnvbuilderError, HostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Completed:
    """What a program that ended well printed, decoded as UTF-8."""

    stdout: str
    stderr: str


class ProgramMissingError(HostError):
    """A program that is needed is not installed."""

    def __init__(self, name: str, *, hint: str | None = None) -> None:
        super().__init__(f"the program `{name}` is not installed", hint=hint)
        self.name = name


class ProgramFailedError(EnvbuilderError):
    """A program ended with another exit code than 0."""

    def __init__(self, argv: Sequence[str], returncode: int, stdout: str, stderr: str) -> None:
        tail = "\n".join((stderr.strip() or stdout.strip()).splitlines()[-15:])
        super().__init__(f"`{Path(argv[0]).name}` failed with exit code {returncode}:\n{tail}")
        self.argv = tuple(argv)
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


def find(name: str, *, hint: str | None = None) -> Path:
    """Return the path of a program: beside this interpreter (our own dependencies), then on PATH.

    Raises:
        ProgramMissingError: it is in neither.

    """
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return beside
    found = shutil.which(name)
    if found is None:
        raise ProgramMissingError(name, hint=hint)
    return Path(found)


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    hint: str | None = None,
) -> Completed:
    """Run ``argv`` to its end without a terminal and return its output. ``env`` replaces the environment when given.

    Raises:
        ProgramMissingError: ``argv[0]`` cannot be found; carries ``hint``.
        ProgramFailedError: it ended with another exit code than 0.

    """
    name = str(argv[0])
    program = find(name, hint=hint) if "/" not in name else Path(name)
    words = [str(program), *map(str, argv[1:])]
    report.detail(f"$ {shlex.join(words)}")
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, input=stdin, stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True, text=True, encoding="utf-8", errors="replace", check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ProgramMissingError(name, hint=hint) from error
    if done.returncode != 0:
        raise ProgramFailedError(words, done.returncode, done.stdout, done.stderr)
    return Completed(done.stdout, done.stderr)
