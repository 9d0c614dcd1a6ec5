from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from envbuilder import http, parallel
from envbuilder.atomic import DiskFullError
from envbuilder.store.download import Source, download
from envbuilder.store.partial import WrongBytesError
from envbuilder.store.store import Store
from tests.engines import small_disk
from tests.indexes import serve
from tests.wheelmaker import make_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import requests

    from tests.indexes import IndexServer

BIG = make_wheel("big", files={"big.bin": os.urandom(3_000_000)})
OTHER = make_wheel("big", "2.0")

_PROGRAM = """
import sys
from pathlib import Path
from envbuilder import http
from envbuilder.oci.digest import Digest
from envbuilder.store.download import Source, download
from envbuilder.store.store import Store
root, url, digest, size = sys.argv[1:]
download(Source(url, Digest.parse(digest), int(size)), Store(Path(root)), http.new_session(), lambda _: None)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[IndexServer]:
    with serve(tmp_path / "index") as server:
        server.add(BIG, OTHER)
        yield server


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with http.new_session(retries=1, backoff=0.01) as session:
        yield session


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuilder.store.download._WAIT_SECONDS", 0.01)


def source_of(server: IndexServer, *, size: int | None = BIG.size) -> Source:
    return Source(server.url.replace("/simple/", f"/files/big/{BIG.file}"), BIG.digest, size)


def check(store: Store, counted: list[int]) -> None:
    assert store.read(BIG.digest) == BIG.data
    assert sum(counted) == BIG.size
    assert list((store.root / "partial").iterdir()) == []


@pytest.mark.parametrize("size", [BIG.size, None])
@pytest.mark.parametrize("ranges", [True, False])
def test_whole_file(server: IndexServer, store: Store, session: requests.Session, size: int | None, ranges: bool):  # noqa: FBT001
    server.ranges = ranges
    counted: list[int] = []
    download(source_of(server, size=size), store, session, counted.append)
    check(store, counted)
    assert store.blob(BIG.digest).stat().st_mode & 0o777 == 0o644
    counted.clear()
    download(source_of(server, size=size), store, session, counted.append)
    assert (counted, len(server.requests)) == ([BIG.size], 1)


@pytest.mark.parametrize("size", [BIG.size, None])
def test_what_broke_off_is_continued(server: IndexServer, store: Store, session: requests.Session, size: int | None):
    server.fail("*.whl", cut=1_000_000, times=2)
    counted: list[int] = []
    download(source_of(server, size=size), store, session, counted.append)
    check(store, counted)
    first, second, third = [int((request.range or "bytes=0-")[6:-1]) for request in server.requests]
    assert first == 0
    assert 1_000_000 - http.CHUNK <= second <= 1_000_000
    assert second + 1_000_000 - http.CHUNK <= third <= second + 1_000_000


def test_reset_connection_is_continued(server: IndexServer, store: Store, session: requests.Session):
    server.fail("*.whl", cut=1_000_000, reset=True, times=2)
    counted: list[int] = []
    download(source_of(server), store, session, counted.append)
    check(store, counted)


def test_what_broke_off_starts_again_where_there_are_no_ranges(
    server: IndexServer, store: Store, session: requests.Session
):
    server.ranges = False
    server.fail("*.whl", cut=1_000_000, times=2)
    counted: list[int] = []
    download(source_of(server), store, session, counted.append)
    check(store, counted)


@pytest.mark.parametrize("size", [BIG.size, None])
@pytest.mark.parametrize("left", [1, 2_000_000, BIG.size])
def test_what_an_earlier_run_left_is_continued(
    server: IndexServer, store: Store, session: requests.Session, left: int, size: int | None
):
    store.partial(BIG.digest).write_bytes(BIG.data[:left])
    counted: list[int] = []
    download(source_of(server, size=size), store, session, counted.append)
    check(store, counted)
    whole_and_known = left == BIG.size and size is not None
    assert [request.range for request in server.requests] == ([] if whole_and_known else [f"bytes={left}-"])


@pytest.mark.parametrize("left", [b"nonsense", bytes(BIG.size), bytes(BIG.size + 1)])
@pytest.mark.parametrize("size", [BIG.size, None])
def test_what_an_earlier_run_left_is_worthless(
    server: IndexServer, store: Store, session: requests.Session, left: bytes, size: int | None
):
    store.partial(BIG.digest).write_bytes(left)
    counted: list[int] = []
    download(source_of(server, size=size), store, session, counted.append)
    check(store, counted)


def test_wrong_bytes_are_not_kept(server: IndexServer, store: Store, session: requests.Session):
    server.fail("*.whl", corrupt=True)
    with pytest.raises(WrongBytesError, match=f"has sha256:.* instead of {BIG.digest}") as caught:
        download(source_of(server), store, session, lambda _: None)
    assert BIG.file in str(caught.value)
    assert not store.has(BIG.digest)
    assert list((store.root / "partial").iterdir()) == []


@pytest.mark.parametrize("left", [0, 1000])
def test_another_size_is_refused_before_the_bytes_come(
    server: IndexServer, store: Store, session: requests.Session, left: int
):
    store.partial(BIG.digest).write_bytes(BIG.data[:left])
    with pytest.raises(WrongBytesError, match=rf"has {BIG.size} instead of 2000000 bytes"):
        download(source_of(server, size=2_000_000), store, session, lambda _: None)
    assert list((store.root / "partial").iterdir()) == []


def test_server_that_never_gets_further(server: IndexServer, store: Store, session: requests.Session):
    server.fail("*.whl", cut=1_000_000, times=1)
    server.fail("*.whl", cut=0)
    with pytest.raises(http.BrokenOffError) as caught:
        download(source_of(server), store, session, lambda _: None)
    assert caught.value.exit_code == 3
    assert store.partial(BIG.digest).stat().st_size >= 1_000_000 - http.CHUNK


def test_threads_and_processes_at_once(server: IndexServer, store: Store, session: requests.Session):
    server.fail("*.whl", slow=0.003)
    source = source_of(server)
    words = [sys.executable, "-c", _PROGRAM, str(store.root), source.url, str(source.digest), str(source.size)]
    with subprocess.Popen(words) as first, subprocess.Popen(words) as second:
        parallel.run_all(lambda _: download(source, store, session, lambda _: None), range(4), workers=4)
    assert (first.returncode, second.returncode) == (0, 0)
    assert store.read(BIG.digest) == BIG.data
    assert len(server.paths("*.whl")) == 1


def test_killed_in_the_middle(server: IndexServer, store: Store, session: requests.Session):
    fault = server.fail("*.whl", slow=0.02)
    source = source_of(server)
    words = [sys.executable, "-c", _PROGRAM, str(store.root), source.url, str(source.digest), str(source.size)]
    partial = store.partial(BIG.digest)
    with subprocess.Popen(words) as process:
        while not (partial.exists() and partial.stat().st_size > 500_000):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    server.faults.remove(fault)
    counted: list[int] = []
    download(source, store, session, counted.append)
    check(store, counted)
    assert server.requests[-1].range != "bytes=0-"


def test_error_elsewhere_stops_it(server: IndexServer, store: Store, session: requests.Session):
    server.fail("*.whl", slow=0.05)

    def job(number: int) -> None:
        if number == 0:
            time.sleep(0.1)
            message = "elsewhere"
            raise ValueError(message)
        download(source_of(server), store, session, lambda _: None)

    begin = time.monotonic()
    with pytest.raises(ValueError, match="elsewhere"):
        parallel.run_all(job, [0, 1], workers=2)
    assert time.monotonic() - begin < 1.5
    assert 0 < store.partial(BIG.digest).stat().st_size < BIG.size


def test_full_disk(server: IndexServer, session: requests.Session, tmp_path: Path):
    small = tmp_path / "small"
    with small_disk(small, "1m"):
        store = Store(small / "store")
        kept = store.put(b"what was there")
        with pytest.raises(DiskFullError, match="no space left"):
            download(source_of(server), store, session, lambda _: None)
        assert store.read(kept) == b"what was there"
        assert not store.has(BIG.digest)
        store.close()
