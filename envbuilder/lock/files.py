"""Write a lock as TOML that is the same bytes on every machine, and read it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envbuilder import tomlread
from envbuilder.atomic import atomic_file
from envbuilder.errors import InputError
from envbuilder.lock.model import SCHEMA, Build, Lock, LockInput, Package, Target
from envbuilder.oci.digest import Digest
from envbuilder.tomlwrite import array, inline, string

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.tomlread import Table


class LockMissingError(InputError):
    """An environment has no lock yet."""


def format_lock(lock: Lock) -> str:
    """Return the lock's text: fixed order, no clock, no host, trailing newline."""
    lines = [
        f"# What `{lock.environment}` resolved to. Written by `envbuilder lock {lock.environment}`; do not edit.",
        f"schema = {SCHEMA}",
        f"environment = {string(lock.environment)}",
        f"cuda = {string(lock.cuda)}",
        "",
        "[target]",
        f"python = {string(lock.target.python)}",
        f"architecture = {string(lock.target.architecture)}",
        f"glibc = {string(lock.target.glibc)}",
        "",
        "# What was resolved, to tell when this file is stale.",
        "[input]",
    ]
    if lock.input.extends is not None:
        lines.append(f"extends = {string(lock.input.extends)}")
    lines += [
        f"exclude-newer = {string(lock.input.exclude_newer)}",
        f"requires = {array(lock.input.requires)}",
        f"constraints = {array(lock.input.constraints)}",
    ]
    for name, env in lock.input.builds:
        lines += ["", "[[input.build]]", f"name = {string(name)}", f"env = {inline(env)}"]
    for name, url, packages in lock.input.indexes:
        lines += ["", "[[input.index]]", f"name = {string(name)}", f"url = {string(url)}"]
        lines.append(f"packages = {array(packages)}")
    for package in lock.packages:
        lines += ["", *_package(package)]
    return "\n".join(lines) + "\n"


def write_lock(lock: Lock, file: Path) -> None:
    """Write the lock to ``file``, whole or not at all."""
    with atomic_file(file) as out:
        out.write(format_lock(lock).encode())


def read_lock(file: Path) -> Lock:
    """Read a lock.

    Raises:
        LockMissingError: there is no such file.
        TomlError: it is not a lock of this schema; it names file, place and reason.

    """
    if not file.exists():
        name = file.name.removesuffix(".lock.toml")
        raise LockMissingError(f"{file} does not exist", hint=f"run `envbuilder lock {name}`")
    return _read(tomlread.load(file))


def parse_lock(text: str, file: Path) -> Lock:
    """Return the lock that a text is; ``file`` is where it came from, for errors. Raises as ``read_lock``."""
    return _read(tomlread.parse(text, file))


def _read(table: Table) -> Lock:
    if (schema := table.integer("schema")) != SCHEMA:
        hint = "write it anew with `envbuilder lock`" if schema < SCHEMA else "use a newer envbuilder"
        raise table.error("schema", f"is {schema}; this envbuilder reads {SCHEMA}", hint=hint)
    target, echo = table.table("target"), table.table("input")
    lock = Lock(
        environment=table.string("environment"),
        input=_read_input(echo),
        target=Target(target.string("python"), target.string("architecture"), target.string("glibc")),
        cuda=table.string("cuda"),
        packages=tuple(_read_package(inner) for inner in table.tables("package")),
    )
    for inner in (target, echo, table):
        inner.finish()
    return lock


def _package(package: Package) -> list[str]:
    lines = [
        "[[package]]",
        f"name = {string(package.name)}",
        f"version = {string(package.version)}",
        f"file = {string(package.file)}",
        f"sha256 = {string(package.digest.hex)}",
        f"size = {package.size}",
    ]
    if package.index is not None:
        lines.append(f"index = {string(package.index)}")
    if package.build is not None:
        lines.append(f"build-env = {inline(package.build.env)}")
    if package.requires_python is not None:
        lines.append(f"requires-python = {string(package.requires_python)}")
    if package.requires:
        lines.append(f"requires = {array(package.requires)}")
    return lines


def _read_package(table: Table) -> Package:
    built = table.has("build-env")
    env = table.string_map("build-env")
    try:
        digest = Digest.parse(f"sha256:{table.string('sha256')}")
    except ValueError as error:
        raise table.error("sha256", str(error)) from error
    package = Package(
        name=table.string("name"),
        version=table.string("version"),
        file=table.string("file"),
        digest=digest,
        size=table.integer("size"),
        requires=table.strings("requires", ()),
        requires_python=table.optional_string("requires-python"),
        index=table.optional_string("index"),
        build=Build(tuple(sorted(env.items()))) if built else None,
    )
    if "/" in package.file:
        raise table.error("file", f"`{package.file}` is not a plain file name")
    table.finish()
    return package


def _read_input(table: Table) -> LockInput:
    builds, indexes = table.tables("build"), table.tables("index")
    echo = LockInput(
        extends=table.optional_string("extends"),
        exclude_newer=table.string("exclude-newer"),
        requires=table.strings("requires"),
        constraints=table.strings("constraints"),
        builds=tuple((b.string("name"), tuple(sorted(b.string_map("env").items()))) for b in builds),
        indexes=tuple((i.string("name"), i.string("url"), i.strings("packages")) for i in indexes),
    )
    for inner in (*builds, *indexes):
        inner.finish()
    return echo
