from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from envbuilder import http, report
from envbuilder.lock.indexconfig import Indexes
from envbuilder.lock.model import Package
from envbuilder.spec.environment import NamedIndex
from envbuilder.store.partial import WrongBytesError
from envbuilder.store.store import Store
from envbuilder.wheels.fetch import FetchInterruptedError, FileNotOnIndexError, NoRoomError, fetch, missing
from tests.indexes import serve
from tests.wheelmaker import make_sdist, make_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.indexes import IndexServer
    from tests.wheelmaker import Made

SMALL = [make_wheel(f"small-{letter}") for letter in "abcdef"]
BIG = make_wheel("big", files={"big.bin": os.urandom(1_000_000)})
SOURCE = make_sdist("source")
ALL = [*SMALL, BIG, SOURCE]


def locked(made: Made, *, index: str | None = None) -> Package:
    name, version = made.file.removesuffix(".tar.gz").split("-")[:2]
    return Package(name.replace("_", "-"), version, made.file, made.digest, made.size, (), index=index)


PACKAGES = [locked(made) for made in ALL]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[IndexServer]:
    with serve(tmp_path / "index") as server:
        server.add(*ALL)
        yield server


@pytest.fixture
def indexes(server: IndexServer) -> Iterator[Indexes]:
    with http.new_session(retries=1, backoff=0.01) as session:
        yield Indexes(server.url, [], session)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


class Recorder:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.total: int | None = None
        self.done = 0

    def message(self, text: str, kind: report.Kind) -> None:
        if kind is not report.Kind.DETAIL:
            self.messages.append(text)

    def begin(self, label: str, total: int | None) -> Recorder:
        assert label == "fetching"
        self.total = total
        return self

    def advance(self, amount: int) -> None:
        self.done += amount

    def end(self, task: report.Task) -> None:
        pass


def test_everything_then_nothing(server: IndexServer, indexes: Indexes, store: Store):
    recorder = Recorder()
    with report.using(recorder):
        fetch(PACKAGES, store, indexes)
    for made in ALL:
        assert store.read(made.digest) == made.data
    assert recorder.messages == ["fetching 8 of 8 files (1.0 MB)"]
    assert recorder.done == recorder.total == sum(made.size for made in ALL)
    asked = len(server.requests)
    assert asked == 2 * len(ALL)
    fetch(PACKAGES, store, indexes)
    assert len(server.requests) == asked


def test_only_what_is_missing_is_asked_for(server: IndexServer, indexes: Indexes, store: Store):
    for made in ALL[1:]:
        store.put(made.data)
    fetch(PACKAGES, store, indexes)
    assert server.paths() == ["/simple/small-a/", f"/files/small-a/{SMALL[0].file}"]


def test_the_largest_come_first_and_each_file_once(store: Store):
    twice = [*PACKAGES, locked(BIG)]
    assert missing(twice, store)[0].file == BIG.file
    assert len(missing(twice, store)) == len(ALL)


def test_failures_on_the_way(server: IndexServer, indexes: Indexes, store: Store):
    server.fail("/simple/big/", status=503, times=1)
    server.fail("*big-1.0*", cut=300_000, times=1)
    server.fail("*big-1.0*", cut=300_000, reset=True, times=1)
    server.fail("*small_a*", status=429, retry_after="0", times=1)
    fetch(PACKAGES, store, indexes)
    assert missing(PACKAGES, store) == ()


def test_index_out_of_reach_in_the_middle(server: IndexServer, indexes: Indexes, store: Store):
    server.fail("*big-1.0*", cut=600_000, times=1)
    server.fail("*big-1.0*", status=503)
    for made in [*SMALL, SOURCE]:
        store.put(made.data)
    with pytest.raises(FetchInterruptedError, match=r"status 503; 1 file \(.* [kM]B\) still to be fetched") as caught:
        fetch(PACKAGES, store, indexes)
    assert caught.value.exit_code == 3
    assert BIG.size - 600_000 <= caught.value.size <= BIG.size - 600_000 + http.CHUNK
    assert caught.value.hint is not None
    assert "the downloads continue" in caught.value.hint
    server.faults.clear()
    fetch(PACKAGES, store, indexes)
    assert int((server.requests[-1].range or "bytes=0-")[6:-1]) >= 600_000 - http.CHUNK


