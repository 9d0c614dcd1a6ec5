"""Look whether everything in the store is what it should be; move aside what is not, so that it is made again.

Every blob is read and hashed. A damaged one goes to ``quarantine/``, never away; knowledge that leads to it is dropped,
and so are the trees and roots that were unpacked from it, since nothing vouches for them any more. Images that miss
blobs are named. Trees are compared with their layers only on demand: then the layers are inflated and the content of
each file is compared, but neither modes nor owners, and no tree whose layer is not in the store. What is in use (a
lease names it) is only warned of: a running job would lose its files.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.atomic import remove_tree
from envbuilder.oci.digest import Digest
from envbuilder.store.compare import compare_tree
from envbuilder.store.leases import gate, live_leases
from envbuilder.store.marks import blobs_of, is_broken, known_files, reach
from envbuilder.store.pins import read_pins
from envbuilder.store.store import StoreDamagedError
from envbuilder.store.usage import named_by_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from envbuilder.store.store import Store

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Damage:
    """A file that was moved to ``quarantine``: what it was, and in what it differed."""

    name: str
    reason: str
    quarantine: Path


@dataclass(frozen=True)
class Incomplete:
    """An image some of whose blobs are not in the store (any more)."""

    name: str
    digest: Digest
    missing: tuple[Digest, ...]


@dataclass(frozen=True)
class Verified:
    """What came of it: blobs and bytes read, what was moved aside, what was dropped for it, and who misses something.

    ``forgotten`` counts knowledge of blobs that are gone, which is no damage; ``dropped`` are the digests of trees and
    roots; ``trees`` counts those that were compared, ``wrong`` names those that differ from their layers.
    """

    blobs: int
    size: int
    damaged: tuple[Damage, ...]
    forgotten: int
    dropped: tuple[Digest, ...]
    incomplete: tuple[Incomplete, ...]
    trees: int
    wrong: tuple[Digest, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.damaged or self.wrong or self.incomplete)


@dataclass(frozen=True)
class _Read:
    """A blob that was read: its size, its hash, and what tells whether the file is still the one that was read."""

    path: Path
    size: int
    actual: Digest
    stamp: tuple[int, int]


def verify(store: Store, *, trees: bool = False) -> Verified:
    """Hash all blobs, several at once, move damaged ones aside, and drop what was made of them.

    With ``trees`` unpacked layers are compared with their blobs.

    Raises:
        GateError: nothing can be moved safely on this file system.

    """
    store.held.step_aside()
    damaged = _unreadable(store)
    read, wrong = _look_at(store, named_by_digest(store.root / "blobs" / "sha256"))
    damaged += wrong
    gone = {Digest(damage.name) for damage in damaged if len(damage.name) == 64}
    compared, wrong_trees = _compare_trees(store) if trees else (0, ())
    dropped = drop_unpacked(store, gone.union(wrong_trees))
    forgotten = _forget(store)
    size = sum(blob.size for blob in read)
    return Verified(
        len(read), size, tuple(damaged), forgotten, dropped, incomplete(store), compared, tuple(wrong_trees)
    )


def verify_blobs(store: Store, digests: Iterable[Digest]) -> tuple[Damage, ...]:
    """Hash the blobs that are there of these, and move damaged ones aside, so that they are made or fetched anew.

    For who makes something of blobs that came in long ago, and is about to remember it as what these make.

    Raises:
        GateError: there is damage, but nothing can be moved safely on this file system.

    """
    wanted = dict.fromkeys(digests)
    store.protect(*wanted)
    return tuple(_look_at(store, [path for digest in wanted if (path := store.blob(digest)).exists()])[1])


def incomplete(store: Store) -> tuple[Incomplete, ...]:
    """Return the images some of whose blobs are absent, or not of the size that the manifest states."""
    found = []
    for name, digest in sorted(store.images().items()):
        missing = {other for other in reach(store, [digest]) if not store.blob(other).exists()}
        config, layers = blobs_of(store, digest)
        missing |= {blob.digest for blob in (*config, *layers) if _size(store.blob(blob.digest)) != blob.size}
        if missing:
            found.append(Incomplete(name, digest, tuple(sorted(missing))))
    return tuple(found)


def drop_unpacked(store: Store, layers: Iterable[Digest]) -> tuple[Digest, ...]:
    """Remove the trees of layers and the roots that were made of them, unless they are in use; return their digests."""
    wrong = set(layers)
    trees = [path for path in named_by_digest(store.root / "trees") if Digest(path.name) in wrong]
    roots = [
        path
        for path in named_by_digest(store.root / "roots")
        if Digest(path.name) in wrong  # without its manifest nobody knows what it was made of
        or wrong.intersection(layer.digest for layer in blobs_of(store, Digest(path.name))[1])
    ]
    moved = []
    (store.root / "trash").mkdir(exist_ok=True)
    own = store.held.path
    with gate(store.root, closed=True):
        leases = live_leases(store.root, but=own)
        busy = reach(store, frozenset().union(*(lease.digests for lease in leases)))
        for path in [*roots, *trees]:
            if Digest(path.name) in busy:
                report.warning(f"{path} is not to be trusted, but is in use; end the job and verify again")
                continue
            with suppress(FileNotFoundError):
                moved.append(path.rename(store.root / "trash" / f"{os.urandom(8).hex()}-{path.name}"))
    for path in moved:
        remove_tree(path)
    return tuple(Digest(path.name.rpartition("-")[2]) for path in moved)


def _look_at(store: Store, blobs: Sequence[Path]) -> tuple[list[_Read], list[Damage]]:
    """Hash blobs, several at once, and move damaged ones aside; return what was read, and the damage."""
    if not blobs:
        return [], []
    with report.task("verifying", sum(_size(path) for path in blobs)) as task:
        found = parallel.run_all(lambda path: _read(path, task), blobs, workers=parallel.cores())
    read = [blob for blob in found if blob is not None]
    wrong = [blob for blob in read if blob.actual.hex != blob.path.name]
    return read, [damage for blob in wrong if (damage := _set_aside(store, blob)) is not None]


def _unreadable(store: Store) -> list[Damage]:
    """Move the index and the pins aside when they cannot be read."""
    found = []
    for look in (store.images, lambda: read_pins(store)):
        try:
            look()
        except StoreDamagedError as error:
            found.append(_quarantine(store, error.path, error.reason))
    return found


def _read(path: Path, task: report.Task) -> _Read | None:
    """Hash a blob past the kernel's note of when it was last read; None when it is gone."""
    hashed, size = sha256(), 0
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    with file:
        while data := file.read(_CHUNK):
            parallel.checkpoint()
            hashed.update(data)
            size += len(data)
            task.advance(len(data))
        return _Read(path, size, Digest(hashed.hexdigest()), _stamp(os.fstat(file.fileno())))


