from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.registry.client import open_repository
from envbuilder.registry.errors import (
    NotInRegistryError,
    RegistryUnreachableError,
    RejectedError,
    WrongAnswerError,
)
from envbuilder.registry.reference import Reference
from envbuilder.registry.upload import UnreadableBlobError
from tests.registries import fake_registry, quick_retries
from tests.registry.fakeserver import RegistryHandler

if TYPE_CHECKING:
    from envbuilder.registry.client import Repository
    from tests.registries import FakeRegistry, Fault

#: The clients of these tests send chunks of 1000 bytes, above 1500.
SMALL = bytes(range(256)) * 4
BIG = bytes(range(251)) * 19


def there(registry: FakeRegistry) -> Repository:
    return open_repository(Reference.parse(f"{registry.address}/team/app"), push=True)


def put(registry: FakeRegistry, data: bytes = BIG, repository: Repository | None = None) -> list[int]:
    """Upload, check what is there, and return what progress was told."""
    sent: list[int] = []
    (repository or there(registry)).put_blob(Digest.of(data), len(data), lambda: io.BytesIO(data), sent.append)
    assert registry.blobs["team/app"][str(Digest.of(data))] == data
    assert sum(sent) == len(data)
    return sent


def methods(registry: FakeRegistry) -> str:
    return " ".join(line.split()[0] for line in registry.lines("*/uploads/*"))


def test_in_one_piece(registry: FakeRegistry):
    put(registry, SMALL)
    assert methods(registry) == "POST PUT"
    put(registry, b"")


def test_in_chunks(registry: FakeRegistry):
    put(registry)
    assert methods(registry) == "POST PATCH PATCH PATCH PATCH PATCH PUT"
    ranges = [r.headers["content-range"] for r in registry.requests if r.method == "PATCH"]
    assert ranges == ["0-999", "1000-1999", "2000-2999", "3000-3999", "4000-4768"]


def test_locations_keep_their_own_query(registry: FakeRegistry):
    registry.absolute = True
    put(registry)
    assert registry.requests[-1].query == f"_state=hush-4769&digest={Digest.of(BIG)}"


def test_least_size_of_chunks(registry: FakeRegistry):
    registry.chunk_least = 4000
    put(registry)
    assert methods(registry) == "POST PATCH PATCH PUT"


def test_registry_without_chunks(registry: FakeRegistry):
    registry.chunks = False
    put(registry)
    assert methods(registry) == "POST PATCH POST PUT"


@pytest.mark.parametrize("take", [0, 1, 2, 400, 999])
@pytest.mark.parametrize("after", [0, 3])
def test_connection_breaks_in_a_chunk(registry: FakeRegistry, take: int, after: int):
    registry.fail("PATCH *", take=take, after=after, times=1)
    put(registry)
    assert "PATCH GET PATCH" in methods(registry)
    resumed = next(n for n, r in enumerate(registry.requests) if r.method == "GET" and "/uploads/" in r.path)
    start = int(registry.requests[resumed + 1].headers["content-range"].split("-")[0])
    assert start in {after * 1000 + take, after * 1000 if take < 2 else -1}  # "0-0" says too little


def test_answer_to_a_chunk_is_lost(registry: FakeRegistry):
    registry.fail("PATCH *", cut=-1, reset=True, after=1, times=1)
    put(registry)
    assert methods(registry) == "POST PATCH PATCH GET PATCH PATCH PATCH PUT"


def test_answer_to_the_last_request_is_lost(registry: FakeRegistry):
    registry.fail("PUT *", cut=-1, reset=True, times=1)
    put(registry)
    assert methods(registry) == "POST PATCH PATCH PATCH PATCH PATCH PUT PUT"
    registry.requests.clear()
    registry.fail("PUT *", cut=-1, times=1)
    put(registry, SMALL)


def test_a_chunk_out_of_order(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch):
    """A proxy that repeated a request, say, has sent bytes to our session."""
    patch, calls = RegistryHandler._patch, []

    def ahead(handler: RegistryHandler, name: str, session: str, arrived: bytearray, fault: Fault) -> None:
        calls.append(session)
        if len(calls) == 2:
            arrived += BIG[1000:1500]
        patch(handler, name, session, arrived, fault)

    monkeypatch.setattr(RegistryHandler, "_patch", ahead)
    put(registry)
    ranges = [r.headers["content-range"] for r in registry.requests if r.method == "PATCH"]
    assert ranges == ["0-999", "1000-1999", "1500-2499", "2500-3499", "3500-4499", "4500-4768"]


@pytest.mark.parametrize("line", ["PATCH *", "PUT *"])
def test_upload_session_is_lost(registry: FakeRegistry, line: str):
    sent: list[int] = []

    def progress(amount: int) -> None:
        sent.append(amount)
        if sum(sent) == (2000 if line == "PATCH *" else len(BIG)) and all(a > 0 for a in sent):
            registry.lose_uploads()

    there(registry).put_blob(Digest.of(BIG), len(BIG), lambda: io.BytesIO(BIG), progress)
    assert registry.blobs["team/app"][str(Digest.of(BIG))] == BIG
    assert sum(sent) == len(BIG)
    assert min(sent) < 0
    assert methods(registry).count("POST") == 2


