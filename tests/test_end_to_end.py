"""The main job as a user does it, by the command line: build the committed environments and run them.

Downloads gigabytes; needs about 25 GB of disk while it runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.lock.files import read_lock
from envbuilder.spec.catalog import Catalog
from envbuilder.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CATALOG = Catalog(ROOT)

pytestmark = pytest.mark.slow

#: Run inside: every hash that RECORD states is that of the file.
VERIFY = """
import base64, hashlib, importlib.metadata, sys
count = 0
for distribution in importlib.metadata.distributions():
    for file in distribution.files or ():
        if file.hash is None:
            continue
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
            print("differs:", distribution.name, file)
            continue
        count += 1
print(count)
"""


#: Run inside: import every module named; fails at the first that cannot be. Some print to stdout when imported.
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print("imported", len(sys.argv) - 1)
"""


#: Run a command from a small process: what starts a program passes its own size on as the program's peak. Writes the
#: peak of the largest process that ran, in kB, to a file.
MEASURE = """
import pathlib, resource, subprocess, sys
code = subprocess.run(sys.argv[2:], check=False).returncode
pathlib.Path(sys.argv[1]).write_text(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
raise SystemExit(code)
"""
#: The design's bound for a build, in bytes; it holds for the largest of its processes.
MOST_MEMORY = 512 << 20


class Machine:
    """A machine with an empty cache folder."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def envbuilder(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"XDG_CACHE_HOME": str(self.cache)} | variables
        words = (sys.executable, "-c", MEASURE, str(self.peak_file), sys.executable, "-m", "envbuilder", *words)
        return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    def build(self, name: str, **variables: str) -> str:
        done = self.envbuilder("build", name, **variables)
        assert done.returncode == 0, done.stderr
        peak = int(self.peak_file.read_text()) << 10
        assert peak < MOST_MEMORY, f"{peak >> 20} MiB in the largest process"
        return done.stdout

    def inside(self, name: str, *words: str) -> str:
        done = self.envbuilder("launch", name, "--", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def peak_file(self) -> Path:
        """Where the peak memory of the last command stands."""
        return self.cache.parent / "peak"

    @property
    def store(self) -> Store:
        return Store(self.cache / "envbuilder" / "store")


@pytest.fixture(params=["base-v3", "ai-v4"])
def built(request: pytest.FixtureRequest) -> Iterator[tuple[Machine, str]]:
    """Build an environment on a fresh machine; what it extends is built first."""
    name = request.param
    # Not below pytest's folder, of which the last three are kept.
    folder = Path(tempfile.mkdtemp(prefix="end-to-end-"))
    try:
        machine = Machine(folder / "cache")
        environment = CATALOG.environment(name)
        if environment.extends:
            machine.build(environment.extends)
        reference = machine.build(name)
        assert reference == f"{name}@{machine.store.find_image(name)}\n"
        yield machine, name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_fresh_machine_builds_it_and_it_runs(built: tuple[Machine, str]):
    machine, name = built
    environment = CATALOG.environment(name)
    parent = CATALOG.parent(environment)
    check_inside(machine, name, [*(parent.smoke_imports if parent else ()), *environment.smoke_imports])
    if parent is not None:
        assert (
            machine.inside(parent.name, "python", "-c", "import torch; print(torch.version.cuda)") == f"{parent.cuda}\n"
        )
        check_shared(machine, name, parent.name)
    check_reproducible(machine, name)


def check_inside(machine: Machine, name: str, imports: list[str] | tuple[str, ...]) -> None:
    lock = read_lock(CATALOG.lock_file(name))
    program = "import torch; print(torch.__version__, torch.version.cuda)"
    torch = lock.by_name["torch"].version
    assert machine.inside(name, "python", "-c", program) == f"{torch}+cu{lock.cuda.replace('.', '')} {lock.cuda}\n"
    assert "loss" in machine.inside(name, "python", "examples/first_step.py")
    assert machine.inside(name, "pip", "check") == "No broken requirements found.\n"
    assert "uv " in machine.inside(name, "uv", "--version")
    verified = machine.inside(name, "python", "-c", VERIFY)
    assert "differs" not in verified
    assert int(verified) > 20_000
    # All in one process here; tests/test_image_contents.py imports each alone.
    assert machine.inside(name, "python", "-c", IMPORT, *imports).endswith(f"imported {len(imports)}\n")
    stub = "import torch; f = torch.compile(lambda x: (x.sin() + x.cos()).sum()); print(f(torch.zeros(8)).item())"
    assert machine.inside(name, "python", "-c", stub) == "8.0\n"
    assert machine.envbuilder("launch", name, "--", "python", "-c", "raise SystemExit(7)").returncode == 7


def check_shared(machine: Machine, name: str, parent: str) -> None:
    """All layers of what is extended are the first layers of what extends it."""
    images = []
    for one in (parent, name):
        digest = machine.store.find_image(one)
        assert digest is not None
        images.append(machine.store.image(digest).manifest.layers)
    assert images[1][: len(images[0])] == images[0]


def check_reproducible(machine: Machine, name: str) -> None:
    """Another folder, another locale, time zone and umask, nothing but the downloads in common: the same digest."""
    other = Machine(machine.cache.parent / "another place" / "cache")
    other_blobs = other.store.root / "blobs" / "sha256"
    for package in read_lock(CATALOG.lock_file(name)).packages:
        os.link(machine.store.blob(package.digest), other_blobs / package.digest.hex)
    before = os.umask(0o077)
    try:
        reference = other.build(name, TZ="Pacific/Auckland", LANG="C", PYTHONHASHSEED="7")
    finally:
        os.umask(before)
    assert reference == f"{name}@{machine.store.find_image(name)}\n"


@pytest.mark.docker
def test_docker_takes_base_v4(docker_engine: str, tmp_path: Path):
    assert docker_engine
    folder = Path(tempfile.mkdtemp(prefix="end-to-end-"))
    try:
        machine = Machine(folder / "cache")
        done = machine.envbuilder("build", "base-v4", "--load", "docker")
        assert done.returncode == 0, done.stderr
        inspected = subprocess.run(
            ["skopeo", "inspect", f"oci:{machine.store.root}:base-v4"], capture_output=True, text=True, check=True
        )
        assert '"dev.envbuilder.cuda": "12.6"' in inspected.stdout
        program = "import torch; print(torch.version.cuda)"
        ran = subprocess.run(
            ["/usr/bin/docker", "run", "--rm", "--network=host", done.stdout.strip(), "python", "-c", program],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert ran.stdout == "12.6\n"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