def _set_aside(store: Store, blob: _Read) -> Damage | None:
    """Move a damaged blob to the quarantine, unless it was made anew since it was read."""
    with gate(store.root, closed=True):
        try:
            if _stamp(blob.path.stat()) != blob.stamp:
                return None
        except FileNotFoundError:
            return None
        return _quarantine(store, blob.path, f"its content has digest {blob.actual} ({blob.size} bytes)")


def _quarantine(store: Store, path: Path, reason: str) -> Damage:
    folder = store.root / "quarantine"
    folder.mkdir(exist_ok=True)
    target = folder / f"{path.name}-{time.time_ns()}"
    path.rename(target)
    report.warning(f"{path.name} is damaged: {reason}; it was moved to {target}")
    return Damage(path.name, reason, target)


def _compare_trees(store: Store) -> tuple[int, tuple[Digest, ...]]:
    """Return how many trees were compared with their layers, and those that differ."""
    trees = [Digest(path.name) for path in named_by_digest(store.root / "trees")]
    sizes = {layer: size for layer in trees if (size := _size(store.blob(layer))) >= 0}

    def compare(layer: Digest) -> Digest | None:
        difference = compare_tree(store, layer)
        task.advance(sizes[layer])
        if difference is not None:
            report.warning(f"the unpacked layer {layer} is damaged: {difference}")
        return layer if difference is not None else None

    with report.task("comparing trees", sum(sizes.values())) as task:
        found = parallel.run_all(compare, sizes, workers=parallel.cores())
    return len(sizes), tuple(layer for layer in found if layer is not None)


def _forget(store: Store) -> int:
    """Remove what is known of blobs that are gone, and what cannot be read; return how many."""
    count = 0
    with gate(store.root, closed=True):
        for path, document in known_files(store):
            if is_broken(store, document):
                path.unlink(missing_ok=True)
                count += 1
    return count


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
