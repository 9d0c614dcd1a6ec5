# ruff: noqa: PTH208
"""What lies in the store, of which kind, how large on the disk, and when it was last used.

Sizes are what the disk holds (blocks), and a file that has several names counts once: for a tree rather than for the
roots that share it, and for the tree used last when several share it. So evicting by last use, roots before their
trees, frees just what this says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envbuilder import parallel
from envbuilder.atomic import PREFIX
from envbuilder.oci.digest import Digest
from envbuilder.store.marks import blobs_of, known_files, leads_to, reach

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from envbuilder.store.store import Store

_MAGIC = (
    (b"PK\x03\x04", "wheel"),
    (b"!<arch>\n", "deb"),
    (b"{", "document"),
    (b"\x1f\x8b", "archive"),
    (b"\xfd7zXZ", "archive"),
    (b"BZh", "archive"),
)
_NAMED = ("blobs/sha256", "trees", "roots")
_KNOWN_KINDS = {"layer": "layer", "wheel": "wheel", "bytecode": "bytecode"}


@dataclass(frozen=True)
class Item:
    """A blob, tree or root: its kind, digest, where it lies, bytes on the disk, and when it was last used (seconds).

    Kinds of blobs: ``layer``, ``wheel``, ``deb``, ``document`` (manifests, configurations), ``bytecode``, ``archive``
    (source archives, and layers that nothing leads to any more), ``other``.
    """

    kind: str
    digest: Digest
    path: Path
    size: int
    used: float


@dataclass(frozen=True)
class Usage:
    """All that lies in the store. ``rest`` has the bytes of the other folders and files by name."""

    items: tuple[Item, ...]
    rest: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes on the disk."""
        return sum(item.size for item in self.items) + sum(self.rest.values())

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Return number and bytes of the items of each kind."""
        found: dict[str, tuple[int, int]] = {}
        for item in self.items:
            count, size = found.get(item.kind, (0, 0))
            found[item.kind] = (count + 1, size + item.size)
        return found


def usage(store: Store) -> Usage:
    """Look at everything in the store. What vanishes meanwhile is left out."""
    kinds = _kinds(store)
    seen: set[int] = set()
    items = [*_blobs(store, kinds), *_unpacked(store, seen)]
    rest = {}
    for entry in sorted(os.listdir(store.root)):
        if entry not in {"blobs", "trees", "roots"}:
            rest[entry] = _measure(store.root / entry, seen)
    # Last, so that what a root under way shares with trees counts for these.
    left = [path for folder in _NAMED for path in (store.root / folder).glob(f"{PREFIX}*")]
    rest["temporary"] = sum(_measure(path, seen) for path in left)
    return Usage(tuple(items), rest)


def _blobs(store: Store, kinds: Mapping[Digest, str]) -> Iterator[Item]:
    for path in named_by_digest(store.root / "blobs" / "sha256"):
        digest = Digest(path.name)
        try:
            status = path.stat()
            kind = _sniff(path)
            yield Item(
                kind if kind == "document" else kinds.get(digest, kind), digest, path, _size(status), status.st_mtime
            )
        except FileNotFoundError:
            continue


def _unpacked(store: Store, seen: set[int]) -> list[Item]:
    """Return trees and roots. A tree counts as used when a root that is made of it is."""
    roots = [Item("root", Digest(p.name), p, 0, _used(p)) for p in named_by_digest(store.root / "roots")]
    last: dict[Digest, float] = {}
    for root in roots:
        for layer in blobs_of(store, root.digest)[1]:
            last[layer.digest] = max(last.get(layer.digest, 0), root.used)
    trees = [
        Item("tree", Digest(path.name), path, 0, max(_used(path), last.get(Digest(path.name), 0)))
        for path in named_by_digest(store.root / "trees")
    ]
    trees.sort(key=lambda item: item.used, reverse=True)
    return [replace(item, size=_measure(item.path, seen)) for item in (*trees, *roots)]


def named_by_digest(folder: Path) -> list[Path]:
    """Return what is named by a digest in a folder, sorted; temporary and foreign names are left out."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    return [folder / name for name in names if len(name) == 64 and not set(name) - set("0123456789abcdef")]


def _kinds(store: Store) -> dict[Digest, str]:
    """Return the kinds of the blobs that images and knowledge lead to."""
    kinds = {}
    for path, document in known_files(store):
        digest = leads_to(document or {})
        if digest is not None and path.parent.name in _KNOWN_KINDS:
            kinds[digest] = _KNOWN_KINDS[path.parent.name]
    return kinds | dict.fromkeys(reach(store, store.images().values()), "layer")


def _sniff(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(8)
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "other")


def _measure(path: Path, seen: set[int]) -> int:
    """Return the bytes below a path; files with several names only when they are not in ``seen``, which is added to."""
    total = 0
    pending = [str(path)]
    while pending:
        parallel.checkpoint()
        current = pending.pop()
        try:
            total += _size(os.lstat(current))
            entries = os.scandir(current)
        except (FileNotFoundError, NotADirectoryError):
            continue
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if status.st_nlink == 1 or status.st_ino not in seen:
                    total += _size(status)
                if status.st_nlink > 1:
                    seen.add(status.st_ino)
    return total


def _size(status: os.stat_result) -> int:
    return status.st_blocks * 512


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
