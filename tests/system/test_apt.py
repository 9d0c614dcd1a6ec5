"""Resolving against archives in a folder, with the real apt."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from envbuilder.errors import HostError, InputError, UnreachableError
from envbuilder.spec.recipe import DebianBase
from envbuilder.store.store import Store
from envbuilder.system.apt import Host, choose
from envbuilder.system.debian import PLAN_AGE, SystemPlan, make_system, resolve, system_plan
from tests.system.debs import Deb, Thing, make_archive, make_host

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")

LIBC = Deb("libc6", "2.36-9+deb12u1", [Thing("usr/lib/libc.so.6", "c")])
TOOL = Deb("tool", "1:2.0-1", [Thing("usr/bin/tool", "t", 0o755)], {"Depends": "libc6", "Recommends": "extra"})
EXTRA = Deb("extra")
NEW = Deb("libnew-0t64", fields={"Provides": "libnew-0"})
MORE = [Deb("mawk", fields={"Provides": "awk"}), Deb("gawk", fields={"Provides": "awk"})]
ALL = [LIBC, TOOL, EXTRA, NEW, *MORE]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def host(tmp_path: Path, archive: Path) -> Host:
    return make_host(tmp_path, make_archive(archive, "duck", ALL))


def names(plan: SystemPlan) -> list[str]:
    return [package.name for package in plan.packages]


def test_dependencies_come_along_and_recommendations_do_not(tmp_path, host):
    plan = resolve(DebianBase(None, ("tool",)), tmp_path / "work", host=host)
    assert (plan.suite, plan.distribution, plan.glibc) == ("duck", "debian", "2.36")
    assert names(plan) == ["libc6", "tool"]
    assert plan.packages[1].version == "1:2.0-1"
    assert plan.packages[1].size == len(TOOL.data)
    assert SystemPlan.from_json(plan.to_json()) == plan


def test_a_name_that_one_package_provides_works(tmp_path, host):
    assert names(resolve(DebianBase(None, ("libnew-0",)), tmp_path / "work", host=host)) == ["libnew-0t64"]


def test_the_first_known_alternative_is_chosen(tmp_path, host):
    base = DebianBase(None, ("nosuch | mawk | gawk", "libold | libnew-0"))
    assert names(resolve(base, tmp_path / "work", host=host)) == ["libnew-0t64", "mawk"]
    assert choose(("a", "b | c"), {"c"}) == ("a", "c")


def test_unknown_package_names_the_nearest(tmp_path, host):
    with pytest.raises(InputError, match="`duck` has no package `tol`") as caught:
        resolve(DebianBase(None, ("tol",)), tmp_path / "work", host=host)
    assert caught.value.hint == "did you mean `tool`?"


def test_a_virtual_package_with_several_providers_is_no_choice(tmp_path, host):
    with pytest.raises(InputError, match="`awk` is a virtual package"):
        resolve(DebianBase(None, ("awk",)), tmp_path / "work", host=host)


def test_packages_that_exclude_each_other(tmp_path, archive):
    clash = [Deb("one", fields={"Conflicts": "two"}), Deb("two")]
    host = make_host(tmp_path, make_archive(archive, "duck", clash))
    with pytest.raises(InputError, match="cannot be installed together"):
        resolve(DebianBase(None, ("one", "two")), tmp_path / "work", host=host)


def test_a_suite_that_is_not_offered(tmp_path, host):
    with pytest.raises(HostError, match="do not offer the release `goose`") as caught:
        resolve(DebianBase("goose", ("tool",)), tmp_path / "work", host=host)
    assert caught.value.hint is not None
    assert "they offer duck" in caught.value.hint


def test_a_machine_that_is_no_debian(tmp_path):
    with pytest.raises(HostError, match="does not say which release"):
        resolve(DebianBase(None, ("tool",)), tmp_path / "work", host=Host(tmp_path, tmp_path / "none"))


def test_third_parties_of_the_same_suite_stay_out(tmp_path, archive):
    newer = replace(TOOL, version="9:9", fields={"Depends": "spyware"})
    foreign = make_archive(tmp_path / "foreign", "duck", [newer, Deb("spyware")], origin="Docker")
    gone = f"deb [trusted=yes] copy:{tmp_path}/gone duck main\n"
    other = f"deb [trusted=yes] copy:{tmp_path}/gone tools-duck main\n"
    host = make_host(tmp_path, foreign + gone + other + make_archive(archive, "duck", ALL))
    plan = resolve(DebianBase(None, ("tool",)), tmp_path / "work", host=host)
    assert [package.version for package in plan.packages] == ["2.36-9+deb12u1", "1:2.0-1"]
    with pytest.raises(InputError):
        resolve(DebianBase(None, ("spyware",)), tmp_path / "work", host=host)


def test_only_third_parties_is_not_offered(tmp_path):
    host = make_host(tmp_path, make_archive(tmp_path / "foreign", "duck", ALL, origin="Docker"))
    with pytest.raises(HostError, match="do not offer"):
        resolve(DebianBase(None, ("tool",)), tmp_path / "work", host=host)


def test_updates_and_security_belong_and_backports_do_not(tmp_path, archive):
    sources = make_archive(archive, "duck", ALL)
    sources += make_archive(tmp_path / "s", "duck-security", [replace(TOOL, version="1:2.0-1+u1")])
    sources += make_archive(tmp_path / "b", "duck-backports", [replace(TOOL, version="1:3")])
    plan = resolve(DebianBase(None, ("tool",)), tmp_path / "work", host=make_host(tmp_path, sources))
    assert plan.packages[1].version == "1:2.0-1+u1"


def test_an_alias_is_known_by_its_codename(tmp_path, archive):
    host = make_host(tmp_path, make_archive(archive, "stable", ALL, codename="duck"))
    assert names(resolve(DebianBase(None, ("tool",)), tmp_path / "work", host=host)) == ["libc6", "tool"]


def test_mirror_out_of_reach(tmp_path, archive, host):
    shutil.rmtree(archive)
    with pytest.raises(UnreachableError, match="package lists of `duck` could not be fetched"):
        resolve(DebianBase(None, ("tool",)), tmp_path / "work", host=host)


def test_a_missing_pocket_of_the_distribution_is_not_passed_over(tmp_path, archive):
    key = "[trusted=yes signed-by=/keys.gpg]"
    sources = make_archive(archive, "duck", ALL).replace("[trusted=yes]", key)
    sources += f"deb {key} copy:{tmp_path}/gone duck-security main\n"
    with pytest.raises(UnreachableError, match="`duck-security` could not be fetched"):
        resolve(DebianBase(None, ("tool",)), tmp_path / "work", host=make_host(tmp_path, sources))


def test_lists_are_not_fetched_again_for_a_day(tmp_path, archive, host):
    resolve(DebianBase(None, ("tool",)), tmp_path / "work", host=host)
    shutil.rmtree(archive)
    assert names(resolve(DebianBase(None, ("extra",)), tmp_path / "work", host=host)) == ["extra"]


def test_a_plan_is_remembered_and_outlives_its_mirror(tmp_path, archive, host):
    store, base = Store(tmp_path / "store"), DebianBase(None, ("tool",))
    plan = system_plan(base, store, host=host)
    shutil.rmtree(archive)
    begin = time.perf_counter()
    assert system_plan(base, store, host=host) == plan
    assert time.perf_counter() - begin < 0.05
    for path in [*(store.root / "known" / "system-plan").iterdir(), store.root / "apt" / "duck" / "refreshed"]:
        text = path.read_text()
        path.write_text(text.replace('"time":', f'"time":-{PLAN_AGE}, "was":'))
        os.utime(path, (0, 0))
    assert system_plan(base, store, host=host) == plan


def test_a_package_gone_from_the_mirror_is_resolved_again(tmp_path, archive, host):
    store, base = Store(tmp_path / "store"), DebianBase(None, ("tool",))
    old = system_plan(base, store, host=host)
    make_archive(archive, "duck", [LIBC, replace(TOOL, version="1:2.0-2")])
    plan, layer = make_system(base, store, host=host)
    assert [package.version for package in plan.packages] == ["2.36-9+deb12u1", "1:2.0-2"]
    assert plan.layer_key != old.layer_key
    assert store.has(layer.digest)