def test_upload_session_that_is_lost_again_and_again(registry: FakeRegistry):
    registry.fail("PATCH *", status=404, code="BLOB_UPLOAD_UNKNOWN", after=0)
    with pytest.raises(NotInRegistryError, match="BLOB_UPLOAD_UNKNOWN"):
        put(registry)
    assert methods(registry).count("POST") == 5


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("line", ["POST *", "PATCH *", "PUT *", "GET */uploads/*"])
def test_what_is_temporary(registry: FakeRegistry, status: int, line: str):
    if line.startswith("GET"):
        registry.fail("PATCH *", take=10, times=1)
    registry.fail(line, status=status, times=2)
    put(registry)


def test_what_stays_temporary(registry: FakeRegistry):
    registry.fail("PATCH *", status=503, code="UNAVAILABLE", after=2)
    with pytest.raises(RegistryUnreachableError, match="status 503: UNAVAILABLE: told to fail") as caught:
        put(registry)
    assert (caught.value.exit_code, caught.value.code) == (3, "UNAVAILABLE")
    assert methods(registry).count("PATCH") == 2 + 5


def test_progress_between_failures_renews_patience(registry: FakeRegistry):
    for chunk in range(5):
        registry.fail("PATCH *", status=500, after=chunk, times=3)
    put(registry)


def test_retry_after_is_honoured(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch):
    waited: list[float | None] = []
    monkeypatch.setattr("envbuilder.registry.upload.pause", lambda _patience, _failures, asked: waited.append(asked))
    registry.fail("PATCH *", status=429, retry_after="7", times=1)
    registry.fail("PATCH *", status=503, retry_after="86400", times=1)
    registry.fail("PATCH *", status=503, retry_after="soon", times=1)
    put(registry)
    assert waited == [7, 60, None]


def test_connection_is_refused(monkeypatch: pytest.MonkeyPatch):
    quick_retries(monkeypatch, retries=1)
    with fake_registry() as gone:
        pass
    with pytest.raises(RegistryUnreachableError, match="the connection was refused") as caught:
        put(gone)
    assert caught.value.exit_code == 3


def test_bytes_that_are_not_those_of_the_digest(registry: FakeRegistry):
    for data in (SMALL, BIG):
        registry.requests.clear()
        with pytest.raises(RejectedError, match="DIGEST_INVALID") as caught:
            there(registry).put_blob(Digest.of(b"other"), len(data), partial(io.BytesIO, data), lambda _: None)
        assert caught.value.exit_code == 1
        assert methods(registry).count("POST") == 1
    assert registry.blobs == {}


def test_a_quota(registry: FakeRegistry):
    registry.fail("POST *", status=413, code="DENIED", message="quota exceeded")
    with pytest.raises(RejectedError, match=r"\(status 413\): DENIED: quota exceeded"):
        put(registry)
    assert methods(registry) == "POST"


class Failing(io.BytesIO):
    def read(self, _size: int | None = -1) -> bytes:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("source", [lambda: io.BytesIO(BIG[:1200]), Failing, lambda: open("/nowhere", "rb")])  # noqa: PTH123, SIM115 (as a caller writes it)
def test_source_that_fails(registry: FakeRegistry, source: Any):
    with pytest.raises(UnreadableBlobError, match=str(Digest.of(BIG))) as caught:
        there(registry).put_blob(Digest.of(BIG), len(BIG), source, lambda _: None)
    assert caught.value.exit_code == 4
    assert methods(registry).count("POST") == 1


def test_mount(registry: FakeRegistry):
    digest = registry.add_blob("other/app", BIG)
    assert there(registry).mount(digest, "other/app")
    assert registry.blobs["team/app"][str(digest)] == BIG


def test_what_is_not_mounted_goes_on_as_an_upload(registry: FakeRegistry):
    repository = there(registry)
    assert not repository.mount(Digest.of(BIG), "other/app")
    put(registry, BIG, repository)
    assert methods(registry).startswith("POST PATCH")
    registry.mounts = False
    registry.add_blob("other/app", SMALL)
    assert not repository.mount(Digest.of(SMALL), "other/app")
    registry.lose_uploads()
    put(registry, SMALL, repository)


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_mount_that_is_refused(registry: FakeRegistry, status: int):
    registry.fail("POST *", status=status, code="DENIED")
    assert not there(registry).mount(Digest.of(BIG), "other/app")


def test_many_threads(registry: FakeRegistry):
    repository = there(registry)
    registry.fail("PATCH *", take=300, after=3, times=1)
    registry.fail("PATCH *", status=503, after=9, times=2)
    blobs = [bytes([n]) * (1000 + 500 * n) for n in range(12)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: put(registry, data, repository), blobs))


@pytest.mark.parametrize("location", ["", "ftp://127.0.0.1/x", "http://[x"])
def test_location_that_leads_nowhere(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, location: str):
    monkeypatch.setattr("tests.registry.fakeserver.RegistryHandler._session", lambda *_: {"Location": location})
    with pytest.raises(WrongAnswerError, match=r"does not say where|not secure|malformed"):
        put(registry)
