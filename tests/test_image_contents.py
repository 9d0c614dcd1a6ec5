"""What is in an image equals what ``uv pip install`` of the same lock gives, and it works.

Builds the image in a fresh cache folder, or uses that of the folder which ENVBUILDER_TEST_CACHE names. What may differ
and what is known to fail stands in ``contents/facts.toml``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from envbuilder import http
from envbuilder.lock.files import read_lock
from envbuilder.lock.indexconfig import Indexes
from envbuilder.run import find
from envbuilder.spec.catalog import Catalog
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from envbuilder.system.interpreter import find_interpreter
from envbuilder.wheels.key import InstallPrefix
from envbuilder.wheels.supply import LockedWheels
from tests.contents import records
from tests.contents.facts import Attempt, read_facts, unexplained
from tests.contents.modules import offered
from tests.contents.trees import Pair, typeless_members

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from envbuilder.lock.model import Lock

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
INSIDE = ROOT / "tests" / "contents" / "inside"
NAME = "ai-v4"
FACTS = read_facts()
#: Seconds for one import or one script, of a machine that has other work as well.
LIMIT = 60.0
#: pip is asked about wheels up to this size (it takes a minute for those, and four for all).
SMALL = 4 << 20
#: Of one source in so many the bytecode is compared, not only its header.
SHARE = 3
#: A proxy that nobody serves: what a script does must not depend on the network.
NO_NETWORK = tuple(f"{name}=http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"))


@dataclass(frozen=True)
class Built:
    """An image in a store below ``cache``, with room for files in ``folder``."""

    cache: Path
    folder: Path

    @cached_property
    def store(self) -> Store:
        return Store(self.cache / "envbuilder" / "store")

    @cached_property
    def lock(self) -> Lock:
        return read_lock(Catalog(ROOT).lock_file(NAME))

    @cached_property
    def prefix(self) -> InstallPrefix:
        return InstallPrefix(Catalog(ROOT).recipe(NAME).paths.environment, self.lock.target.python)

    @cached_property
    def python(self) -> Path:
        """The interpreter on this machine that the image's is a copy of."""
        kinds = Catalog(ROOT).recipe(NAME).interpreter
        return find_interpreter(self.lock.target.python, kinds, self.store).executable

    @cached_property
    def root(self) -> Path:
        """The virtual environment's folder in the image, as it lies on this machine."""
        digest = self.store.find_image(NAME)
        assert digest is not None
        return root_tree(self.store, self.store.image(digest)) / self.prefix.root.lstrip("/")

    @property
    def site(self) -> Path:
        return self.root / "lib" / f"python{self.prefix.python}" / "site-packages"

    @cached_property
    def wheels(self) -> tuple[Path, ...]:
        """The wheels that the image was made of, under their own names."""
        environment, folder = Catalog(ROOT).environment(NAME), self.folder / "wheels"

        def indexes() -> Indexes:
            return Indexes(None, environment.indexes, http.new_session())

        supply = LockedWheels(self.store, indexes, self.python, environment, self.lock.input.exclude_newer)
        supply.provide(self.lock.packages)
        folder.mkdir()
        paths = []
        for wheel in supply.wheels(self.lock.packages).values():
            paths.append(folder / wheel.name)
            _link(wheel.path, paths[-1])
        return tuple(sorted(paths))

    def inside(self, *words: str, work: Path | None = None) -> str:
        """Run a command in the image, with a proxy that is not there, and return its output."""
        options = [word for setting in NO_NETWORK for word in ("--env", setting)]
        done = subprocess.run(
            [sys.executable, "-m", "envbuilder", "launch", NAME, *options, "--", *words], check=False,
            cwd=work or self.folder, env=os.environ | {"XDG_CACHE_HOME": str(self.cache)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def program(self, name: str, *arguments: str, **files: str) -> Any:
        """Run a program of ours in the image, in a work folder with some files, and return the JSON that it makes."""
        work = Path(tempfile.mkdtemp(dir=self.folder))
        shutil.copy(INSIDE / name, work)
        for file, text in files.items():
            (work / file).write_text(text)
        self.inside("python", name, "out", *arguments, work=work)
        return json.loads((work / "out").read_text())

    def attempts(self, commands: Mapping[str, Sequence[str]]) -> list[Attempt]:
        """Run each command in a process of its own in the image."""
        jobs = json.dumps([[name, list(words), LIMIT] for name, words in commands.items()])
        return [Attempt(**one) for one in self.program("attempts.py", "jobs", jobs=jobs)]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    """Build the image; a given cache folder is kept, a fresh one is removed."""
    given = os.environ.get("ENVBUILDER_TEST_CACHE")
    # Not below pytest's folder, of which the last three are kept.
    folder = Path(tempfile.mkdtemp(prefix="image-contents-"))
    try:
        made = Built(Path(given) if given else folder / "cache", folder)
        if made.store.find_image(NAME) is None:
            env = os.environ | {"XDG_CACHE_HOME": str(made.cache)}
            words = [sys.executable, "-m", "envbuilder", "build", NAME]
            done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_it_equals_what_uv_installs(built: Built):
    theirs = built.folder / "uv"
    env = os.environ | {"UV_CACHE_DIR": str(built.folder / "uv-cache"), "UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}
    uv = find("uv")
    try:
        subprocess.run([uv, "venv", "--quiet", "--python", built.python, theirs], env=env, check=True)
        words = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--python", str(theirs)]
        subprocess.run([uv, *words, *built.wheels], env=env, check=True)
        check_differences(built, theirs, FACTS.kinds["uv"], partly=False)
    finally:
        shutil.rmtree(theirs, ignore_errors=True)
        shutil.rmtree(built.folder / "uv-cache", ignore_errors=True)


def test_it_equals_what_pip_installs(built: Built):
    theirs = built.folder / "pip"
    small = [wheel for wheel in built.wheels if wheel.stat().st_size <= SMALL]
    assert len(small) > 250
    env = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        subprocess.run([built.python, "-m", "venv", theirs], env=env, check=True)
        words = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-warn-script-location"]
        subprocess.run([theirs / "bin" / "python", "-m", "pip", *words, *small], env=env, check=True)
        check_differences(built, theirs, FACTS.kinds["pip"], partly=True)
    finally:
        shutil.rmtree(theirs, ignore_errors=True)


def check_differences(built: Built, theirs: Path, known: Mapping[str, str], *, partly: bool) -> None:
    """Every difference is of a known kind, and each kind is there; ``partly``: not all packages are in theirs."""
    pair, typeless = Pair(built.root, built.prefix.root, theirs), typeless_members(built.wheels)
    kinds: dict[str | None, list[str]] = {}
    for difference in pair.differences():
        if partly and difference.what == "ours only":
            continue
        kinds.setdefault(pair.kind(difference, typeless), []).append(f"{difference.path}: {difference.what}")
    print({kind: len(paths) for kind, paths in kinds.items()})  # noqa: T201  (pytest -rP shows it)
    assert kinds.pop(None, []) == []
    assert set(kinds) == set(known)


def test_records_state_all_files_as_they_are(built: Built):
    rows = records.read_records(built.site)
    assert len(rows) > 100_000
    assert len({row.owner for row in rows}) == len(built.lock.packages)
    assert records.problems(built.root, built.site) == []


def test_the_installed_packages_are_those_of_the_lock_and_fit_together(built: Built):
    listed = json.loads(built.inside("pip", "list", "--format", "json"))
    assert {one["name"].lower().replace("_", "-").replace(".", "-"): one["version"] for one in listed} == {
        package.name: package.version for package in built.lock.packages
    }
    assert built.inside("pip", "check") == "No broken requirements found.\n"
    built.inside("uv", "pip", "check")


def test_bytecode_is_that_of_its_source(built: Built):
    library = f"{Catalog(ROOT).recipe(NAME).paths.python}/lib/python{built.prefix.python}"
    found = built.program("bytecode.py", str(SHARE), built.prefix.site_packages, library)
    print(found)  # noqa: T201  (pytest -rP shows it)
    assert found["problems"] == []
    assert found["checked"] > 40_000
    assert found["compared"] > found["checked"] / SHARE * 0.9


def test_every_module_can_be_imported(built: Built):
    modules = offered(built.site)
    # A distribution without modules has data, or stubs for type checkers.
    without = {row.owner for row in records.read_records(built.site)} - set().union(*modules.values())
    assert {owner.partition("-")[0] for owner in without} == set(FACTS.without_modules)
    assert (
        unexplained(built.attempts({name: ["python", "-c", f"import {name}"] for name in modules}), FACTS.imports) == []
    )


def test_every_script_runs(built: Built):
    scripts = sorted(path.name for path in (built.root / "bin").iterdir() if not path.is_symlink())
    commands = {
        name: [f"{built.prefix.root}/bin/{name}", *FACTS.arguments.get(name, "--help").split()] for name in scripts
    }
    assert set(FACTS.arguments) <= set(commands)
    assert unexplained(built.attempts(commands), FACTS.scripts) == []
