"""Layers from a registry into the store: several at once, verified while they come, unpacked meanwhile.

A layer has two threads: one receives it, the other unpacks what is there already. Having it so takes the longer of the
two times and not their sum. The heaviest come first, so that the last to end is a small one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.images.ranges import connections_for, read_ranges
from envbuilder.oci.model import TOC_DIGEST
from envbuilder.oci.toc import LARGEST, table_start
from envbuilder.store.arriving import Arriving
from envbuilder.store.partial import Partial, WrongBytesError, open_partial
from envbuilder.store.unpack import unpack_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Descriptor
    from envbuilder.registry.client import Repository
    from envbuilder.store.store import Store

#: The connections that the layers share which come at the same time: about as many as other tools open.
CONNECTIONS = 6
#: A smaller layer is unpacked when it is there: threads and further requests would take longer than it does.
_SMALL = 4 << 20
#: So much of a layer's end is asked for first when it has a table of contents, by which several cores inflate it.
_TAIL = 1 << 18


@dataclass(frozen=True)
class Wanted:
    """A layer that is wanted, by its descriptor, and the diff id that it must have."""

    layer: Descriptor
    diff_id: Digest


class _StartedAgainError(Exception):
    """What was unpacked so far is of bytes that turned out to be worthless."""


def receive_all(wanted: Sequence[Wanted], repository: Repository, store: Store, *, unpack: bool) -> int:
    """Bring layers into the store, with ``unpack`` also as trees; return the bytes that came over the network.

    No more than a few layers come at once, each over several connections: unpacking takes all cores, and more layers
    than these would only have them change from one to the other.

    Raises: as ``images.pull.pull``.
    """
    order = sorted(wanted, key=lambda one: -one.layer.size)
    missing = [0 if store.has(one.layer.digest, one.layer.size) else one.layer.size for one in order]
    at_once = min(CONNECTIONS, parallel.cores() + 1)
    jobs = list(zip(order, connections_for(missing, CONNECTIONS, at_once), strict=True))
    with report.task(f"pulling from {repository.name}", sum(missing)) as task:
        receiver = _Receiver(repository, store, task, unpack=unpack)
        return sum(parallel.run_all(lambda job: receiver.bring(*job), jobs, workers=at_once))


class _Receiver:
    def __init__(self, repository: Repository, store: Store, task: report.Task, *, unpack: bool) -> None:
        self._repository = repository
        self._store = store
        self._task = task
        self._unpack = unpack

    def bring(self, wanted: Wanted, connections: int) -> int:
        """Bring one layer; return the bytes that came."""
        layer, received = wanted.layer, 0
        with open_partial(self._store, layer.digest, layer.size) as partial:
            if partial is not None:
                transfer = _Transfer(self._repository, layer, partial, connections)
                if self._unpack and layer.size > _SMALL:
                    self._unpack_meanwhile(transfer, wanted)
                else:
                    partial.complete(transfer.name, transfer.run, self._task.advance)
                received = transfer.received
        if self._unpack:
            unpack_layer(self._store, layer, wanted.diff_id)
        return received

    def _unpack_meanwhile(self, transfer: _Transfer, wanted: Wanted) -> None:
        partial = transfer.partial
        transfer.take_tail()
        with Arriving(partial.path, wanted.layer.size, transfer.tail) as blob:

            def on_bytes(count: int) -> None:
                self._task.advance(count)
                if count < 0:
                    blob.fail(_StartedAgainError())
                else:
                    blob.reach(partial.size)

            def receive() -> None:
                partial.complete(transfer.name, transfer.run, on_bytes)
                blob.finish()

            def unpack() -> None:
                try:
                    unpack_layer(self._store, wanted.layer, wanted.diff_id, arriving=blob)
                except _StartedAgainError:
                    report.detail(f"layer {wanted.layer.digest} is unpacked when it is whole")

            parallel.run_all(lambda job: job(), (receive, unpack), workers=2)


class _Transfer:
    """Adds to a partial blob what a repository has of it beyond that; ``received`` counts the bytes."""

    def __init__(self, repository: Repository, layer: Descriptor, partial: Partial, connections: int) -> None:
        self.name = f"{repository.name}: layer {layer.digest}"
        self.partial = partial
        self.received = 0
        self.tail = b""
        self._repository = repository
        self._layer = layer
        self._connections = connections

    def take_tail(self) -> None:
        """Fetch the end of the layer with its table of contents, if it has one."""
        size = self._layer.size
        if TOC_DIGEST not in self._layer.annotations or not self._repository.ranges:
            return
        self.tail = self._read(size - _TAIL, size)
        start = table_start(self.tail)
        if start is not None and size - LARGEST < start < size - _TAIL:
            self.tail = self._read(start, size - _TAIL) + self.tail

    def run(self) -> None:
        """Add what is missing.

        Raises:
            WrongBytesError: the repository has less or more than the layer's size.

        """
        size, partial = self._layer.size, self.partial
        stop = size - len(self.tail)
        if partial.size < stop:
            with read_ranges(self._repository, self._layer.digest, partial.size, stop, self._connections) as pieces:
                for piece in pieces:
                    parallel.checkpoint()
                    self.received += len(piece)
                    if partial.size + len(piece) > stop:
                        raise WrongBytesError(self.name, f"{size} bytes", "more")
                    partial.add(piece)
        if partial.size >= stop:
            partial.add(self.tail[partial.size - stop :])
        if partial.size < size:
            raise WrongBytesError(self.name, f"{size} bytes", str(partial.size))

    def _read(self, start: int, stop: int) -> bytes:
        with self._repository.read_blob(self._layer.digest, start, stop) as pieces:
            data = b"".join(pieces)
        self.received += len(data)
        return data
