"""An environment: what ``environments/<name>.toml`` says, with ``extends`` and pins files resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuilder import tomlread
from envbuilder.errors import did_you_mean
from envbuilder.spec.accelerator import ACCELERATORS

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping
    from pathlib import Path

    from envbuilder.tomlread import Table

_STATUS = ("supported", "deprecated")
_EXTRA_KEYS = ("version", "cuda-major", "torch-minor", "abi", "py")


@dataclass(frozen=True)
class Pin:
    """A row of a published list: a package at a version, with the line it stands on."""

    name: str
    version: str
    line: int


@dataclass(frozen=True)
class Deviation:
    """Where we differ from the published list, and why. ``ours`` is None when the package is absent from ours."""

    package: str
    published: str
    ours: str | None
    reason: str


@dataclass(frozen=True)
class BuildSetting:
    """A package that is built from its source archive: why, with which variables, and what the machine needs."""

    package: str
    reason: str
    env: Mapping[str, str]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class NamedIndex:
    """An index other than the default one, and the packages that come from it alone."""

    name: str
    url: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Extra:
    """An optional part that is not in the lock: exact pins, and the URL template of the first one's prebuilt wheel."""

    name: str
    requires: tuple[str, ...]
    wheel: str | None
    sha256: str | None
    reason: str


@dataclass(frozen=True)
class Environment:
    """A versioned environment. Strings in ``requires`` and ``constraints`` are PEP 508, names canonical elsewhere.

    ``requires`` and ``constraints`` are the environment's own; what it extends has its own lock.
    """

    name: str
    file: Path
    title: str
    extends: str | None
    released: dt.date
    end_of_support: dt.date
    status: str
    python: str
    glibc: str
    exclude_newer: dt.datetime
    cuda: str
    accelerators: tuple[str, ...]
    requires: tuple[str, ...]
    pins_file: Path | None
    pins: tuple[Pin, ...]
    constraints: tuple[str, ...]
    indexes: tuple[NamedIndex, ...]
    builds: tuple[BuildSetting, ...]
    protected: tuple[str, ...]
    deviations: tuple[Deviation, ...]
    extras: tuple[Extra, ...] = ()
    smoke_imports: tuple[str, ...] = field(default=())

    def wanted(self) -> tuple[str, ...]:
        """Return every requirement to resolve: ``requires``, then the pins at their versions as deviations say."""
        named = {canonicalize_name(Requirement(r).name) for r in self.requires}
        replaced = {d.package: d.ours for d in self.deviations}
        pinned = []
        for pin in self.pins:
            version = replaced.get(pin.name, pin.version)
            if version is not None and pin.name not in named:
                pinned.append(f"{pin.name}=={version}")
        return (*self.requires, *pinned)


def read_environment(file: Path) -> Environment:
    """Read an environment's TOML file; its name is the file's stem.

    Raises:
        TomlError: an unknown key, a wrong type, an impossible value; it names file, place and reason.

    """
    table = tomlread.load(file)
    packages = table.table("packages")
    pins_name = packages.optional_string("pins")
    pins_file = file.parent / pins_name if pins_name is not None else None
    pins = _read_pins(packages, pins_file) if pins_file is not None else ()
    gpu, cuda, protected = table.table("gpu"), table.table("cuda"), table.table("protected", optional=True)
    smoke, builds, extras = (table.table(key, optional=True) for key in ("smoke", "build", "extras"))
    environment = Environment(
        name=file.stem,
        file=file,
        title=table.string("title"),
        extends=table.optional_string("extends"),
        released=table.date("released"),
        end_of_support=table.date("end-of-support"),
        status=_one_of(table, "status", _STATUS),
        python=_matching(table, "python", r"3\.\d+", "a minor version such as 3.12"),
        glibc=_matching(table, "glibc", r"2\.\d+", "a glibc version such as 2.35", default="2.35"),
        exclude_newer=table.moment("exclude-newer"),
        cuda=_matching(cuda, "version", r"\d+\.\d+", "a CUDA version such as 12.6"),
        accelerators=_accelerators(gpu),
        requires=_requirements(packages, "requires", ()),
        pins_file=pins_file,
        pins=pins,
        constraints=_requirements(packages, "constraints", ()),
        indexes=tuple(_index(inner) for inner in table.tables("index")),
        builds=tuple(_build(builds.table(name), name) for name in builds.keys()),  # noqa: SIM118 (not a dict)
        protected=tuple(canonicalize_name(name) for name in protected.strings("packages", ())),
        deviations=_deviations(table, pins),
        extras=tuple(_extra(extras.table(name), name) for name in extras.keys()),  # noqa: SIM118
        smoke_imports=smoke.strings("imports", ()),
    )
    for inner in (packages, gpu, cuda, protected, smoke, table):
        inner.finish()
    return environment


