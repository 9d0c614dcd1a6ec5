"""Layers that are unpacked while they arrive, by a writer that is slow, or fails, or is never heard of again."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import File
from envbuilder.oci.toc import table_start
from envbuilder.parallel import StoppedError, run_all
from envbuilder.store import inflate
from envbuilder.store.arriving import Arriving
from envbuilder.store.store import Store
from envbuilder.store.unpack import UnpackError, tree_of, unpack_layer
from tests.smallimage import put_layer
from tests.store.tars import member, put_gzip, put_parts, tar_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from envbuilder.oci.model import Layer


class LineWentDeadError(EnvbuilderError):
    """What the writers of these tests fail with."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "partial"
    path.touch()
    return path


def take_away(store: Store, layer: Layer) -> bytes:
    """Take a layer's blob out of the store, so that it can arrive."""
    data = store.read(layer.digest)
    store.blob(layer.digest).unlink()
    return data


def steps(data: bytes, step: int) -> Iterator[bytes]:
    for start in range(0, len(data), step):
        yield data[start : start + step]


def write(blob: Arriving, path: Path, pieces: Iterator[bytes], pause: float = 0) -> None:
    """Be the writer, up to but not including the last word."""
    reached = 0
    with path.open("ab", buffering=0) as file:
        for piece in pieces:
            reached += file.write(piece)
            blob.reach(reached)
            time.sleep(pause)


# -- reading --------------------------------------------------------------------------------------------------------


def test_readers_wait_for_what_they_ask_for(path: Path):
    data = random.Random(1).randbytes(100_000)  # noqa: S311
    with Arriving(path, len(data)) as blob, ThreadPoolExecutor(4) as pool:
        ranges = [(0, 10), (99_990, 100_000), (50_000, 50_001), (99_000, 200_000), (200_000, 300_000), (5, 5)]
        reads = [pool.submit(blob.read, *one) for one in ranges]
        streamed = pool.submit(lambda: blob.stream(7, 90_000).readall())
        write(blob, path, steps(data, 777))
        assert [read.result() for read in reads] == [data[slice(*one)] for one in ranges]
        assert streamed.result() == data[7:90_000]
        blob.finish()
        blob.wait_verified()


def test_the_tail_can_be_read_at_once(path: Path):
    with Arriving(path, 100, b"the end") as blob:
        assert blob.ends_from(93)
        assert not blob.ends_from(92)
        assert blob.read(93, 100) == b"the end"
        assert blob.read(95, 97) == b"e "
    with Arriving(path, 3, b"more than the blob") as blob:
        assert blob.read(0, 3) == b"lob"


def test_a_failed_writer_raises_in_every_reader(path: Path):
    with Arriving(path, 1000) as blob, ThreadPoolExecutor(3) as pool:
        waiting: list[Callable[[], object]] = [lambda: blob.read(0, 5), lambda: blob.wait(1000), blob.wait_verified]
        results = [pool.submit(one) for one in waiting]
        blob.fail(LineWentDeadError("the line went dead"))
        for result in results:
            with pytest.raises(LineWentDeadError):
                result.result()
        with pytest.raises(LineWentDeadError):
            blob.read(0, 0)


def test_a_reader_that_is_no_longer_wanted_stops(path: Path):
    unwanted = threading.Event()
    with Arriving(path, 1000) as blob, ThreadPoolExecutor(1) as pool:
        result = pool.submit(blob.read, 0, 5, unwanted)
        unwanted.set()
        with pytest.raises(StoppedError):
            result.result(5)


def test_what_has_arrived_may_be_renamed_and_removed(path: Path):
    path.write_bytes(b"0123456789")
    with Arriving.whole(path) as blob:
        path.rename(path.with_name("blob")).unlink()
        assert blob.read(2, 5) == b"234"
        assert blob.stream().readall() == b"0123456789"


def test_a_file_that_is_shorter_than_it_should_be(path: Path):
    path.write_bytes(b"0123456789")
    with Arriving(path, 20) as blob:
        blob.finish()
        with pytest.raises(EOFError, match="ends at byte 10 of 20"):
            blob.read(5, 15)


# -- unpacking ------------------------------------------------------------------------------------------------------


