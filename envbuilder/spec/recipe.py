"""A recipe: what ``images/<name>.toml`` says about how an image is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from envbuilder import tomlread
from envbuilder.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from envbuilder.tomlread import Table

INTERPRETERS = ("managed", "host", "base")
#: The words of ``oci.blob.Compression``.
COMPRESSIONS = ("gzip", "zstd", "none")


@dataclass(frozen=True)
class DebianBase:
    """A base made of Debian packages. Without a suite, the one of the machine that builds."""

    suite: str | None
    packages: tuple[str, ...]


@dataclass(frozen=True)
class ImageBase:
    """A base pulled from a registry, by reference."""

    reference: str


Base: TypeAlias = DebianBase | ImageBase


@dataclass(frozen=True)
class Paths:
    """Where interpreter and environment lie in the image; absolute, normal, not one inside the other."""

    python: str
    environment: str


@dataclass(frozen=True)
class Layering:
    """Wheels of at least ``alone`` bytes get a layer each, the others fall into ``buckets``; ``budget`` layers at most.

    ``compression`` is one of ``COMPRESSIONS``: how the layers with packages are compressed.
    """

    alone: int
    buckets: int
    budget: int
    compression: str = COMPRESSIONS[0]


@dataclass(frozen=True)
class Recipe:
    """How an image is made."""

    name: str
    file: Path
    base: Base
    interpreter: tuple[str, ...]
    paths: Paths
    layering: Layering
    user: str
    working_dir: str
    env: Mapping[str, str]
    cmd: tuple[str, ...]


def read_recipe(file: Path) -> Recipe:
    """Read a recipe's TOML file; its name is the file's stem.

    Raises:
        TomlError: an unknown key, a wrong type, an impossible value; it names file, place and reason.

    """
    table = tomlread.load(file)
    python, paths = table.table("python"), table.table("paths")
    layering, process = table.table("layering"), table.table("process", optional=True)
    recipe = Recipe(
        name=file.stem,
        file=file,
        base=_base(table.table("base")),
        interpreter=_interpreters(python),
        paths=Paths(_absolute(paths, "python"), _absolute(paths, "environment")),
        layering=_layering(layering),
        user=process.string("user", ""),
        working_dir=process.string("working-dir", "/"),
        env=process.string_map("env"),
        cmd=process.strings("cmd", ()),
    )
    for inner in (python, paths, layering, process, table):
        inner.finish()
    return recipe


def _base(table: Table) -> Base:
    base: Base
    if table.has("image"):
        base = ImageBase(table.string("image"))
    else:
        base = DebianBase(table.optional_string("suite"), table.strings("debian"))
    table.finish()
    return base


def _interpreters(table: Table) -> tuple[str, ...]:
    kinds = table.strings("from")
    for number, kind in enumerate(kinds):
        if kind not in INTERPRETERS:
            raise table.error(f"from[{number}]", f"unknown kind `{kind}`", hint=did_you_mean(kind, INTERPRETERS))
    if not kinds:
        raise table.error("from", f"must name at least one of {', '.join(INTERPRETERS)}")
    return kinds


def _layering(table: Table) -> Layering:
    compression = table.string("compression", COMPRESSIONS[0])
    if compression not in COMPRESSIONS:
        hint = did_you_mean(compression, COMPRESSIONS)
        raise table.error("compression", f"unknown compression `{compression}`", hint=hint)
    alone = _positive(table, "alone-mib") << 20
    return Layering(alone, _positive(table, "buckets"), _positive(table, "budget"), compression)


def _absolute(table: Table, key: str) -> str:
    path = table.string(key)
    if not path.startswith("/") or path.endswith("/") or "//" in path or "/." in path:
        raise table.error(key, f"`{path}` is not an absolute, normal path")
    return path


def _positive(table: Table, key: str) -> int:
    number = table.integer(key)
    if number < 1:
        raise table.error(key, f"must be at least 1, not {number}")
    return number