def _requirements(table: Table, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    def parse(text: str) -> str:
        try:
            return str(Requirement(text))
        except InvalidRequirement as error:
            raise ValueError(str(error).splitlines()[0]) from error

    return table.parsed(key, parse, default)


def _matching(table: Table, key: str, pattern: str, description: str, default: str | None = None) -> str:
    value = table.string(key, default)
    if not re.fullmatch(pattern, value):
        raise table.error(key, f"`{value}` is not {description}")
    return value


def _one_of(table: Table, key: str, known: tuple[str, ...]) -> str:
    value = table.string(key)
    if value not in known:
        raise table.error(key, f"`{value}` is not one of {', '.join(known)}", hint=did_you_mean(value, known))
    return value


def _accelerators(table: Table) -> tuple[str, ...]:
    names = table.strings("accelerators")
    for number, name in enumerate(names):
        if name not in ACCELERATORS:
            hint = did_you_mean(name, ACCELERATORS)
            raise table.error(f"accelerators[{number}]", f"unknown accelerator `{name}`", hint=hint)
    return names


def _index(table: Table) -> NamedIndex:
    packages = tuple(canonicalize_name(name) for name in table.strings("packages"))
    index = NamedIndex(table.string("name"), table.string("url"), packages)
    table.finish()
    return index


def _build(table: Table, name: str) -> BuildSetting:
    setting = BuildSetting(
        canonicalize_name(name), table.string("reason"), table.string_map("env"), table.strings("needs", ())
    )
    table.finish()
    return setting


def _extra(table: Table, name: str) -> Extra:
    extra = Extra(
        name=name,
        requires=_requirements(table, "requires", ()),
        wheel=table.optional_string("wheel"),
        sha256=table.optional_string("sha256"),
        reason=table.string("reason"),
    )
    if not extra.requires:
        raise table.error("requires", "must name at least one package")
    for key in re.findall(r"\{([^}]*)\}", extra.wheel or ""):
        if key not in (*_EXTRA_KEYS, "cuda"):
            raise table.error("wheel", f"unknown key `{{{key}}}`", hint=did_you_mean(key, _EXTRA_KEYS))
    table.finish()
    return extra


def _deviations(table: Table, pins: tuple[Pin, ...]) -> tuple[Deviation, ...]:
    published = {pin.name: pin.version for pin in pins}
    found: dict[str, Deviation] = {}
    for inner in table.tables("deviation"):
        name = canonicalize_name(inner.string("package"))
        deviation = Deviation(name, inner.string("published"), inner.optional_string("ours"), inner.string("reason"))
        inner.finish()
        if name not in published:
            raise inner.error("package", f"`{name}` is not in the pins", hint=did_you_mean(name, published))
        if published[name] != deviation.published:
            raise inner.error("published", f"the pins say {published[name]}, not {deviation.published}")
        if name in found:
            raise inner.error("package", f"a second deviation for `{name}`")
        found[name] = deviation
    return tuple(found.values())


def _read_pins(table: Table, file: Path) -> tuple[Pin, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise table.error("pins", f"{file} cannot be read: {error.strerror}") from error
    pins = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, separator, version = text.partition("==")
        if not separator or not re.fullmatch(r"[A-Za-z0-9._-]+", name) or not version:
            raise table.error("pins", f"{file}:{number}: `{text}` is not of the form name==version")
        pins.append(Pin(canonicalize_name(name), version, number))
    return tuple(pins)
