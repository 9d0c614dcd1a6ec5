"""What is committed holds together: environments, the published lists, and the locks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuilder.images.layering import plan
from envbuilder.lock.cuda import cuda_of
from envbuilder.lock.drift import drift
from envbuilder.lock.files import format_lock, read_lock
from envbuilder.lock.target import supported_tags
from envbuilder.spec.catalog import Catalog
from envbuilder.spec.recipe import DebianBase
from envbuilder.system.lockfile import format_system_lock, read_system_lock, system_drift

if TYPE_CHECKING:
    from envbuilder.lock.model import Lock
    from envbuilder.spec.environment import Environment

CATALOG = Catalog(Path(__file__).parents[1])
NAMES = ("ai-v4", "base-v3", "base-v4")
LINUX: dict[str, str] = {k: str(v) for k, v in default_environment().items()} | {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "platform_machine": "x86_64",
}


def both(name: str) -> tuple[Environment, Lock, Lock | None]:
    environment = CATALOG.environment(name)
    parent = CATALOG.parent(environment)
    lock = read_lock(CATALOG.lock_file(name))
    return environment, lock, read_lock(CATALOG.lock_file(parent.name)) if parent else None


def test_the_three_environments_are_there():
    assert CATALOG.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_locks_are_fresh_canonical_and_name_no_host(name: str):
    environment, lock, parent = both(name)
    assert drift(lock, environment, parent) == ()
    text = CATALOG.lock_file(name).read_text()
    assert format_lock(lock) == text
    urls = set(re.findall(r"\w+://[^\s\"]*", text))
    assert urls <= {index.url for index in environment.indexes}


@pytest.mark.parametrize("name", NAMES)
def test_torch_carries_the_cuda_that_is_promised(name: str):
    environment, lock, _ = both(name)
    torch = lock.by_name["torch"]
    assert cuda_of(torch.version, torch.requires) == lock.cuda == environment.cuda


@pytest.mark.parametrize("name", ["base-v3", "base-v4"])
def test_every_published_row_is_locked_or_has_a_reason(name: str):
    environment, lock, _ = both(name)
    deviations = {deviation.package: deviation for deviation in environment.deviations}
    assert len(environment.pins) == {"base-v3": 143, "base-v4": 233}[name]
    for pin in environment.pins:
        locked = lock.by_name.get(pin.name)
        if pin.name not in deviations:
            assert locked is not None, f"{pin.name} is published, but neither locked nor explained"
            assert locked.version == pin.version, pin.name
            continue
        deviation = deviations[pin.name]
        assert (locked.version if locked else None) == deviation.ours, pin.name
        assert deviation.ours != pin.version, f"{pin.name} deviates in nothing"
        assert len(deviation.reason) > 20, pin.name


@pytest.mark.parametrize("name", NAMES)
def test_the_locked_packages_fit_each_other_and_the_target(name: str):
    """What `pip check` would say, from the lock's graph alone."""
    _, lock, _ = both(name)
    tags = {str(tag) for tag in supported_tags(lock.target)}
    for package in lock.packages:
        if package.build is None:
            own = package.file.removesuffix(".whl").rsplit("-", 3)[1:]
            assert any(
                f"{p}-{a}-{t}" in tags for p in own[0].split(".") for a in own[1].split(".") for t in own[2].split(".")
            )
        for text in package.requires:
            requirement = Requirement(text)
            marker: Marker | None = requirement.marker
            if marker is not None and not marker.evaluate(LINUX | {"extra": ""}):
                continue
            other = lock.by_name.get(canonicalize_name(requirement.name))
            assert other is not None, f"{package.name} needs {text}"
            assert requirement.specifier.contains(other.version, prereleases=True), (
                f"{package.name} needs {text}, not {other.version}"
            )


def test_ai_v4_keeps_every_package_of_base_v4():
    _, lock, parent = both("ai-v4")
    assert parent is not None
    assert set(parent.packages) <= set(lock.packages)
    assert lock.by_name["transformers"].version == "4.56.1"
    assert lock.by_name["pytorch-lightning"].version == "2.5.4"
    assert not [p.name for p in lock.packages if p.name.endswith("-cu13")]


@pytest.mark.parametrize("name", NAMES)
def test_protected_packages_and_imports_exist(name: str):
    environment, lock, _ = both(name)
    assert [package for package in environment.protected if package not in lock.by_name] == []
    assert {"torch", "numpy"} <= set(environment.protected) or environment.extends
    assert environment.smoke_imports


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_within_the_budget(name: str):
    _, lock, parent = both(name)
    recipe = CATALOG.recipe(name)
    stages = plan(lock, parent, recipe.layering)
    assert sum(len(stage.groups) for stage in stages) + 4 <= recipe.layering.budget


def test_system_locks_are_fresh_canonical_and_name_no_host():
    recipe = CATALOG.recipe("base-v4")
    assert isinstance(recipe.base, DebianBase)
    files = CATALOG.system_lock_files(recipe.name)
    assert CATALOG.system_lock_file("default", "bookworm") in files
    for file in files:
        lock = read_system_lock(file)
        assert system_drift(lock, recipe.base) == (), "run `envbuilder lock base-v4 --system`"
        assert file == CATALOG.system_lock_file(lock.recipe, lock.plan.suite)
        text = file.read_text()
        assert format_system_lock(lock) == text
        assert "://" not in text
        assert all(package.file.startswith("pool/") for package in lock.plan.packages)
        glibc = {CATALOG.environment(name).glibc for name in NAMES}
        assert lock.plan.glibc is not None
        assert all(tuple(map(int, need.split("."))) <= tuple(map(int, lock.plan.glibc.split("."))) for need in glibc)
