"""Convert damaged wheels for a given time, and keep those of which the wrong thing becomes.

    python benchmarks/fuzz_wheels.py --minutes 10              # seed 0; --seed N for others
    python benchmarks/fuzz_wheels.py --again findings/*.whl    # what becomes of these now

A mutant that reaches lines that none before it reached is kept and changed further. Right is: a layer that Python's own
gzip, tarfile and zipfile agree with, or an EnvbuilderError that names the wheel; within ten seconds and a bounded
amount of memory. Prints executions, lines reached, what became of the mutants; the exit code is 1 when there are
findings, which lie in the folder ``--findings``.
"""

from __future__ import annotations

import argparse
import collections
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any, TypeAlias

    TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from envbuilder.oci import content  # noqa: E402  (the checkout, not what is installed)
from envbuilder.wheels import archive, entrypoints, places, zipread  # noqa: E402
from envbuilder.wheels.bytecode import Compiler  # noqa: E402
from tests.wheels import fuzz_wheels  # noqa: E402

SECONDS = 10
MEGABYTES = 1024  # of memory more than at the start
TRACED = {module.__file__ for module in (archive, content, entrypoints, places, zipread)}


class TooSlowError(BaseException):
    """Not an Exception, so that nothing takes it for one of its own."""


@dataclass
class Reached:
    """Which steps from line to line of the traced files were taken."""

    steps: set[tuple[str, int, int]] = field(default_factory=set)
    _last: int = 0

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Watch the block."""
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> TraceFunction | None:
        self._last = 0
        return self._line if frame.f_code.co_filename in TRACED else None

    def _line(self, frame: FrameType, _event: str, _argument: Any) -> TraceFunction:
        self.steps.add((frame.f_code.co_filename, self._last, frame.f_lineno))
        self._last = frame.f_lineno
        return self._line


@dataclass
class Fuzzer:
    """Runs mutants one after the other."""

    mutator: fuzz_wheels.Mutator
    compiler: Compiler
    folder: Path
    findings: Path
    reached: Reached = field(default_factory=Reached)
    became: collections.Counter[str] = field(default_factory=collections.Counter)
    found: dict[str, Path] = field(default_factory=dict)
    slowest: float = 0.0

    def step(self, data: bytes) -> None:
        """Convert one mutant, keep it when it is worth it."""
        known, begun = len(self.reached.steps), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            with self.reached.traced():
                outcome = fuzz_wheels.run(data, self.folder, lambda _: nullcontext(self.compiler))
        except (Exception, TooSlowError) as error:  # noqa: BLE001 (whatever escapes is what is looked for)
            outcome = f"FINDING {type(error).__name__}"
            self._keep(data, error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.became[outcome] += 1
        self.slowest = max(self.slowest, time.monotonic() - begun)
        if len(self.reached.steps) > known and len(data) < 1 << 18:
            self.mutator.corpus.append(data)

    def _keep(self, data: bytes, error: BaseException) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        key = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:80]}"
        if key not in self.found:
            self.findings.mkdir(parents=True, exist_ok=True)
            path = self.findings / f"{len(self.found)}-thing-1.0-py3-none-any.whl"
            path.write_bytes(data)
            path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))
            self.found[key] = path


def main() -> int:
    """Fuzz and print."""
    parser = argparse.ArgumentParser(description="Convert damaged wheels and look for what goes wrong.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, default=Path("findings"), help="folder for mutants that go wrong")
    parser.add_argument("--again", type=Path, nargs="+", default=[], help="run these files, once each, and stop")
    args = parser.parse_args()
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, _too_slow)
    before = _memory()
    resource.setrlimit(resource.RLIMIT_DATA, (before + (MEGABYTES << 20), resource.RLIM_INFINITY))
    rng = random.Random(args.seed)  # noqa: S311 (not for cryptography)
    with tempfile.TemporaryDirectory() as folder, Compiler(Path(sys.executable), workers=1) as compiler:
        mutator = fuzz_wheels.Mutator(rng, fuzz_wheels.seeds())
        fuzzer = Fuzzer(mutator, compiler, Path(folder), args.findings)
        for data in [path.read_bytes() for path in args.again] or list(mutator.corpus):
            fuzzer.step(data)
        begun, end = time.monotonic(), time.monotonic() + (0 if args.again else 60 * args.minutes)
        while time.monotonic() < end:
            fuzzer.step(mutator.next())
        _print(fuzzer, time.monotonic() - begun, _memory() - before)
    return 1 if fuzzer.found else 0


def _too_slow(_number: int, _frame: FrameType | None) -> None:
    raise TooSlowError(f"took more than {SECONDS} s")


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _print(fuzzer: Fuzzer, seconds: float, memory: int) -> None:
    count = fuzzer.became.total()
    lines = {(file, line) for file, _, line in fuzzer.reached.steps}
    print(f"{count} executions in {seconds:.0f} s, {count / max(seconds, 1):.0f} a second; the slowest {fuzzer.slowest:.2f} s; "
          f"{memory / 1e6:.0f} MB of memory more than at the start")  # fmt: skip
    print(f"{len(lines)} lines reached in {len(TRACED)} files, {len(fuzzer.reached.steps)} steps between them; "
          f"{len(fuzzer.mutator.corpus)} mutants kept\n")  # fmt: skip
    for outcome, times in fuzzer.became.most_common():
        print(f"{times:8} {outcome}")
    print(f"\n{len(fuzzer.found)} findings")
    for key, path in fuzzer.found.items():
        print(f"{path}: {key}")


if __name__ == "__main__":
    sys.exit(main())
