"""Two virtual environments, file by file, and what kind every difference between them is."""

from __future__ import annotations

import ast
import filecmp
import os
import posixpath
import re
import stat
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.contents.records import read_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

#: What venv and uv put into an environment beside the packages.
_FRAME = re.compile(
    r"\.gitignore|\.lock|CACHEDIR\.TAG|pyvenv\.cfg|lib64"
    r"|bin/(python[\d.]*|(de)?activate(_this)?(\.\w+)?|Activate\.ps1|pydoc\.bat)"
)
#: What an installer notes about where it had a wheel from.
_ORIGIN = re.compile(r".*\.dist-info/(REQUESTED|direct_url\.json|uv_cache\.json)")
#: Rows of RECORD about files that differ in one of the ways of this module.
_OWN_ROW = re.compile(
    r".*\.pyc|(\.\./)+bin/[^/]+|.*\.dist-info/(INSTALLER|RECORD|REQUESTED|direct_url\.json|uv_cache\.json)"
)


@dataclass(frozen=True)
class Difference:
    """A path that is ``ours only``, ``theirs only``, or of which ``link``, ``content`` or ``mode`` differ."""

    path: str
    what: str


@dataclass(frozen=True)
class Pair:
    """Two virtual environments: the image's, at ``prefix`` in the image, and the installer's."""

    ours: Path
    prefix: str
    theirs: Path

    def differences(self) -> list[Difference]:
        """Return all differences but those of bytecode, sorted by path."""
        ours, theirs = _paths(self.ours), _paths(self.theirs)
        found = [Difference(path, "ours only") for path in ours - theirs]
        found += [Difference(path, "theirs only") for path in theirs - ours]
        with ThreadPoolExecutor(2) as pool:
            for inner in pool.map(lambda path: list(self._compare(path)), sorted(ours & theirs)):
                found += inner
        return sorted(found, key=lambda difference: (difference.path, difference.what))

    def _compare(self, path: str) -> Iterator[Difference]:
        ours, theirs = self.ours / path, self.theirs / path
        if ours.is_symlink() or theirs.is_symlink():
            if not (ours.is_symlink() and theirs.is_symlink()) or ours.readlink() != theirs.readlink():
                yield Difference(path, "link")
            return
        if (ours.stat().st_mode ^ theirs.stat().st_mode) & 0o111:
            yield Difference(path, "mode")
        if not filecmp.cmp(ours, theirs, shallow=False):
            yield Difference(path, "content")

    def kind(self, difference: Difference, typeless: Collection[str]) -> str | None:
        """Return the name of a difference's kind, as ``facts.toml`` has it; None when it is of none.

        ``typeless`` are paths relative to site-packages, see ``typeless_members``.
        """
        path, what = difference.path, difference.what
        if _FRAME.fullmatch(path) and what != "ours only":
            return "frame"
        if what == "theirs only":
            if _ORIGIN.fullmatch(path):
                return "origin"
            return "pip-minor" if re.fullmatch(r"bin/pip3\.\d+", path) else None
        if what == "mode":
            return "typeless" if path.partition("/site-packages/")[2] in typeless else None
        return self._kind_of_content(path) if what == "content" else None

    def _kind_of_content(self, path: str) -> str | None:
        ours, theirs = self.ours / path, self.theirs / path
        if path.endswith(".dist-info/INSTALLER"):
            return "installer" if ours.read_bytes() == b"envbuilder\n" else None
        if path.endswith(".dist-info/RECORD"):
            return "record" if _rows(ours) == _rows(theirs) else None
        if posixpath.dirname(path) != "bin":
            return None
        first, _, text = ours.read_bytes().partition(b"\n")
        their_first, _, their_text = theirs.read_bytes().partition(b"\n")
        expected = (f"#!{self.prefix}/bin/python", f"#!{self.theirs}/bin/python")
        if (first.decode(), re.sub(r"python3?$", "python", their_first.decode())) != expected:
            return None
        if text == their_text:
            return "interpreter"
        calls = launched(text)
        return "launcher" if calls is not None and calls == launched(their_text) else None


def typeless_members(wheels: Iterable[Path]) -> set[str]:
    """Return members, of all wheels, that have the permission to execute but are not said to be regular files.

    The wheel specification asks for the bit of regular files only; pip and pypa/installer do as it says, uv does not.
    """
    found = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
        found |= {name for name, mode in modes.items() if mode & 0o111 and not stat.S_ISREG(mode)}
    return found


def launched(script: bytes) -> tuple[str, str] | None:
    """Return the module and the attribute that a launcher calls for an entry point; None for any other script."""
    found = re.search(rb"^\s*sys\.exit\(([\w.]+)\(\)\)$", script, re.MULTILINE)
    if found is None:
        return None
    for node in ast.parse(script).body:
        if isinstance(node, ast.ImportFrom) and node.module and found[1].decode().startswith(node.names[0].name):
            return node.module, found[1].decode()
    return None


def _rows(record: Path) -> set[tuple[str, str, str]]:
    return {(row.path, row.hash, row.size) for row in read_record(record) if not _OWN_ROW.fullmatch(row.path)}


def _paths(root: Path) -> set[str]:
    found = set()
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(f"{folder}/{name}")]  # noqa: PTH114  (150,000 of them)
        inner = folder.removeprefix(str(root)).lstrip("/")
        found |= {posixpath.join(inner, name) for name in (*names, *links) if not name.endswith(".pyc")}
    return found
