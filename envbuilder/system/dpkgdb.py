"""dpkg's own database for the layer, so that ``dpkg -l``, ``dpkg -S`` and vulnerability scanners know what is in it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import Directory, Entry, File

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from envbuilder.system.spool import Part

_ROOT = "var/lib/dpkg"


def database(parts: Sequence[Part]) -> Iterator[Entry]:
    """Yield the status file and each package's list of files, checksums and scripts.

    Files that the layer leaves out are in neither list nor checksums: the database tells the truth.
    """
    yield Directory(f"{_ROOT}/updates")
    yield Directory(f"{_ROOT}/triggers")
    yield File(f"{_ROOT}/available", Bytes(b""))
    yield File(f"{_ROOT}/info/format", Bytes(b"1\n"))
    yield File(f"{_ROOT}/status", Bytes("".join(map(_status, parts)).encode(errors="surrogateescape")))
    for part in parts:
        name = _info_name(part)
        yield File(f"{_ROOT}/info/{name}.list", Bytes(_listing(part)))
        for kind, data in sorted(part.control.files.items()):
            mode = 0o755 if data.startswith(b"#!") else 0o644
            yield File(f"{_ROOT}/info/{name}.{kind}", Bytes(_kept(part, kind, data)), mode)


def _info_name(part: Part) -> str:
    fields = part.control.fields
    same = fields.get("Multi-Arch") == "same"
    return f"{part.name}:{fields['Architecture']}" if same else part.name


def _status(part: Part) -> str:
    fields = part.control.fields
    lines = [f"Package: {part.name}", "Status: install ok installed"]
    lines += [f"{name}: {value}" if value else f"{name}:" for name, value in fields.items() if name != "Package"]
    if conffiles := _conffiles(part):
        lines.append("Conffiles:" + "".join(f"\n {path} {md5}" for path, md5 in conffiles))
    return "\n".join(lines) + "\n\n"


def _conffiles(part: Part) -> list[tuple[str, str]]:
    """Return path and MD5 (dpkg's own choice; nothing is secured by it) of each configuration file that is kept."""
    named = part.control.files.get("conffiles", b"").decode().split("\n")
    wanted = {path.strip().lstrip("/") for path in named}
    files = [entry for entry in part.entries if isinstance(entry, File) and entry.path in wanted]
    return [
        (f"/{file.path}", hashlib.md5(b"".join(file.content.chunks()), usedforsecurity=False).hexdigest())
        for file in files
    ]


def _listing(part: Part) -> bytes:
    paths = "".join(f"/{entry.path}\n" for entry in part.entries)
    return f"/.\n{paths}".encode(errors="surrogateescape")


def _kept(part: Part, kind: str, data: bytes) -> bytes:
    if kind != "md5sums":
        return data
    kept = {entry.path for entry in part.entries}
    lines = data.decode(errors="surrogateescape").splitlines(keepends=True)
    return "".join(line for line in lines if line.rstrip("\n")[34:] in kept).encode(errors="surrogateescape")
