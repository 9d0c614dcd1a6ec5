"""Faults by the hundred: after each the store is sound, nothing that was finished is lost, and the next command works.

The slow tests count what they injected and lost, and print it (``pytest -rP``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envbuilder.atomic import DiskFullError
from envbuilder.oci.digest import Digest
from envbuilder.store.gc import carry_out, make_plan
from envbuilder.store.store import Store
from envbuilder.store.verify import verify
from tests.engines import small_disk

WORKER = Path(__file__).parent / "killed.py"


def torture(root: Path, *words: object) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(WORKER), str(root), *map(str, words)], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2], env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout)
    sys.stdout.write(f"{counts}\n")
    return counts


def test_kill_9_at_random_moments(tmp_path: Path):
    counts = torture(tmp_path / "s", "kill", 25, 1)
    assert counts["kills"] == 25
    assert counts["lost"] == counts["unclean"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12])
def test_kill_9_hundreds_of_times(tmp_path: Path, seed: int):
    counts = torture(tmp_path / "s", "kill", 300, seed)
    assert counts["kills"] == 300
    assert counts["finished"] > 100
    assert counts["lost"] == counts["unclean"] == 0


@pytest.mark.slow
def test_four_writers_and_a_collector(tmp_path: Path):
    counts = torture(tmp_path / "s", "together", 150, 3)
    assert counts["finished"] > 500
    assert counts["collected"] > 0
    assert counts["lost"] == counts["unclean"] == counts["failed"] == 0


def fill(store: Store, kept: list[Digest]) -> None:
    for number in range(10_000):
        kept.append(store.put(number.to_bytes(2) * 3500))
        store.remember("layer", str(number), {"digest": str(kept[-1])})


def write(store: Store, data: bytes) -> None:
    with store.writer() as blob:
        blob.file.write(data)
        blob.commit(Digest.of(data))


def test_without_a_single_page_left_verify_and_the_collector_work(tmp_path: Path):
    """They cannot write down what they use, and must not wait for themselves."""
    small = tmp_path / "small"
    with small_disk(small, "200k"):
        store = Store(small / "store")
        digest = store.put(bytes(9000))
        store.close()
        status = os.statvfs(small)
        with (small / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_bsize)
        assert store.has(digest)  # no room for a lease: from here on this holds the gate open
        assert verify(store).clean
        store.close()
        assert len(carry_out(store, make_plan(store, 0, young=0)).removed) == 1
        store.close()


@pytest.mark.parametrize("size", ["200k", "1m"])
def test_a_disk_that_fills_up(tmp_path: Path, size: str):
    small = tmp_path / "small"
    with small_disk(small, size):
        store = Store(small / "store")
        kept: list[Digest] = []
        with pytest.raises(DiskFullError):
            fill(store, kept)
        assert all(len(store.read(digest)) == 7000 for digest in kept)
        with pytest.raises(DiskFullError):
            write(store, os.urandom(2_000_000))
        store.close()
        assert verify(store).clean
        store.close()
        done = carry_out(store, make_plan(store, 50_000, young=0))  # the way out
        assert len(done.removed) > 5
        assert store.put(b"there is room again") is not None
        store.close()
        assert verify(store).clean
        store.close()
