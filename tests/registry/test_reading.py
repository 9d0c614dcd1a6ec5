from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.registry.client import open_repository
from envbuilder.registry.errors import NotInRegistryError, RegistryUnreachableError, WrongAnswerError
from envbuilder.registry.reference import Reference
from tests.registries import quick_retries

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.registry.client import Repository
    from tests.registries import FakeRegistry

BLOB = bytes(range(251)) * 1000
DIGEST = Digest.of(BLOB)


@pytest.fixture
def repository(registry: FakeRegistry) -> Repository:
    registry.add_blob("team/app", BLOB)
    return open_repository(Reference.parse(f"{registry.address}/team/app"))


def read(repository: Repository, start: int = 0, stop: int | None = None) -> bytes:
    with repository.read_blob(DIGEST, start, stop) as pieces:
        return b"".join(pieces)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("redirects", [True, False])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (0, 1), (0, 100_000), (1, None), (70_000, 70_001), (99, 200_000), (5, 5), (0, len(BLOB))]
)  # fmt: skip
def test_ranges(
    registry: FakeRegistry, repository: Repository, start: int, stop: int | None, *, ranges: bool, redirects: bool
):
    registry.ranges, registry.redirects = ranges, redirects
    assert read(repository, start, stop) == BLOB[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(0, None), (1000, 200_000)])
@pytest.mark.parametrize("reset", [True, False])
def test_it_goes_on_after_breaks(
    registry: FakeRegistry, repository: Repository, start: int, stop: int | None, *, reset: bool
):
    registry.fail("GET */blobs/*", cut=70_000, reset=reset, times=2)
    registry.fail("GET */blobs/*", status=503, times=2)
    registry.fail("GET */blobs/*", cut=0, reset=reset, times=3)
    assert read(repository, start, stop) == BLOB[start:stop]


def test_it_goes_on_after_breaks_without_ranges(registry: FakeRegistry, repository: Repository):
    registry.ranges = False
    registry.fail("GET */blobs/*", cut=70_000, times=1)
    registry.fail("GET */blobs/*", cut=140_000, times=1)
    assert read(repository, 10) == BLOB[10:]


def test_it_gives_up(registry: FakeRegistry, repository: Repository):
    registry.fail("GET */blobs/*", cut=70_000, times=1)
    registry.fail("GET */blobs/*", cut=0)
    pieces: list[bytes] = []
    with repository.read_blob(DIGEST) as stream, pytest.raises(RegistryUnreachableError, match="ended early"):
        pieces.extend(stream)
    assert b"".join(pieces) == BLOB[:70_000]
    assert len(registry.lines("GET */blobs/*")) == 1 + 5


def test_a_length_that_lies(registry: FakeRegistry, repository: Repository):
    registry.fail("GET */blobs/*", short=1000, times=1)
    assert read(repository, 0, len(BLOB)) == BLOB  # asked for again, from there on
    registry.fail("GET */blobs/*", short=1000, times=1)
    assert read(repository) == BLOB[:-1000]  # nobody said how much there is; the caller's digest tells
    registry.fail("GET */blobs/*", short=1000, times=1)
    with pytest.raises(WrongAnswerError, match="sends other bytes"):
        repository.blob(DIGEST)


def test_silence(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch):
    quick_retries(monkeypatch, read_seconds=0.1, retries=1)
    registry.add_blob("team/app", BLOB)
    repository = open_repository(Reference.parse(f"{registry.address}/team/app"))
    registry.fail("GET */blobs/*", slow=0.3, times=1)
    assert read(repository) == BLOB
    registry.fail("GET */blobs/*", slow=0.3)
    with pytest.raises(RegistryUnreachableError, match="timed out") as caught:
        read(repository)
    assert caught.value.exit_code == 3


def test_slow_drip(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch):
    quick_retries(monkeypatch, slow_seconds=0.05, retries=1)
    registry.add_blob("team/app", BLOB)
    repository = open_repository(Reference.parse(f"{registry.address}/team/app"))
    registry.fail("GET */blobs/*", drip=0.01, times=1)
    assert read(repository) == BLOB
    registry.fail("GET */blobs/*", drip=0.01)
    with pytest.raises(RegistryUnreachableError, match=r"only \d+ bytes came in"):
        read(repository)
    assert len(registry.lines("GET */blobs/*")) == 4


def test_a_slow_caller_is_no_slow_registry(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch):
    quick_retries(monkeypatch, slow_seconds=0.001)
    registry.add_blob("team/app", BLOB)
    arrived = bytearray()
    with open_repository(Reference.parse(f"{registry.address}/team/app")).read_blob(DIGEST) as pieces:
        for data in pieces:
            time.sleep(0.01)
            arrived += data
    assert arrived == BLOB


def test_beyond_its_end(repository: Repository):
    with pytest.raises(WrongAnswerError, match="has no byte"):
        read(repository, len(BLOB) + 10)
    assert read(repository, len(BLOB)) == b""
    with pytest.raises(WrongAnswerError, match=f"has no byte {len(BLOB)}"):
        read(repository, 0, len(BLOB) + 5)


def test_errors_come_while_iterating(repository: Repository):
    with repository.read_blob(Digest.of(b"other")) as pieces, pytest.raises(NotInRegistryError, match="BLOB_UNKNOWN"):
        next(pieces)


def test_a_reader_may_stop(registry: FakeRegistry, repository: Repository):
    with repository.read_blob(DIGEST) as pieces:
        first = list(itertools.islice(pieces, 1))
    assert BLOB.startswith(first[0])
    assert read(repository) == BLOB
    assert len(registry.lines("GET */blobs/*")) == 2


def test_blob_is_verified(registry: FakeRegistry, repository: Repository):
    assert repository.blob(DIGEST) == BLOB
    registry.damage("team/app", DIGEST)
    with pytest.raises(WrongAnswerError, match=f"sends other bytes, sha256:(?!{DIGEST.hex})"):
        repository.blob(DIGEST)


@pytest.mark.parametrize("tokens", [True, False])
def test_redirects_do_not_take_our_credentials_along(
    registry: FakeRegistry, repository: Repository, configuration: Path, *, tokens: bool
):
    registry.credentials, registry.tokens, registry.redirects = ("user", "secret"), tokens, True
    (configuration / "config.json").write_text(
        f'{{"auths": {{"{registry.address}": {{"username": "user", "password": "secret"}}}}}}'
    )
    (configuration / ".netrc").write_text("machine 127.0.0.1 login user password secret\n")
    registry.fail("GET /objects/*", cut=70_000, times=1)
    assert read(repository) == BLOB
    assert len(registry.object_requests) == 2
    assert all("authorization" not in request.headers for request in registry.object_requests)
    assert repository.has_blob(DIGEST)
    assert len(registry.object_requests) == 2  # the registry's word is enough
