"""What is known of the images, as data: ``facts.toml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder.tomlread import load

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from envbuilder.tomlread import Table

FILE = Path(__file__).with_name("facts.toml")
CAUSES = (
    "another package", "another program", "display", "driver", "network", "no help", "not for Linux", "read-only",
    "system library", "upstream",
)  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """Something that fails in the image, why, and what it says then."""

    name: str
    cause: str
    says: str
    reason: str


@dataclass(frozen=True)
class Attempt:
    """What became of an attempt in the image; see ``inside/attempts.py``. ``code`` is None when it took too long."""

    name: str
    code: int | None
    seconds: float
    output: str


@dataclass(frozen=True)
class Facts:
    """The whole file. ``kinds`` are the differences that each installer's result may have, with the reason."""

    kinds: Mapping[str, Mapping[str, str]]
    imports: tuple[Failure, ...]
    scripts: tuple[Failure, ...]
    arguments: Mapping[str, str]
    without_modules: Mapping[str, str]


def read_facts(file: Path = FILE) -> Facts:
    """Read the facts; raise TomlError when the file does not say what it should."""
    table = load(file)
    facts = Facts(
        {installer: table.string_map(installer) for installer in ("uv", "pip")},
        tuple(failure for inner in table.tables("import") for failure in _failures(inner)),
        tuple(failure for inner in table.tables("script") for failure in _failures(inner)),
        table.string_map("arguments"),
        table.string_map("without-modules"),
    )
    table.finish()
    return facts


def _failures(table: Table) -> list[Failure]:
    names, cause, says, reason = (
        table.strings("names"), table.string("cause"), table.string("says"), table.string("reason"),
    )  # fmt: skip
    table.finish()
    if cause not in CAUSES:
        raise table.error("cause", f"must be one of {', '.join(CAUSES)}")
    return [Failure(name, cause, says, reason) for name in names]


def unexplained(attempts: Iterable[Attempt], failures: Iterable[Failure]) -> list[str]:
    """Return what failed without being known to, or otherwise than known, and what is known to fail but did not."""
    known = {failure.name: failure for failure in failures}
    found = []
    for attempt in attempts:
        failure = known.pop(attempt.name, None)
        if attempt.code == 0:
            if failure is not None:
                found.append(f"{attempt.name}: is known to fail ({failure.cause}), but works")
        elif failure is None or failure.says not in attempt.output:
            end = "took too long" if attempt.code is None else f"ended with {attempt.code}"
            found.append(f"{attempt.name}: {end} after {attempt.seconds} s:\n{attempt.output[-800:]}")
    return [*found, *(f"{name}: is known to fail, but was not there to be tried" for name in known)]
