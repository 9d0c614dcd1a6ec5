"""What a package says of itself: the parts of its core metadata that resolving and checking need."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Slips that were once accepted and stand in published files; uv mends the same. Pattern and replacement.
_MENDS = (
    (re.compile(r"((?:>=?|<=?|~=)\s*\d+(?:\.\d+)*)\.\*"), r"\1"),  # >=1.9.*
    (re.compile(r",\s*(?=$|\))"), ""),  # >=1.9,
    (re.compile(r"(\d)\s*((?:[<>]=?|[!~=]=)\s*\d)"), r"\1,\2"),  # >=1.9 <2
)


@dataclass(frozen=True)
class CoreMetadata:
    """Name (canonical) and version as stated, Requires-Dist (canonical, sorted), Requires-Python, extras.

    ``invalid`` holds the lines that even mended are no requirements; they are in nothing else.
    """

    name: str
    version: str
    requires: tuple[str, ...]
    requires_python: str | None
    extras: tuple[str, ...]
    invalid: tuple[str, ...] = ()


def core_metadata(data: bytes) -> CoreMetadata:
    """Read a METADATA or PKG-INFO file, as tolerantly as installers do: one bad field does not spoil the others."""
    raw, unparsed = parse_email(data)
    name = raw.get("name") or "".join(unparsed.get("name", [])[:1])
    version = raw.get("version") or "".join(unparsed.get("version", [])[:1])
    lines = [*raw.get("requires_dist", []), *unparsed.get("requires-dist", [])]
    parsed = {line: canonical_requirement(line) for line in lines}
    python = raw.get("requires_python")
    specifier = _specifier(python) if python else None
    invalid = [line for line, requirement in parsed.items() if requirement is None]
    if python and specifier is None:
        invalid.append(f"Requires-Python: {python}")
    return CoreMetadata(
        name=canonicalize_name(name),
        version=version,
        requires=tuple(sorted({requirement for requirement in parsed.values() if requirement is not None})),
        requires_python=specifier,
        extras=tuple(sorted(canonicalize_name(extra) for extra in raw.get("provides_extra", []))),
        invalid=tuple(invalid),
    )


def canonical_requirement(text: str) -> str | None:
    """Return a requirement as packaging writes it, name and extras canonical; None when it cannot be understood."""
    for attempt in _attempts(text):
        try:
            requirement = Requirement(attempt)
        except InvalidRequirement:
            continue
        requirement.name = canonicalize_name(requirement.name)
        requirement.extras = {canonicalize_name(extra) for extra in requirement.extras}
        return str(requirement)
    return None


def _specifier(text: str) -> str | None:
    for attempt in _attempts(text):
        try:
            return str(SpecifierSet(attempt))
        except InvalidSpecifier:
            continue
    return None


def _attempts(text: str) -> Iterator[str]:
    """Yield the text as it is, then with one slip after the other mended."""
    yield text
    before, semicolon, marker = text.partition(";")
    for pattern, replacement in _MENDS:
        before = pattern.sub(replacement, before)
        yield before + semicolon + marker
