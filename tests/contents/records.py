"""RECORD files: what every distribution says it installed, against what lies there."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: Files of a virtual environment that no distribution installs.
FRAME = frozenset({"pyvenv.cfg", "bin/python", "bin/python3", "bin/python3.12"})


@dataclass(frozen=True)
class Row:
    """A row of a RECORD; ``owner`` is the name of its .dist-info folder, ``path`` relative to site-packages."""

    owner: str
    path: str
    hash: str
    size: str


def read_records(site: Path) -> list[Row]:
    """Return the rows of all RECORDs below site-packages."""
    return [row for record in sorted(site.glob("*.dist-info/RECORD")) for row in read_record(record)]


def read_record(record: Path) -> list[Row]:
    """Return the rows of one RECORD (PEP 376)."""
    with record.open(encoding="utf-8", newline="") as file:
        return [Row(record.parent.name, *row) for row in csv.reader(file) if row]


def problems(root: Path, site: Path) -> list[str]:
    """Return what does not fit between the RECORDs and the files of the virtual environment at ``root``."""
    rows = read_records(site)
    found: list[str] = []
    stated: dict[str, Row] = {}
    for row in rows:
        path = os.path.normpath(os.path.join(site.relative_to(root), row.path))  # noqa: PTH118  (no Path: 130,000 of them)
        other = stated.setdefault(path, row)
        if (other.hash, other.size) != (row.hash, row.size):
            found.append(f"{path}: {other.owner} and {row.owner} state different contents")
        if not (row.hash and row.size) and row.path != f"{row.owner}/RECORD":
            found.append(f"{path}: {row.owner} states no hash")
    present = {f"{folder}/{name}" for folder, _, names in os.walk(root) for name in names}
    present = {os.path.relpath(path, root) for path in present}
    found += [f"{path}: belongs to no distribution" for path in present - stated.keys() - FRAME]
    found += [f"{path}: is missing, though {stated[path].owner} states it" for path in stated.keys() - present]
    with ThreadPoolExecutor(2) as pool:
        there = sorted(stated.keys() & present)
        found += filter(None, pool.map(lambda path: _wrong(root, path, stated[path]), there))
    return sorted(found)


def _wrong(root: Path, path: str, row: Row) -> str | None:
    if not row.hash:
        return None
    method, _, value = row.hash.partition("=")
    with (root / path).open("rb") as stream:
        actual = base64.urlsafe_b64encode(hashlib.file_digest(stream, method).digest()).decode().rstrip("=")
    if actual != value or str((root / path).stat().st_size) != row.size:
        return f"{path}: is not what the RECORD of {row.owner} states"
    return None
