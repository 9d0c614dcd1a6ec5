"""The digest of a whole image does not depend on who builds it, where, when, with how much, and in which order."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.lock.files import write_lock
from tests.engines import need
from tests.images.test_build import machine  # noqa: F401  # a fixture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.images.test_build import Machine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
#: Without any right of root, and with another number: what a build as another user meets.
NOT_ROOT = (
    "bwrap", "--unshare-user", "--uid", "1234", "--gid", "1234", "--cap-drop", "ALL", "--dev-bind", "/", "/",
)  # fmt: skip
ONE_CORE = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))


class Rebuilt:
    """Builds the small environment again and again, each time with an empty store in another folder."""

    def __init__(self, made: Machine, folder: Path) -> None:
        self.machine = made
        self.folder = folder
        self.expected = self.build(folder / "first")

    def build(self, store: Path, *prefix: str, umask: int = 0o022, **variables: str) -> str:
        """Return what ``tests.images.rebuild`` prints: the digest, and every file of every layer."""
        words = (sys.executable, "-m", "tests.images.rebuild", self.machine.folder, store, self.machine.index.url)
        done = subprocess.run(
            [*prefix, *map(str, words)],
            cwd=ROOT, env=os.environ | variables, umask=umask, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def check(self, text: str) -> None:
        """Fail with the lines that differ."""
        lines = list(difflib.unified_diff(self.expected.splitlines(), text.splitlines(), "first", "again", n=0))
        assert not lines, "\n".join(lines)


@pytest.fixture(scope="module")
def rebuilt(machine: Machine) -> Iterator[Rebuilt]:  # noqa: F811
    write_lock(machine.source.lock, machine.folder / "small.lock.toml")
    folder = Path(tempfile.mkdtemp(prefix="rebuilt-"))
    yield Rebuilt(machine, folder)
    shutil.rmtree(folder)


def test_another_time_zone_language_mask_and_hash_seed(rebuilt: Rebuilt):
    variables = {"TZ": "Pacific/Auckland", "LANG": "tr_TR.UTF-8", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    rebuilt.check(rebuilt.build(rebuilt.folder / "a folder" / "with spaces", umask=0o077, **variables))


def test_root_and_another_user(rebuilt: Rebuilt):
    need("bwrap")
    rebuilt.check(rebuilt.build(rebuilt.folder / "user", *NOT_ROOT))


def test_one_core_and_many(rebuilt: Rebuilt):
    need("taskset")
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one core only")
    rebuilt.check(rebuilt.build(rebuilt.folder / "core", *ONE_CORE))


@pytest.mark.parametrize("late", ["app-1.0", "torch-2.7.1"])
def test_another_order_of_arrival(rebuilt: Rebuilt, late: str):
    fault = rebuilt.machine.index.fail(f"*/{late}-*.whl", slow=0.5)
    try:
        rebuilt.check(rebuilt.build(rebuilt.folder / late))
    finally:
        rebuilt.machine.index.faults.remove(fault)
