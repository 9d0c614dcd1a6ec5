"""The lock of a base: which Debian packages a recipe resolved to on a suite, ``lockfiles/<recipe>.<suite>.system.toml``.

It is the same bytes on every machine and names no host: a package is its version, its hash, and its path below the
root of whatever mirror a machine has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder import tomlread
from envbuilder.atomic import atomic_file
from envbuilder.errors import InputError
from envbuilder.lock.drift import Difference, set_differences
from envbuilder.oci.digest import Digest
from envbuilder.system.apt import DebianPackage
from envbuilder.system.debian import SystemPlan
from envbuilder.tomlwrite import array, string

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.spec.recipe import DebianBase
    from envbuilder.tomlread import Table

SCHEMA = 1


class SystemLockMissingError(InputError):
    """A recipe has no lock for a suite yet."""


@dataclass(frozen=True)
class SystemLock:
    """What a recipe's base resolved to. ``names`` echo the packages that were asked for, sorted."""

    recipe: str
    architecture: str
    names: tuple[str, ...]
    plan: SystemPlan


def echo(base: DebianBase) -> tuple[str, ...]:
    """Return the packages that a base asks for, in canonical order."""
    return tuple(sorted(set(base.packages)))


def system_drift(lock: SystemLock, base: DebianBase) -> tuple[Difference, ...]:
    """Return how the packages that a base asks for differ from those that were locked; empty when the lock is fresh."""
    return tuple(set_differences("base.debian", lock.names, base.packages))


def moved(was: SystemPlan, now: SystemPlan) -> tuple[Difference, ...]:
    """Return what became of a plan's packages in another one, sorted by name: other versions, absent, new."""
    old = {package.name: package for package in was.packages}
    new = {package.name: package for package in now.packages}
    return tuple(
        Difference(name, old[name].version if name in old else None, new[name].version if name in new else None)
        for name in sorted(old.keys() | new.keys())
        if name not in old or name not in new or old[name].digest != new[name].digest
    )


def format_system_lock(lock: SystemLock) -> str:
    """Return the lock's text: fixed order, no clock, no host, trailing newline."""
    plan = lock.plan
    lines = [
        f"# The Debian packages of the recipe `{lock.recipe}` on {plan.suite}. Written by `envbuilder lock ENV --system`;",
        "# do not edit.",
        f"schema = {SCHEMA}",
        f"recipe = {string(lock.recipe)}",
        f"distribution = {string(plan.distribution)}",
        f"suite = {string(plan.suite)}",
        f"architecture = {string(lock.architecture)}",
        "",
        "# What was resolved, to tell when this file is stale.",
        "[input]",
        f"debian = {array(lock.names)}",
    ]
    for package in plan.packages:
        lines += [
            "",
            "[[package]]",
            f"name = {string(package.name)}",
            f"version = {string(package.version)}",
            f"architecture = {string(package.architecture)}",
            f"file = {string(package.file)}",
            f"sha256 = {string(package.digest.hex)}",
            f"size = {package.size}",
        ]
    return "\n".join(lines) + "\n"


def write_system_lock(lock: SystemLock, file: Path) -> None:
    """Write the lock to ``file``, whole or not at all."""
    with atomic_file(file) as out:
        out.write(format_system_lock(lock).encode())


def read_system_lock(file: Path) -> SystemLock:
    """Read a lock.

    Raises:
        SystemLockMissingError: there is no such file.
        TomlError: it is not a lock of this schema; it names file, place and reason.

    """
    if not file.exists():
        raise SystemLockMissingError(f"{file} does not exist", hint="run `envbuilder lock ENV --system`")
    table = tomlread.load(file)
    if (schema := table.integer("schema")) != SCHEMA:
        hint = "write it anew with `envbuilder lock ENV --system`" if schema < SCHEMA else "use a newer envbuilder"
        raise table.error("schema", f"is {schema}; this envbuilder reads {SCHEMA}", hint=hint)
    asked = table.table("input")
    lock = SystemLock(
        recipe=table.string("recipe"),
        architecture=table.string("architecture"),
        names=asked.strings("debian"),
        plan=SystemPlan(
            suite=table.string("suite"),
            distribution=table.string("distribution"),
            packages=tuple(_read_package(inner) for inner in table.tables("package")),
        ),
    )
    for inner in (asked, table):
        inner.finish()
    return lock


def _read_package(table: Table) -> DebianPackage:
    try:
        digest = Digest.parse(f"sha256:{table.string('sha256')}")
    except ValueError as error:
        raise table.error("sha256", str(error)) from error
    package = DebianPackage(
        name=table.string("name"),
        version=table.string("version"),
        architecture=table.string("architecture"),
        file=table.string("file"),
        digest=digest,
        size=table.integer("size"),
    )
    if package.file.startswith("/") or "://" in package.file or ".." in package.file.split("/"):
        raise table.error("file", f"`{package.file}` is not a path below the root of an archive")
    table.finish()
    return package