def test_no_index_at_all(store: Store):
    with http.new_session(retries=0) as session, pytest.raises(FetchInterruptedError, match="8 files"):
        fetch(PACKAGES, store, Indexes("http://127.0.0.1:9/simple/", [], session))


def test_file_that_the_index_does_not_have(indexes: Indexes, store: Store):
    gone = replace(PACKAGES[0], file="small_a-0.9-py3-none-any.whl")
    with pytest.raises(FileNotOnIndexError, match=r"small_a-0\.9-py3-none-any\.whl is not on the index http://127"):
        fetch([gone], store, indexes)
    unknown = replace(PACKAGES[0], name="nobody", file="nobody-1.0-py3-none-any.whl")
    with pytest.raises(FileNotOnIndexError, match=r"`nobody` is not on the index .*; the lock needs nobody-1\.0"):
        fetch([unknown], store, indexes)


@pytest.mark.parametrize("hashes", [True, False])
def test_another_file_under_the_name(server: IndexServer, indexes: Indexes, store: Store, hashes: bool):  # noqa: FBT001
    server.hashes = hashes
    (server.folder / "big" / BIG.file).write_bytes(BIG.data[:-1] + b"?")
    with pytest.raises(WrongBytesError, match=f"{BIG.file}: has sha256:.* instead of {BIG.digest}") as caught:
        fetch(PACKAGES, store, indexes)
    assert caught.value.exit_code == 1
    assert server.url[:20] in str(caught.value)
    assert not store.has(BIG.digest)
    assert not store.partial(BIG.digest).exists()


def test_error_of_a_download_ends_the_lookups(server: IndexServer, indexes: Indexes, store: Store):
    many = [make_wheel(f"more-{number}") for number in range(60)]
    server.add(*many)
    server.hashes = False
    (server.folder / "big" / BIG.file).write_bytes(BIG.data[:-1] + b"?")
    server.fail("/simple/[ms]*", slow=0.3)
    with pytest.raises(WrongBytesError):
        fetch([locked(BIG), *(locked(made) for made in many)], store, indexes)
    assert len(server.paths("/simple/*")) < 60


def test_another_size_is_refused_on_the_page(server: IndexServer, indexes: Indexes, store: Store):
    with pytest.raises(WrongBytesError, match=f"has {BIG.size} instead of 5 bytes"):
        fetch([replace(locked(BIG), size=5)], store, indexes)
    assert server.paths("/files/*") == []


def test_html_index_with_credentials(server: IndexServer, store: Store):
    server.json, server.credentials = False, ("user", "secret")
    with http.new_session() as session:
        fetch(PACKAGES, store, Indexes(server.url_with_credentials, [], session))
        assert missing(PACKAGES, store) == ()
        others = Indexes(server.url_with_credentials.replace("secret", "hidden"), [], session)
        with pytest.raises(FetchInterruptedError, match="refuses access") as caught:
            fetch([locked(make_wheel("new"))], store, others)
    assert "hidden" not in f"{caught.value}{caught.value.hint}"


def test_named_index_serves_its_packages_alone(server: IndexServer, store: Store, tmp_path: Path):
    extra = make_wheel("extra")
    with serve(tmp_path / "named") as other, http.new_session() as session:
        other.add(extra)
        named = [NamedIndex("other", other.url, ("extra",))]
        fetch([PACKAGES[0], locked(extra, index="other")], store, Indexes(server.url, named, session))
        assert other.paths("/simple/*") == ["/simple/extra/"]
        assert server.paths("/simple/*") == ["/simple/small-a/"]
    assert store.has(extra.digest)


def test_folder_as_the_index(server: IndexServer, store: Store):
    with http.new_session() as session:
        fetch(PACKAGES, store, Indexes(server.folder.as_uri(), [], session))
    assert missing(PACKAGES, store) == ()
    assert server.requests == []


def test_no_room_is_told_before_anything_is_fetched(server: IndexServer, indexes: Indexes, store: Store):
    with pytest.raises(NoRoomError, match=r"1000000\.0 GB are to be fetched, but only .* free"):
        fetch([replace(locked(BIG), size=10**15)], store, indexes)
    assert server.requests == []
