"""What an environment consists of, as a CycloneDX 1.6 document (JSON): for scanners of vulnerabilities and licences.

Written by hand: what is needed of the format is five kinds of object, and cyclonedx-python-lib brings seven more
packages. The tests validate against the official schema. Licences are left out, since a lock does not know them.

The same components give the same bytes: everything is sorted, there is no clock, and the serial number is derived from
the content.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuilder import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from envbuilder.lock.model import Lock, Package, Target
    from envbuilder.oci.digest import Digest

#: The document's media type (IANA), which is its artifact type in a registry too.
MEDIA_TYPE = "application/vnd.cyclonedx+json"
_SERIALS = uuid.uuid5(uuid.NAMESPACE_DNS, "sbom.envbuilder.dev")
_PROPERTY = "envbuilder"


@dataclass(frozen=True)
class Component:
    """A part. ``reference`` is its purl, or else a name of ours; ``kind`` is one of CycloneDX's component types.

    ``requires`` are references of other components. ``properties`` is what CycloneDX has no field for.
    """

    kind: str
    name: str
    version: str
    reference: str
    requires: tuple[str, ...] = ()
    digest: Digest | None = None
    cpe: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)


def purl(kind: str, name: str, version: str, qualifiers: Mapping[str, str] | None = None) -> str:
    """Return a package URL: ``kind`` may hold a namespace, ``deb/debian``. Empty qualifiers are left out."""
    words = [f"{key}={_quoted(value)}" for key, value in sorted((qualifiers or {}).items()) if value]
    return f"pkg:{kind}/{_quoted(name)}@{_quoted(version)}" + (f"?{'&'.join(words)}" if words else "")


def package_components(lock: Lock) -> list[Component]:
    """Return the locked packages, each with those that it requires on the lock's target."""
    needed = graph(lock)
    return [
        Component(
            kind="library",
            name=package.name,
            version=package.version,
            reference=python_purl(package.name, package.version),
            requires=tuple(_purl(lock.by_name[name]) for name in needed[package.name]),
            digest=package.digest,
            properties={"file": package.file} | ({"built-from-source": "true"} if package.build else {}),
        )
        for package in lock.packages
    ]


def python_component(version: str) -> Component:
    """Return the interpreter, ``3.12.1``, under the name by which vulnerabilities of it are listed (CPE)."""
    cpe = f"cpe:2.3:a:python:python:{version}:*:*:*:*:*:*:*"
    return Component("application", "python", version, purl("generic", "python", version), cpe=cpe)


def python_purl(name: str, version: str) -> str:
    """Return the package URL of a Python package whose name is canonical."""
    return purl("pypi", name, version)


def graph(lock: Lock) -> Mapping[str, tuple[str, ...]]:
    """Return the names that each package requires of the lock, sorted: markers hold on its target, extras were asked for."""
    requirements = {p.name: [Requirement(text) for text in p.requires] for p in lock.packages}
    environment = _environment(lock.target)
    edges: dict[str, set[str]] = defaultdict(set)
    asked: set[tuple[str, str]] = set()
    # Each pair of package and extra is looked at once; those that were asked for by name bring their extras along.
    pending = [(package.name, "") for package in lock.packages]
    for text in lock.input.requires:
        root = Requirement(text)
        pending += [(canonicalize_name(root.name), extra) for extra in root.extras]
    while pending:
        name, extra = pair = pending.pop()
        if pair in asked or name not in requirements:
            continue
        asked.add(pair)
        for requirement in requirements[name]:
            if requirement.marker is not None and not requirement.marker.evaluate(environment | {"extra": extra}):
                continue
            target = canonicalize_name(requirement.name)
            if target in requirements and target != name:
                edges[name].add(target)
            pending += [(target, inner) for inner in requirement.extras]
    return {package.name: tuple(sorted(edges[package.name])) for package in lock.packages}


def format_sbom(subject: Component, components: Iterable[Component]) -> bytes:
    """Return the document: ``subject`` is what it is about, and depends on whatever nothing else depends on.

    A component that is given twice counts once.
    """
    parts = sorted({part.reference: part for part in components}.values(), key=lambda part: part.reference)
    required = {reference for part in parts for reference in part.requires}
    roots = tuple(part.reference for part in parts if part.reference not in required)
    document: dict[str, Any] = {
        "metadata": {"component": _component(subject), "tools": {"components": [_tool()]}},
        "components": [_component(part) for part in parts],
        "dependencies": [
            _dependency(subject.reference, roots),
            *(_dependency(part.reference, part.requires) for part in parts),
        ],
    }
    serial = uuid.uuid5(_SERIALS, json.dumps(document, sort_keys=True))
    head = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
    }
    return json.dumps(head | document, indent=1, ensure_ascii=False).encode() + b"\n"


def _environment(target: Target) -> dict[str, str]:
    """Return PEP 508's variables as uv sets them for a minor version: the first release of it."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{target.python}.0",
        "os_name": "posix",
        "platform_machine": target.architecture,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{target.python}.0",
        "python_version": target.python,
        "sys_platform": "linux",
    }


def _purl(package: Package) -> str:
    return python_purl(package.name, package.version)


def _quoted(text: str) -> str:
    """Encode a part of a purl; its specification leaves the colon as it is."""
    return quote(text, safe=":")


def _component(part: Component) -> dict[str, Any]:
    document: dict[str, Any] = {
        "type": part.kind,
        "bom-ref": part.reference,
        "name": part.name,
        "version": part.version,
    }
    if part.digest is not None:
        document["hashes"] = [{"alg": "SHA-256", "content": part.digest.hex}]
    if part.cpe is not None:
        document["cpe"] = part.cpe
    if part.reference.startswith("pkg:"):
        document["purl"] = part.reference
    if part.properties:
        document["properties"] = [
            {"name": f"{_PROPERTY}:{name}", "value": value} for name, value in sorted(part.properties.items())
        ]
    return document


def _tool() -> dict[str, str]:
    return {"type": "application", "name": "envbuilder", "version": __version__}


def _dependency(reference: str, requires: Sequence[str]) -> dict[str, Any]:
    return {"ref": reference, "dependsOn": sorted(requires)} if requires else {"ref": reference}
