"""What was measured, and the tables made of it: pure functions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.measure import Measured


class Side(Enum):
    """Whose work it was."""

    OURS = "envbuilder"
    DOCKER = "docker"
    BUILDAH = "buildah"
    SKOPEO = "skopeo"


class Step(Enum):
    """What was measured, in the order of the table; the value is what the table says."""

    BUILD = "build: wheels local, no package layer cached"
    PUSH = "push to a registry on loopback that has the base"
    PULL = "pull, nothing cached"
    COPY = "pull without unpacking, nothing cached"
    START = "unpack what is still to unpack, and run `true`"
    FIRST_IMPORT = "first import"
    LATER_IMPORT = "later imports"
    AGAIN = "build when nothing changed"
    REBUILD = "rebuild after one small package changed"
    LAUNCH = "run `true`, once it has run before"


@dataclass(frozen=True)
class Row:
    """A row of the main table: one step or a sum of steps, and what is to be reached, in words."""

    label: str
    steps: tuple[Step, ...]
    reach: str = ""


ROWS = (
    *(Row(step.value, (step,)) for step in (Step.BUILD, Step.PUSH)),
    Row("**build + push**", (Step.BUILD, Step.PUSH), "20 times docker"),
    *(Row(step.value, (step,)) for step in (Step.PULL, Step.START)),
    Row("**pull + unpack until it has run**", (Step.PULL, Step.START), "10 times docker"),
    Row(Step.FIRST_IMPORT.value, (Step.FIRST_IMPORT,)),
    Row(Step.LATER_IMPORT.value, (Step.LATER_IMPORT,)),
    Row(Step.AGAIN.value, (Step.AGAIN,), "0.3 s"),
    Row(Step.REBUILD.value, (Step.REBUILD,), "2 s"),
    Row(Step.LAUNCH.value, (Step.LAUNCH,)),
)


#: What is only moved, beside what does nothing else.
COPIES = (
    Row(Step.PUSH.value, (Step.PUSH,)),
    Row(Step.COPY.value, (Step.COPY,)),
)


@dataclass
class Results:
    """Collects measures as they are taken."""

    records: list[tuple[Side, Step, Measured]] = field(default_factory=list)

    def add(self, side: Side, step: Step, *measured: Measured) -> None:
        """Keep measures of a step."""
        self.records += [(side, step, one) for one in measured]

    def of(self, side: Side, step: Step) -> list[Measured]:
        """Return the measures of a step."""
        return [measured for its_side, its_step, measured in self.records if (its_side, its_step) == (side, step)]

    def wall(self, side: Side, *steps: Step) -> float | None:
        """Return the sum of the steps' median seconds; None when one of them was not measured."""
        medians = [median([one.wall for one in self.of(side, step)]) for step in steps]
        return None if None in medians else sum(seconds for seconds in medians if seconds is not None)


def median(values: Sequence[float]) -> float | None:
    """Return the median, None of nothing."""
    return statistics.median(values) if values else None


def main_table(results: Results) -> str:
    """Return the table of medians with ratios: how many times longer the peer takes than we do."""
    lines = [
        "| seconds, medians | envbuilder | docker | ratio | buildah | ratio | to reach |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in ROWS:
        ours, docker, buildah = (results.wall(side, *row.steps) for side in (Side.OURS, Side.DOCKER, Side.BUILDAH))
        cells = [seconds(ours), seconds(docker), ratio(docker, ours), seconds(buildah), ratio(buildah, ours), row.reach]
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def copies_table(results: Results) -> str:
    """Return the table of medians for moving one image as it is, beside skopeo."""
    lines = ["| seconds, medians | envbuilder | skopeo copy | ratio |", "|---|--:|--:|--:|"]
    for row in COPIES:
        ours, skopeo = (results.wall(side, *row.steps) for side in (Side.OURS, Side.SKOPEO))
        lines.append(f"| {row.label} | {seconds(ours)} | {seconds(skopeo)} | {ratio(skopeo, ours)} |")
    return "\n".join(lines)


def detail_table(results: Results) -> str:
    """Return a row for each side and step: every run, CPU seconds, peak memory, bytes."""
    lines = [
        "| step | who | seconds, each run | CPU seconds | peak MB (largest process) | MB made or moved | cores busy with others |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for step in Step:
        for side in Side:
            if not (runs := results.of(side, step)):
                continue
            walls = ", ".join(f"{one.wall:.2f}" for one in runs[:_SHOWN]) + (" ..." if len(runs) > _SHOWN else "")
            sizes = [one.size for one in runs if one.size is not None]
            cells = [
                step.value, side.value, walls, seconds(median([one.cpu for one in runs])) if step in _COUNTED else "",
                megabytes(max(one.peak for one in runs)) if step in _COUNTED else "",
                megabytes(max(sizes)) if sizes else "",
                f"{median([one.others for one in runs]) or 0:.1f}" if step in _COUNTED else "",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_SHOWN = 5
#: Where CPU and memory are told; those of what runs in a container are not its starter's.
_COUNTED = {Step.BUILD, Step.PUSH, Step.PULL, Step.COPY, Step.START, Step.AGAIN, Step.REBUILD}


def facts_table(facts: Iterable[tuple[str, str, str]]) -> str:
    """Return rows of what, measured, to reach."""
    lines = ["| what | measured | to reach |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(fact)} |" for fact in facts)])


def seconds(value: float | None) -> str:
    """Return seconds for a cell; small ones with three digits behind the point."""
    return (
        "n/a" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
    )


def ratio(peer: float | None, ours: float | None) -> str:
    """Return peer / ours for a cell."""
    return "n/a" if peer is None or ours is None else f"{peer / ours:.1f}"


def megabytes(count: int) -> str:
    """Return bytes as MB for a cell; what is less than ten with a digit behind the point."""
    return f"{count / 1e6:.0f}" if count >= 1e7 else f"{count / 1e6:.2f}"
