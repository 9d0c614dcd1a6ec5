"""Locks of bases on the command line."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.spec.recipe import DebianBase, read_recipe
from envbuilder.system.apt import DebianPackage, Host, architecture
from envbuilder.system.debian import SystemPlan
from envbuilder.system.lockfile import SystemLock, echo, write_system_lock
from tests.cli.test_main import Shell, shell
from tests.indexes import serve
from tests.wheelmaker import make_wheel

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["shell"]  # the fixture

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")


def lock_of(folder: Path) -> tuple[SystemLock, Path]:
    """Return a fresh lock of the default recipe for this machine's suite, and where it is to lie."""
    base = read_recipe(folder / "images" / "default.toml").base
    assert isinstance(base, DebianBase)
    suite = base.suite or Host().codename()
    package = DebianPackage("bash", "5", architecture(), "pool/bash_5.deb", Digest.of(b"bash"), 4)
    lock = SystemLock("default", architecture(), echo(base), SystemPlan(suite, "debian", (package,)))
    return lock, folder / "lockfiles" / f"default.{suite}.system.toml"


def test_check_says_whether_the_recipe_asks_for_something_else(shell: Shell):
    shell.environment("one", "a")
    done = shell.run("lock", "one", "--system", "--check")
    assert done.returncode == 2
    assert "has no lock of its base\nhint: run `envbuilder lock one --system`" in done.stderr
    lock, file = lock_of(shell.folder)
    write_system_lock(lock, file)
    done = shell.run("lock", "one", "--system", "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # Of another release and another machine: it is checked all the same.
    plan = replace(lock.plan, suite="goose")
    elsewhere = replace(lock, architecture="arm64", names=(*lock.names[1:], "zz"), plan=plan)
    write_system_lock(elsewhere, file.with_name("default.goose.system.toml"))
    done = shell.run("lock", "one", "--system", "--check")
    differences = f"default on goose: base.debian: - zz\ndefault on goose: base.debian: + {lock.names[0]}\n"
    assert (done.returncode, done.stdout) == (1, differences)


def test_a_stale_lock_of_the_base_is_refused(shell: Shell):
    with serve(shell.folder / "index") as index:
        index.add(make_wheel("a"))
        shell.environment("one", "a")
        assert shell.run("lock", "one", "--index-url", index.url).returncode == 0
    lock, file = lock_of(shell.folder)
    write_system_lock(replace(lock, names=("zsh", *lock.names[1:])), file)
    done = shell.run("build", "one")
    assert done.returncode == 1
    assert f"{file} is stale:\n  base.debian: - zsh\n  base.debian: + {lock.names[0]}" in done.stderr
    assert "hint: run `envbuilder lock one --system`" in done.stderr
