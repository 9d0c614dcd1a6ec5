"""Collect what is worthless, and evict what was not used for longest until the store keeps to a budget.

``make_plan`` looks, which takes as long as counting the unpacked files; ``carry_out`` closes the gate (see
``leases``), looks once more at everything that may have changed, moves what goes into ``trash/``, opens the gate, and
only then deletes.

Worthless is: what is temporary and of a process that is gone, a download that nobody continued for a week, knowledge
whose blob is gone, trees and roots of images that nothing refers to, locks nobody holds, what an earlier collection
did not get to delete. With a budget there go, least recently used first: roots and trees, and blobs that no image and
no pin leads to (layers, wheels, Debian packages, bytecode: all of them can be had again). Then, only when asked for,
whole images. Pins and leases are always respected.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from envbuilder import parallel
from envbuilder.atomic import PREFIX, remove_tree
from envbuilder.oci.digest import Digest
from envbuilder.store.leases import gate, live_leases
from envbuilder.store.marks import is_broken, known_files, reach, read_document
from envbuilder.store.pins import pinned
from envbuilder.store.usage import named_by_digest, usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from envbuilder.store.leases import Lease
    from envbuilder.store.store import Store
    from envbuilder.store.usage import Item, Usage

_DAY = 24 * 3600
#: A download that nobody went on with for so long is worth nothing any more.
_PARTIAL_AGE = 7 * _DAY
#: What is temporary beside live leases may be theirs, unless it is as old as this.
_TEMPORARY_AGE = 2 * _DAY
#: What was used so short a while ago is not evicted, for the sake of versions of the tool that know no leases.
YOUNG = 600


_OWN_LOCKS = ("gc", "index")


class Reason(Enum):
    """Why something goes."""

    TEMPORARY = "left over by a process that is gone"
    TRASH = "left over by an earlier collection"
    PARTIAL = "a download that nobody continues"
    BROKEN = "knowledge of a blob that is gone"
    ORPHAN = "unpacked from an image that is gone"
    LOCK = "a lock that nobody holds"
    BUDGET = "evicted to keep to the budget"


@dataclass(frozen=True)
class Doomed:
    """Something that goes: where it lies, what it is, bytes on the disk, why; its mtime in ns when that was decided."""

    path: Path
    kind: str
    size: int
    reason: Reason
    mtime: int


@dataclass(frozen=True)
class Plan:
    """What a collection would do: ``total`` bytes now, ``images`` that lose their names, and what goes."""

    budget: int | None
    total: int
    images: tuple[str, ...]
    doomed: tuple[Doomed, ...]

    @property
    def size(self) -> int:
        """The bytes that go."""
        return sum(doomed.size for doomed in self.doomed)


@dataclass(frozen=True)
class Collected:
    """What a collection did. ``left`` is what is left, in bytes; it may be over the budget."""

    images: tuple[str, ...]
    removed: tuple[Doomed, ...]
    left: int


@dataclass(frozen=True)
class _Footing:
    """What must stay: blobs (``kept``) and what is unpacked (``busy``), and whether others are at work."""

    leased: frozenset[Digest]
    pinned: frozenset[Digest]
    kept: frozenset[Digest]
    busy: frozenset[Digest]
    others: bool


def make_plan(store: Store, budget: int | None = None, *, images: bool = False, young: float = YOUNG) -> Plan:
    """Return what there is to collect; nothing is changed. ``budget`` is in bytes on the disk, None for no limit.

    With ``images`` also images go when the budget cannot be kept otherwise. What was used within the last ``young``
    seconds is not evicted.

    Raises:
        GateError: nothing can be removed safely on this file system.
        StoreDamagedError: index or pins cannot be read, so that it is not known what must stay.

    """
    own = store.held.path  # now: behind a closed gate no lease begins
    store.held.step_aside()
    with gate(store.root, closed=True):
        footing = _footing(store, live_leases(store.root, but=own))
    found = usage(store)
    doomed = list(_worthless(store, footing, found))
    left = found.total - sum(entry.size for entry in doomed)
    dropped: tuple[str, ...] = ()
    if budget is not None:
        gone = {entry.path for entry in doomed}
        items = [item for item in found.items if item.path not in gone]
        dropped, evicted = _evict(store, footing, items, left - budget, images=images, before=time.time() - young)
        doomed += evicted
    doomed += _broken(store, {Digest(entry.path.name) for entry in doomed if entry.kind not in _NOT_BLOBS})
    return Plan(budget, found.total, dropped, tuple(doomed))


def carry_out(store: Store, plan: Plan) -> Collected:
    """Remove what a plan names, as far as it is still as it was and nobody has come to rely on it."""
    trash, own = store.root / "trash", store.held.path
    store.held.step_aside()
    trash.mkdir(exist_ok=True)
    with store.lock(_OWN_LOCKS[0]):
        with store.lock(_OWN_LOCKS[1]), gate(store.root, closed=True):
            leases = live_leases(store.root, but=own)
            images = _drop_images(store, plan.images, _footing(store, leases))
            footing = _footing(store, leases)
            removed = [entry for entry in plan.doomed if _remove(entry, store, footing, trash)]
        for path in sorted(trash.iterdir()):
            parallel.checkpoint()
            _delete(path)
    return Collected(images, tuple(removed), plan.total - sum(entry.size for entry in removed))


_NOT_BLOBS = {"root", "tree", "temporary", "partial", "known", "lock", "trash"}


def _footing(store: Store, leases: Iterable[Lease]) -> _Footing:
    """Return what must stay. The leases were read before, the references are read now: see ``leases``."""
    leases = list(leases)
    own = store.held.digests
    leased = frozenset(own.union(*(lease.digests for lease in leases)))
    pins = frozenset(pinned(store))
    busy = reach(store, pins | leased)
    kept = busy | reach(store, store.images().values())
    return _Footing(leased, pins, frozenset(kept), frozenset(busy), bool(leases))


# -- what is worthless ----------------------------------------------------------------------------------------


def _worthless(store: Store, footing: _Footing, found: Usage) -> Iterator[Doomed]:
    root = store.root
    for pattern in (f"{PREFIX}*", f"*/{PREFIX}*", f"known/*/{PREFIX}*", f"blobs/sha256/{PREFIX}*", f"apt/*/{PREFIX}*"):
        yield from _entries(root.glob(pattern), "temporary", Reason.TEMPORARY, lambda s: _is_left_over(s, footing))
    yield from _entries(root.glob("trash/*"), "trash", Reason.TRASH)
    partial = named_by_digest(root / "partial")
    yield from _entries(partial, "partial", Reason.PARTIAL, lambda s: _age(s) > _PARTIAL_AGE)
    if not footing.others:
        own = {root / "locks" / f"{name}.lock" for name in _OWN_LOCKS}
        yield from _entries(set(root.glob("locks/*.lock")) - own, "lock", Reason.LOCK)
    for item in found.items:
        if item.kind in {"tree", "root"} and item.digest not in footing.kept:
            yield from _of_item(item, Reason.ORPHAN)


def _entries(
    paths: Iterable[Path], kind: str, reason: Reason, wanted: Callable[[os.stat_result], bool] = lambda _: True
) -> Iterator[Doomed]:
    for path in sorted(paths):
        with suppress(FileNotFoundError):
            status = path.lstat()
            if wanted(status):
                yield Doomed(path, kind, _size_below(path), reason, status.st_mtime_ns)


def _broken(store: Store, gone: set[Digest]) -> Iterator[Doomed]:
    """Yield what is known of blobs that are gone, or will be, and what cannot be read."""
    for path, document in known_files(store):
        if is_broken(store, document, gone):
            yield from _entries([path], "known", Reason.BROKEN)


def _is_left_over(status: os.stat_result, footing: _Footing) -> bool:
    return not footing.others or _age(status) > _TEMPORARY_AGE


def _age(status: os.stat_result) -> float:
    """Return the age in seconds; what is from the future is as young as can be."""
    return max(0.0, time.time() - status.st_mtime)


# -- eviction -------------------------------------------------------------------------------------------------


def _evict(
    store: Store, footing: _Footing, items: list[Item], excess: int, *, images: bool, before: float
) -> tuple[tuple[str, ...], list[Doomed]]:
    """Return the images to drop and the items to evict so that ``excess`` bytes go, if there are so many."""
    dropped: list[str] = []
    doomed: list[Doomed] = []
    # A root before the trees that it shares its files with, which count as used when it was.
    order = sorted(items, key=lambda item: (item.used, item.kind != "root", item.digest))
    candidates = [item for item in order if item.used < before]

    def take(kept: Iterable[Digest], busy: Iterable[Digest]) -> None:
        nonlocal excess, candidates
        rest = []
        for item in candidates:
            stays = item.digest in (busy if item.kind in {"tree", "root"} else kept)
            if excess > 0 and not stays:
                doomed.extend(_of_item(item, Reason.BUDGET))
                excess -= item.size
            else:
                rest.append(item)
        candidates = rest

    take(footing.kept, footing.busy)
    if images and excess > 0:
        for name in _by_last_use(store, items, footing, before):
            dropped.append(name)
            others = [digest for other, digest in store.images().items() if other not in dropped]
            take(footing.busy | reach(store, others), footing.busy)
            if excess <= 0:
                break
    return tuple(dropped), doomed


def _by_last_use(store: Store, items: Iterable[Item], footing: _Footing, before: float) -> list[str]:
    """Return the names of the images that may go, the one not used for longest first."""
    used = {item.digest: item.used for item in items}
    free = {name: d for name, d in store.images().items() if d not in footing.busy and used.get(d, 0) < before}
    return sorted(free, key=lambda name: (used.get(free[name], 0), name))


def _of_item(item: Item, reason: Reason) -> Iterator[Doomed]:
    with suppress(FileNotFoundError):
        yield Doomed(item.path, item.kind, item.size, reason, item.path.lstat().st_mtime_ns)


# -- carrying it out ------------------------------------------------------------------------------------------


def _drop_images(store: Store, names: Iterable[str], footing: _Footing) -> tuple[str, ...]:
    images = store.images()
    dropped = [name for name in names if name in images and images[name] not in footing.busy]
    store.drop_locked(dropped)
    return tuple(dropped)


def _remove(doomed: Doomed, store: Store, footing: _Footing, trash: Path) -> bool:
    """Move something into the trash, if it may still go; return whether it did. The gate is closed."""
    try:
        status = doomed.path.lstat()
        if doomed.reason is not Reason.TRASH:
            if not _may_go(doomed, status, store, footing):
                return False
            doomed.path.rename(trash / f"{os.urandom(8).hex()}-{doomed.path.name}")
    except FileNotFoundError:
        return False
    return True


def _may_go(doomed: Doomed, status: os.stat_result, store: Store, footing: _Footing) -> bool:
    if doomed.reason is Reason.BROKEN:
        return is_broken(store, read_document(doomed.path))
    if status.st_mtime_ns != doomed.mtime:
        return False  # used, or made anew, since the plan was made
    match doomed.reason:
        case Reason.TEMPORARY:
            return _is_left_over(status, footing)
        case Reason.LOCK:
            return not footing.others and _is_free(doomed.path)
        case Reason.PARTIAL:
            return _is_free(doomed.path)
        case _:
            unpacked = doomed.kind in {"tree", "root"} and doomed.reason is Reason.BUDGET
            return Digest(doomed.path.name) not in (footing.busy if unpacked else footing.kept)


def _is_free(path: Path) -> bool:
    """Return whether nobody has locked a file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def _size_below(path: Path) -> int:
    """Return the bytes that go with a file or a folder: those of files that have no other name."""
    size = path.lstat().st_blocks * 512
    if path.is_dir() and not path.is_symlink():
        found = (os.lstat(f"{folder}/{name}") for folder, _, names in os.walk(path) for name in names)
        size += sum(status.st_blocks * 512 for status in found if status.st_nlink == 1)
    return size
