"""Where a repository is to be had: the registry itself, its mirrors, and how each may be spoken to.

Reads containers-registries.conf(5) in its version 2: ``[[registry]]`` with ``prefix``, ``location``, ``insecure``,
``blocked``, ``mirror-by-digest-only`` and ``[[registry.mirror]]``. Files: ``CONTAINERS_REGISTRIES_CONF``, or the user's
``containers/registries.conf``, or the one in /etc/containers; then the folders ``registries.conf.d`` beside the last two.
Short names are Docker's (``reference``), so nothing else of these files is read.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder import tomlread
from envbuilder.errors import InputError
from envbuilder.registry.reference import DOCKER_HUB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envbuilder.registry.reference import Reference
    from envbuilder.tomlread import Table

#: Docker Hub answers under another name than the one that references have.
_DOCKER_HUB_HOST = "registry-1.docker.io"
_SYSTEM = Path("/etc/containers")
_PULLS = {"all": (True, True), "digest-only": (True, False), "tag-only": (False, True)}


class BlockedError(InputError):
    """The machine's configuration forbids the registry."""

    def __init__(self, reference: Reference, file: Path) -> None:
        super().__init__(f"{reference.name}: the registry is blocked by {file}", hint="ask who keeps this machine")


@dataclass(frozen=True)
class Place:
    """A repository on one host (``host[:port]``). ``insecure``: certificates are not verified, and plain HTTP will do.

    ``digests`` and ``tags`` say what a mirror may be asked by.
    """

    host: str
    repository: str
    insecure: bool = False
    digests: bool = True
    tags: bool = True

    @property
    def loopback(self) -> bool:
        """Whether the host is this machine: then plain HTTP will do, as Docker has it."""
        return is_loopback(self.host)


@dataclass(frozen=True)
class Places:
    """The registry itself, and the mirrors to read from before it, in order."""

    origin: Place
    mirrors: tuple[Place, ...] = ()


@dataclass(frozen=True)
class _Mirror:
    location: str
    insecure: bool
    digests: bool
    tags: bool


@dataclass(frozen=True)
class _Registry:
    file: Path
    prefix: str
    location: str
    insecure: bool
    blocked: bool
    mirrors: tuple[_Mirror, ...]


def find_places(reference: Reference) -> Places:
    """Return where a reference's repository is to be had.

    Raises:
        BlockedError: nowhere, says the configuration.
        TomlError: a file is not valid.

    """
    matching = [registry for registry in _load() if _matches(registry.prefix, reference.name)]
    if not matching:
        return Places(_place(reference.name, insecure=False))
    registry = max(matching, key=lambda registry: len(registry.prefix))
    if registry.blocked:
        raise BlockedError(reference, registry.file)

    def moved(location: str) -> str:
        if not location:
            return reference.name
        kept = len(reference.registry) if registry.prefix.startswith("*.") else len(registry.prefix)
        return location + reference.name[kept:]

    mirrors = tuple(
        _place(moved(mirror.location), insecure=mirror.insecure, digests=mirror.digests, tags=mirror.tags)
        for mirror in registry.mirrors
    )
    return Places(_place(moved(registry.location), insecure=registry.insecure), mirrors)


def is_loopback(host: str) -> bool:
    """Return whether ``host[:port]`` is this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _place(name: str, *, insecure: bool, digests: bool = True, tags: bool = True) -> Place:
    host, _, repository = name.partition("/")
    return Place(_DOCKER_HUB_HOST if host == DOCKER_HUB else host, repository, insecure, digests, tags)


def _matches(prefix: str, name: str) -> bool:
    if prefix.startswith("*."):
        return name.partition("/")[0].endswith(prefix[1:])
    return name == prefix or name.startswith(f"{prefix}/")


def _load() -> list[_Registry]:
    """Read all files; what a later one says of a prefix replaces what an earlier one said."""
    found: dict[str, _Registry] = {}
    for file in _files():
        for registry in _read(file):
            found[registry.prefix] = registry
    return list(found.values())


def _files() -> Iterator[Path]:
    user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "containers"
    if explicit := os.environ.get("CONTAINERS_REGISTRIES_CONF"):
        yield Path(explicit)
    else:
        yield from [path for folder in (user, _SYSTEM) if (path := folder / "registries.conf").exists()][:1]
    for folder in (_SYSTEM, user):
        yield from sorted((folder / "registries.conf.d").glob("*.conf"))


def _read(file: Path) -> Iterator[_Registry]:
    document = tomlread.load(file)
    if document.has("registries"):
        raise document.error("registries", "is of the old version 1", hint="write `[[registry]]` tables instead")
    for table in document.tables("registry"):
        location = table.string("location", "").rstrip("/")
        prefix = table.string("prefix", location).rstrip("/")
        if not prefix or not (location or prefix.startswith("*.")):
            raise table.error("location", "is missing; it must be a host, perhaps with a port and a path")
        only_digests = table.boolean("mirror-by-digest-only", default=False)
        yield _Registry(
            file, prefix, location,
            insecure=table.boolean("insecure", default=False),
            blocked=table.boolean("blocked", default=False),
            mirrors=tuple(_mirror(mirror, only_digests=only_digests) for mirror in table.tables("mirror")),
        )  # fmt: skip


def _mirror(table: Table, *, only_digests: bool) -> _Mirror:
    pulls = table.string("pull-from-mirror", "all")
    if pulls not in _PULLS:
        raise table.error("pull-from-mirror", f"must be one of {', '.join(_PULLS)}, not `{pulls}`")
    digests, tags = _PULLS[pulls]
    insecure = table.boolean("insecure", default=False)
    return _Mirror(table.string("location").rstrip("/"), insecure, digests, tags and not only_digests)
