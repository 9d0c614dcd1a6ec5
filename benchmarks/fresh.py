"""What the README's commands take on a machine with nothing cached, in a fresh clone.

    python benchmarks/fresh.py                 # `make ai-v4`, step by step, then once more; all three digests, twice
    python benchmarks/fresh.py --tests         # `make test` as well

Prints a Markdown table: seconds, CPU seconds, the largest process's peak memory, and what lies in the store. Needs
about 45 GB of disk while it runs. The peers stand beside us in the benchmark of building, not here: this one says
what a new user waits for.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import resource

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ("base-v3", "base-v4", "ai-v4")


@dataclass(frozen=True)
class Measured:
    """One command: wall and CPU seconds, the largest process's peak memory in MB, what it printed."""

    label: str
    wall: float
    cpu: float
    peak: float
    stdout: str

    def row(self) -> str:
        """Return the table's row."""
        return f"| `{self.label}` | {self.wall:.1f} | {self.cpu:.1f} | {self.peak:.0f} |"


@dataclass(frozen=True)
class Clone:
    """A fresh clone with cache folders of its own."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Clone:
        """Clone the committed state of this repository."""
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "envbuilder")], check=True)
        return cls(folder)

    def run(self, *words: str) -> Measured:
        """Run a command in the clone, its virtual environment first on PATH."""
        code = self.folder / "envbuilder"
        caches = {"XDG_CACHE_HOME": str(self.folder / "cache"), "UV_CACHE_DIR": str(self.folder / "uv")}
        env = os.environ | caches | {"PATH": f"{code / '.venv' / 'bin'}:{os.environ['PATH']}"}
        begun = time.monotonic()
        process = subprocess.Popen(words, cwd=code, env=env, stdout=subprocess.PIPE, text=True)
        stdout = process.stdout.read() if process.stdout is not None else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(words)} ended with exit code {process.returncode}")
        return Measured(" ".join(words), time.monotonic() - begun, _cpu(usage), usage.ru_maxrss / 1024, stdout)

    def store_bytes(self) -> dict[str, int]:
        """Return the bytes of blobs and of unpacked trees."""
        store = self.folder / "cache" / "envbuilder" / "store"
        return {part: _tree_bytes(store / part) for part in ("blobs", "trees")}


def _cpu(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _tree_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What the README's commands take from nothing.")
    parser.add_argument("--tests", action="store_true", help="run `make test` too")
    args = parser.parse_args()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    print(f"# A fresh run, {dt.datetime.now(dt.UTC):%Y-%m-%d}, revision {revision.stdout.strip()}\n")
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GB of memory; "
          f"Python {platform.python_version()}\n")  # fmt: skip
    print("| command | seconds | CPU seconds | peak MB (largest process) |\n|---|---|---|---|")
    folder = Path(tempfile.mkdtemp(prefix="fresh-"))
    try:
        digests = [measure(folder / "one", tests=args.tests), again(folder / "two")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n| environment | first build | second build, another folder and an empty cache | |\n|---|---|---|---|")
    for first, second in zip(*digests, strict=True):
        name = first.partition("@")[0]
        verdict = "equal" if first == second else "DIFFER"
        print(f"| {name} | `{first.partition('@')[2]}` | `{second.partition('@')[2]}` | {verdict} |")


def measure(folder: Path, *, tests: bool) -> list[str]:
    """Do the main job on a fresh clone, then the rest; return the references."""
    folder.mkdir()
    clone = Clone.make(folder)
    launch = ("envbuilder", "launch", "ai-v4", "--", "python", "examples/first_step.py")
    for words in (("make", "setup"), ("envbuilder", "build", "ai-v4"), launch, launch, ("make", "ai-v4")):
        print(clone.run(*words).row(), flush=True)
    size = {part: f"{count / 1e9:.2f} GB" for part, count in clone.store_bytes().items()}
    references = {name: clone.run("envbuilder", "build", name) for name in ENVIRONMENTS}
    print(references["base-v3"].row(), flush=True)
    if tests:
        print(clone.run("make", "test").row(), flush=True)
    print(f"\nAfter `make ai-v4` the store holds {size['blobs']} of blobs and {size['trees']} of unpacked layers.")
    shutil.rmtree(folder)
    return [references[name].stdout.strip() for name in ENVIRONMENTS]


def again(folder: Path) -> list[str]:
    """Build all environments on another fresh clone with an empty cache; return the references."""
    folder.mkdir()
    clone = Clone.make(folder)
    clone.run("make", "setup")
    return [clone.run("envbuilder", "build", name).stdout.strip() for name in ENVIRONMENTS]


if __name__ == "__main__":
    main()
