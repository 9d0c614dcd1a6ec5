"""The machine's apt sources, both of their formats (sources.list(5)), cut down to single archive and suite."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# apt reads no other names in its folders, so that editors' backups count for nothing.
_PART = re.compile(r"[A-Za-z0-9_.-]+\.(list|sources)")
_LINE = re.compile(r"(?P<type>deb|deb-src)\s+(?:\[(?P<options>[^\]]*)\]\s*)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<rest>.*)")
# One-line options whose deb822 field is not the option's own name.
_FIELDS = {"arch": "Architectures", "lang": "Languages", "target": "Targets"}
_OWN = {"types", "uris", "suites", "components", "enabled"}


@dataclass(frozen=True)
class Source:
    """One binary package archive with one suite. ``options`` are the other deb822 fields, as they stand."""

    uri: str
    suite: str
    components: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    @property
    def signed_by(self) -> str | None:
        """The keys this source is bound to, or None when it trusts all of the machine's."""
        return next((value.strip() for name, value in self.options if name.lower() == "signed-by"), None)

    @property
    def host(self) -> str:
        """The host of the URI; empty for local archives."""
        return self.uri.partition("://")[2].partition("/")[0].rpartition("@")[2]

    def stanza(self) -> str:
        """Return the source in deb822 format, with a newline at the end."""
        fields = [("Types", "deb"), ("URIs", self.uri), ("Suites", self.suite)]
        if self.components:
            fields.append(("Components", " ".join(self.components)))
        return "".join(f"{name}: {value}\n" for name, value in (*fields, *self.options))


def machine_sources(etc: Path) -> tuple[Source, ...]:
    """Return the enabled binary sources below ``etc`` (the machine's ``/etc/apt``), in apt's order, each once.

    Files that cannot be read or lines that cannot be understood are passed over: they belong to the machine, and
    what they were meant to offer is missed where it is asked for.
    """
    parts = etc / "sources.list.d"
    names = sorted(path.name for path in parts.iterdir()) if parts.is_dir() else []
    files = [etc / "sources.list", *(parts / name for name in names if _PART.fullmatch(name))]
    found: dict[Source, None] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        parse = parse_stanzas if file.suffix == ".sources" else parse_lines
        found.update(dict.fromkeys(parse(text)))
    return tuple(found)


def archives(source: Source) -> Iterator[str]:
    """Yield the URIs under which a file of the source's archive can be asked for: its own, or those it stands for.

    A list of mirrors in a file (apt-transport-mirror(1)) stands for these; one elsewhere, or a disk, for none.
    """
    method, _, rest = source.uri.partition(":")
    if method == "mirror+file":
        lines = Path(rest).read_text(encoding="utf-8").splitlines() if Path(rest).is_file() else []
        yield from (line.split()[0] for line in lines if line.strip() and not line.startswith("#"))
    elif method == "file":
        yield f"copy:{rest}"  # of file: apt only makes links
    elif method != "cdrom" and not method.startswith("mirror"):
        yield source.uri


def parse_lines(text: str) -> Iterator[Source]:
    """Yield the sources of a one-line-format file."""
    for line in text.splitlines():
        match = _LINE.fullmatch(line.partition("#")[0].strip())
        if match is None or match["type"] != "deb":
            continue
        words = (match["options"] or "").split()
        options = tuple(_option(*word.partition("=")[::2]) for word in words if "=" in word)
        yield Source(match["uri"], match["suite"], tuple(match["rest"].split()), options)


def parse_stanzas(text: str) -> Iterator[Source]:
    """Yield the sources of a deb822 file, one for each pair of URI and suite."""
    for block in re.split(r"\n[ \t]*\n", text):
        fields = dict(_fields(block.splitlines()))
        lower = {name.lower(): value for name, value in fields.items()}
        if lower.get("enabled", "yes").strip().lower() in {"no", "false", "off", "0", "without", "disable"}:
            continue
        if "deb" not in lower.get("types", "").split():
            continue
        options = tuple((name, value) for name, value in fields.items() if name.lower() not in _OWN)
        components = tuple(lower.get("components", "").split())
        for uri in lower.get("uris", "").split():
            for suite in lower.get("suites", "").split():
                yield Source(uri, suite, components, options)


def _fields(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    name, value = "", ""
    for line in lines:
        if line.startswith("#"):
            continue
        if line[:1] in {" ", "\t"}:
            value += "\n" + line.rstrip()
            continue
        if name:
            yield name, value
        name, _, value = line.partition(":")
        value = value.strip()
    if name:
        yield name, value


def _option(name: str, value: str) -> tuple[str, str]:
    field = _FIELDS.get(name, "-".join(word.capitalize() for word in name.split("-")))
    return field, value.replace(",", " ")
