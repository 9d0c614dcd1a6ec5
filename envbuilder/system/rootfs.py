"""Merge what packages hold into one root tree, by the rules of a merged /usr. Pure: values in, values out."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.layer import Directory, Entry, File, Hardlink, Symlink

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from envbuilder.system.spool import Part

#: The folders that are links on every Debian and Ubuntu since 2021 (bookworm, jammy). Packages of then still name them.
USRMERGE = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib32": "usr/lib32", "lib64": "usr/lib64"}
#: What no program reads at run time, as path prefixes. Licences stay: usr/share/doc/*/copyright.
DROPPED = (
    "usr/share/doc/",
    "usr/share/doc-base/",
    "usr/share/man/",
    "usr/share/info/",
    "usr/share/groff/",
    "usr/share/locale/",  # translated messages; the C.UTF-8 locale is glibc's own
    "usr/share/gnome/help/",
    "usr/share/help/",
    "usr/share/lintian/",
    "usr/share/bug/",
)
_LINKS_FOLLOWED = 40  # as the kernel does


class RootError(EnvbuilderError):
    """Packages do not fit into one tree: two own the same file, or their links go in a circle."""


@dataclass(frozen=True)
class Tree:
    """Entries by canonical path (``usr/bin/sh``, never ``bin/sh``)."""

    entries: Mapping[str, Entry]

    def __contains__(self, path: str) -> bool:
        return path in self.entries

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a regular file, or None when there is none at this very path."""
        entry = self.entries.get(path)
        return b"".join(entry.content.chunks()) if isinstance(entry, File) else None

    def under(self, folder: str) -> Iterator[str]:
        """Yield the paths directly in a folder, sorted."""
        return (path for path in sorted(self.entries) if posixpath.dirname(path) == folder)

    def with_entries(self, added: Iterable[Entry]) -> Tree:
        """Return a tree with further entries; one whose path is taken is passed over."""
        entries = dict(self.entries)
        for entry in added:
            entries.setdefault(entry.path, entry)
        return Tree(entries)

    def ordered(self) -> Iterator[Entry]:
        """Yield all entries sorted by path, hard links after everything else: what they point at comes first."""
        for late in (False, True):
            yield from (self.entries[p] for p in sorted(self.entries) if isinstance(self.entries[p], Hardlink) is late)


def keep(path: str) -> bool:
    """Return whether a path of a package belongs into the layer."""
    if path.startswith("usr/share/doc/"):
        return path.endswith("/copyright")
    return not f"{path}/".startswith(DROPPED)


def merge(parts: Sequence[Part]) -> Tree:
    """Return the tree that holds all parts.

    Directories that several packages hold are merged, with the mode and owner of the one that departs from the usual
    (0755, root). A file or link may come twice only with equal content and mode.

    Raises:
        RootError: two packages hold different things at one path.

    """
    links = Links(parts)
    entries: dict[str, Entry] = {path: Symlink(path, target) for path, target in USRMERGE.items()}
    owners: dict[str, str] = {}
    for part in parts:
        for entry in part.entries:
            placed = links.place(entry)
            there = entries.get(placed.path)
            if there is None:
                entries[placed.path] = placed
                owners[placed.path] = part.name
            else:
                entries[placed.path] = _same(there, placed, owners.get(placed.path, "the merged /usr"), part.name)
    # lib32 and lib64 are there only where something lies in them.
    unused = [p for p, target in USRMERGE.items() if not any(e.startswith(target + "/") for e in entries)]
    return Tree({path: entry for path, entry in entries.items() if path not in unused})


class Links:
    """The symbolic links of all packages, for giving every path its canonical form."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._targets = dict(USRMERGE)
        self._folders: dict[str, str] = {"": ""}
        self._under_way: set[str] = set()
        links = [entry for part in parts for entry in part.entries if isinstance(entry, Symlink)]
        named = {self._beside(link.path): link.target for link in links}
        self._targets = named | self._targets
        self._folders = {"": ""}

    def canonical(self, path: str) -> str:
        """Return the path with every link in it followed, the last component included."""
        for _ in range(_LINKS_FOLLOWED):
            parent, name = posixpath.split(path)
            path = posixpath.join(self._folder(parent), name)
            target = self._targets.get(path)
            if target is None:
                return path
            path = posixpath.normpath(posixpath.join("/", posixpath.dirname(path), target)).lstrip("/")
        raise _circle(path)

    def place(self, entry: Entry) -> Entry:
        """Return the entry with its canonical path (and, for a hard link, target)."""
        if isinstance(entry, Directory):
            return replace(entry, path=self.canonical(entry.path))
        path = self._beside(entry.path)
        if isinstance(entry, Hardlink):
            return replace(entry, path=path, target=self._beside(entry.target))
        return replace(entry, path=path)

    def _beside(self, path: str) -> str:
        parent, name = posixpath.split(path)
        return posixpath.join(self._folder(parent), name)

    def _folder(self, path: str) -> str:
        if path in self._under_way:
            raise _circle(path)
        if path not in self._folders:
            self._under_way.add(path)
            self._folders[path] = self.canonical(path)
            self._under_way.remove(path)
        return self._folders[path]


def _circle(path: str) -> RootError:
    return RootError(f"the links of the packages go in a circle at `{path}`")


_Owned: TypeAlias = Directory | File


def _same(there: Entry, placed: Entry, owner: str, other: str) -> Entry:
    match there, placed:
        case Directory(), Directory():
            return placed if _usual(there) else there
        case Symlink(target=first), Symlink(target=second) if first.strip("/") == second.strip("/"):
            return there
        case Hardlink(target=first), Hardlink(target=second) if first == second:
            return there
        case File(), File() if _equal(there, placed):
            return there
        case _:
            raise RootError(f"the packages {owner} and {other} both hold `/{placed.path}`, and not the same")


def _usual(entry: _Owned) -> bool:
    return (entry.mode, entry.uid, entry.gid) == (0o755, 0, 0)


def _equal(first: File, second: File) -> bool:
    facts = [(file.mode, file.uid, file.gid, file.content.size) for file in (first, second)]
    return facts[0] == facts[1] and b"".join(first.content.chunks()) == b"".join(second.content.chunks())
