"""Whole builds that meet with accidents: killed, crowded, out of room. See ``test_build_damage`` for more.

After each the store is sound, and the next build succeeds with the digest of one that nothing disturbed. The tests
count what they injected, and print it (``pytest -rP``).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.atomic import DiskFullError
from envbuilder.lock.files import write_lock
from envbuilder.store.gc import carry_out, make_plan
from envbuilder.store.marks import known_files
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from envbuilder.store.verify import verify
from envbuilder.wheels.fetch import NoRoomError
from tests.engines import small_disk
from tests.images.test_build import MINOR, Machine, machine  # noqa: F401  # a fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Image

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
#: Builds killed at work: from the beginning, and with system and interpreter known; how many one store has to bear.
KILLS, LATE_KILLS, IN_A_ROW = 9, 60, 3
ROUNDS = 5
PAGE = 4096
MODULE = f"opt/env/lib/python{MINOR}/site-packages/app.py"


@dataclass(frozen=True)
class Workshop:
    """The small environment, the digest that every build of it must have, and builds of it as processes."""

    machine: Machine
    image: Image

    @property
    def digest(self) -> Digest:
        return self.image.digest

    def start(self, store: Path, *more: str) -> subprocess.Popen[str]:
        """Start a build in a session of its own, so that all that it starts can be found; return when it is at work."""
        words = (
            sys.executable,
            "-m",
            "tests.images.killable",
            self.machine.folder,
            store,
            self.machine.index.url,
            *more,
        )
        process = subprocess.Popen(
            [*map(str, words)], cwd=ROOT, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def finish(self, process: subprocess.Popen[str]) -> None:
        """Wait for a build and look at what it says."""
        out, error = process.communicate()
        assert process.returncode == 0, error
        assert out == f"{self.digest}\n"

    def check(self, store: Store) -> None:
        """Fail unless the next build gives the same image, in a sound store."""
        assert self.machine.build(store) == self.image
        store.close()
        assert verify(store).clean
        store.close()

    def unpack(self, store: Store) -> None:
        """Fail unless the image that a store has is whole."""
        assert (root_tree(store, self.image) / MODULE).is_file()
        store.close()
        assert verify(store, trees=True).clean
        store.close()


@pytest.fixture(scope="module")
def workshop(machine: Machine) -> Workshop:  # noqa: F811
    write_lock(machine.source.lock, machine.folder / "small.lock.toml")
    return Workshop(machine, machine.build(machine.store()))


def collect(store: Store, budget: int | None = None, *, images: bool = False) -> int:
    """Collect as when nobody else is at work; return how much went."""
    store.close()
    done = carry_out(store, make_plan(store, budget, images=images, young=0))
    store.close()
    return len(done.removed)


# -- kill -9 ------------------------------------------------------------------------------------------------------


def session(leader: int) -> list[str]:
    """Return the programs that are alive in a session."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal():
                # pid (name) state parent group session ...; the name may hold anything
                name, _, rest = (folder / "stat").read_text().rpartition(")")
                state, _, _, of = rest.split()[:4]
                if int(of) == leader and state not in "ZX":
                    found.append(name.partition("(")[2])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def nobody_is_left(leader: int, seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while session(leader) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not session(leader)


def kill(process: subprocess.Popen[str], after: float, *, alone: bool = False) -> bool:
    """Kill a build after some seconds, ``alone`` or with all that it started; return whether it was still at work."""
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        send, target = (os.kill, process.pid) if alone else (os.killpg, process.pid)
        send(target, signal.SIGKILL)
    process.communicate()
    assert process.returncode in {0, -signal.SIGKILL}
    return process.returncode != 0


def seconds_of(workshop: Workshop, store: Path) -> float:
    process = workshop.start(store)
    begin = time.monotonic()
    workshop.finish(process)
    return time.monotonic() - begin


def progress(store: Store, workshop: Workshop) -> str:
    """Say how far a build came: what is there, what is known, what is left of the work, whether the image has its name."""
    layers = sum(store.blob(layer.digest).exists() for layer in workshop.image.manifest.layers)
    wheels = sum(store.blob(package.digest).exists() for package in workshop.machine.source.lock.packages)
    known = sum(1 for _ in known_files(store))
    left = len([*store.root.glob("**/.tmp-*")])
    return f"{layers} layers, {wheels} wheels, {known} known, {left} left over, named: {bool(store.images())}"


def kill_many(workshop: Workshop, kills: int, whole: float, fresh: Callable[[int], Store]) -> set[str]:
    """Kill builds at random moments, some in a row on each store; return how far they came."""
    dice, killed, number, seen = random.Random(kills), 0, 0, set()  # noqa: S311 (no secret)
    while killed < kills:
        assert number <= kills, "too few builds were still at work when they were to be killed"
        store = fresh(number)
        number += 1
        leaders = []
        for attempt in range(IN_A_ROW):
            process = workshop.start(store.root)
            leaders.append(process.pid)
            # The next build begins at once, beside what is perhaps left of one that was killed alone.
            # Random, but of every part of a build, and more of its beginning, where one step follows the other.
            moment = ((len(leaders) + IN_A_ROW * number) % kills + dice.random()) / kills
            if kill(process, moment**2 * whole, alone=attempt % 2 == 1):
                killed += 1
                seen.add(progress(store, workshop))
            assert verify(store).clean
            store.close()
        workshop.check(store)
        assert all(nobody_is_left(leader) for leader in leaders)
        collect(store)
        assert [*store.root.glob("**/.tmp-*"), *store.root.glob("trash/*"), *store.root.glob("partial/*")] == []
        if number == 1:
            workshop.unpack(store)
        shutil.rmtree(store.root)
    sys.stdout.write(f"{killed} killed on {number} stores, in {len(seen)} states: {'; '.join(sorted(seen))}\n")
    return seen


def test_kill_9_from_the_beginning(workshop: Workshop):
    whole = seconds_of(workshop, workshop.machine.folder / "undisturbed")
    seen = kill_many(workshop, KILLS, whole, lambda number: workshop.machine.store(f"early{number}"))
    assert len(seen) > 1


def test_kill_9_when_system_and_interpreter_are_known(workshop: Workshop):
    whole = seconds_of(workshop, workshop.machine.emptied("undisturbed-late").root)
    seen = kill_many(workshop, LATE_KILLS, whole, lambda number: workshop.machine.emptied(f"late{number}"))
    assert len(seen) > 3


def test_what_compiles_does_not_outlive_a_build_that_is_killed_alone(workshop: Workshop):
    process = workshop.start(workshop.machine.folder / "orphans")
    deadline = time.monotonic() + 60
    while len(seen := session(process.pid)) < 3 and time.monotonic() < deadline:  # or an apt and its methods
        time.sleep(0.005)
    assert kill(process, 0, alone=True)
    assert len(seen) >= 3
    assert nobody_is_left(process.pid), session(process.pid)
    workshop.check(workshop.machine.store("orphans"))


# -- many at once -------------------------------------------------------------------------------------------------


def test_four_builds_and_a_collector_at_once(workshop: Workshop):
    collected = collections = 0
    for number in range(ROUNDS):
        cache = f"together{number}"
        store = workshop.machine.emptied(f"{cache}/envbuilder/store")
        builds = [workshop.start(store.root, "unpack") for _ in range(4)]
        while any(process.poll() is None for process in builds):
            collected += collect_all(workshop.machine.folder / cache)
            collections += 1
        for process in builds:
            workshop.finish(process)
        assert verify(store).clean
        store.close()
        collected += collect_all(workshop.machine.folder / cache)
        collections += 1
        workshop.check(store)
        workshop.unpack(store)
        shutil.rmtree(workshop.machine.folder / cache)
    sys.stdout.write(f"{4 * ROUNDS} builds beside {collections} collections, which took {collected} things away\n")
    assert collected > ROUNDS


def collect_all(cache: Path) -> int:
    """Run the command that leaves nothing that may go; return how much went."""
    words = (sys.executable, "-m", "envbuilder", "cache", "gc", "--budget", "0", "--images", "--now", "--json")
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, check=False
    )
    assert done.returncode in {0, 1}, done.stderr  # 1: what builds use stays, and is over the budget
    return len(json.loads(done.stdout)["removed"])