def large_layer(store: Store) -> Layer:
    choose = random.Random(2)  # noqa: S311
    return put_layer(store, [File(f"d/{n}", Bytes(choose.randbytes(60_000 * (n % 5)))) for n in range(40)])


def tail_of(data: bytes) -> bytes:
    start = table_start(data)
    assert start is not None
    return data[start:]


@pytest.mark.parametrize("with_tail", [True, False])
def test_unpacked_while_it_arrives(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch, *, with_tail: bool):
    monkeypatch.setattr(inflate, "_PART", 10_000)
    layer = large_layer(store)
    expected = {p.name: p.read_bytes() for p in unpack_layer(store, layer.descriptor, layer.diff_id).rglob("d/*")}
    other = Store(store.root / "other")
    data = take_away(store, layer)
    with Arriving(path, len(data), tail_of(data) if with_tail else b"") as blob, ThreadPoolExecutor(1) as pool:
        result = pool.submit(unpack_layer, other, layer.descriptor, layer.diff_id, arriving=blob)
        write(blob, path, steps(data, 100_000), 0.001)
        # The last file is written with the blob not yet verified: no tree has its name.
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and len(list((other.root / "trees").glob("*/d/*"))) < 40:
            time.sleep(0.02)
        time.sleep(0.1)
        assert not result.done()
        assert not tree_of(other, layer.descriptor).exists()
        blob.finish()
        assert result.result() == tree_of(other, layer.descriptor)
    assert {p.name: p.read_bytes() for p in tree_of(other, layer.descriptor).rglob("d/*")} == expected


@pytest.mark.parametrize("with_tail", [True, False])
@pytest.mark.parametrize("at", [0, 1000, 2_000_000, 4_500_000])
def test_nothing_is_kept_when_the_writer_fails(store: Store, path: Path, at: int, *, with_tail: bool):
    layer = large_layer(store)
    data = take_away(store, layer)
    with Arriving(path, len(data), tail_of(data) if with_tail else b"") as blob, ThreadPoolExecutor(1) as pool:
        result = pool.submit(unpack_layer, store, layer.descriptor, layer.diff_id, arriving=blob)
        write(blob, path, steps(data[:at], 100_000))
        blob.fail(LineWentDeadError("the line went dead"))
        with pytest.raises(LineWentDeadError):
            result.result()
    assert list((store.root / "trees").iterdir()) == []


@pytest.mark.parametrize("put", [put_gzip, put_parts])
def test_damage_on_the_way_is_for_the_writer_to_explain(store: Store, path: Path, put: Callable[[Store, bytes], Layer]):
    """What arrives damaged is not a damaged layer: that is said only of bytes that have the layer's digest."""
    layer = put(store, tar_of([member("../up")]))
    data = take_away(store, layer)
    with Arriving(path, len(data)) as blob, ThreadPoolExecutor(1) as pool:
        result = pool.submit(unpack_layer, store, layer.descriptor, layer.diff_id, arriving=blob)
        write(blob, path, steps(data, 100))
        time.sleep(0.2)
        assert not result.done()
        blob.fail(LineWentDeadError("it had another digest"))
        with pytest.raises(LineWentDeadError):
            result.result()
    path.write_bytes(b"")
    with Arriving(path, len(data)) as blob, ThreadPoolExecutor(1) as pool:
        result = pool.submit(unpack_layer, store, layer.descriptor, layer.diff_id, arriving=blob)
        write(blob, path, steps(data, 100))
        blob.finish()
        with pytest.raises(UnpackError, match="leads out"):
            result.result()
    assert list((store.root / "trees").iterdir()) == []


def test_a_writer_that_raises_stops_the_unpacking_beside_it(store: Store, path: Path):
    """The error of one job stops the other, even one that waits for bytes nobody will send."""
    layer = large_layer(store)
    data = take_away(store, layer)

    def receive() -> None:
        write(blob, path, steps(data[:300_000], 100_000))
        raise LineWentDeadError("and told nobody")

    def unpack() -> None:
        unpack_layer(store, layer.descriptor, layer.diff_id, arriving=blob)

    with Arriving(path, len(data), tail_of(data)) as blob:
        started = time.monotonic()
        with pytest.raises(LineWentDeadError):
            run_all(lambda job: job(), (receive, unpack), workers=2)
        assert time.monotonic() - started < 5
    assert list((store.root / "trees").glob("*")) == []