# -- no room ------------------------------------------------------------------------------------------------------


def fails_for_room(workshop: Workshop, store: Store) -> str | None:
    """Build; return where the room ran out, None when it did not. The store is sound either way."""
    failure: DiskFullError | NoRoomError | None = None
    try:
        assert workshop.machine.build(store) == workshop.image
    except (DiskFullError, NoRoomError) as error:
        failure = error
    store.close()
    assert verify(store).clean
    store.close()
    if failure is None:
        return None
    assert failure.exit_code == 4
    assert "make room, or set XDG_CACHE_HOME" in str(failure.hint)
    last = traceback.extract_tb(failure.__traceback__)
    steps = (frame.name for frame in last if "envbuilder" in frame.filename and "atomic" not in frame.filename)
    return f"{type(failure).__name__} in {' '.join(dict.fromkeys(steps))}"


def test_a_disk_that_grows_until_a_build_fits(workshop: Workshop):
    with small_disk(workshop.machine.folder / "growing", "100k") as disk:
        places = []
        for size in (100, 400, 1600, 3200, 6400, 12_800, 25_600, 100_000):
            subprocess.run(["mount", "-o", f"remount,size={size}k", disk], check=True)
            place = fails_for_room(workshop, Store(disk / "store"))
            if place is None:
                break
            places.append(place)
        sys.stdout.write("\n".join([*places, ""]))
        workshop.check(Store(disk / "store"))
    assert len(places) > 5


def test_a_disk_with_so_many_pages_left(workshop: Workshop):
    """Every step of a build that knows system and interpreter is the one for which there is no room."""
    seed = workshop.machine.emptied("seed-for-disk").root
    with small_disk(workshop.machine.folder / "pages", "200m") as disk:
        shutil.copytree(seed, disk / "seed")
        failures = {}
        for pages in (*range(16), *range(16, 200, 4)):
            store = Store(disk / f"store{pages}")
            shutil.rmtree(store.root)
            shutil.copytree(disk / "seed", store.root, copy_function=os.link)
            with filled(disk, pages):
                place = fails_for_room(workshop, store)
            assert workshop.machine.build(store) == workshop.image
            store.close()
            assert verify(store).clean
            store.close()
            shutil.rmtree(store.root)
            if place is None:
                break
            failures[pages] = place
        sys.stdout.write("\n".join(f"{pages} pages: {place}" for pages, place in failures.items()))
    assert len(failures) > 10
    assert len(set(failures.values())) > 3


@contextmanager
def filled(disk: Path, pages: int) -> Iterator[None]:
    """Leave so many pages of a file system free."""
    ballast = disk / "ballast"
    status = os.statvfs(disk)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (status.f_bavail - pages) * status.f_bsize)
    try:
        yield
    finally:
        ballast.unlink()
