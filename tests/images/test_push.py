from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from envbuilder.errors import InputError
from envbuilder.images.push import BlobDamagedError, Pushed, push
from envbuilder.images.whereabouts import Whereabouts
from envbuilder.oci.model import MANIFEST
from envbuilder.registry.errors import AccessRefusedError, RegistryError, RegistryUnreachableError
from envbuilder.registry.reference import Reference
from envbuilder.store.store import NotInStoreError, Store
from tests.images.transfer import image, push_to, uploaded
from tests.registries import fake_registry, private_configuration, quick_retries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envbuilder.oci.model import Image
    from tests.registries import FakeRegistry


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_configuration(monkeypatch, tmp_path / "configuration")
    quick_retries(monkeypatch, monolithic=60_000, chunk=40_000)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as registry:
        yield registry


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def size_of(made: Image) -> int:
    return made.manifest.config.size + sum(layer.size for layer in made.manifest.layers)


def is_complete(registry: FakeRegistry, repository: str, made: Image, tag: str = "v1") -> bool:
    blobs = registry.blobs[repository]
    parts = [made.manifest.config, *made.manifest.layers]
    return registry.tags[repository][tag] == str(made.digest) and all(
        len(blobs[str(part.digest)]) == part.size for part in parts
    )


def test_everything_is_sent_once_and_the_manifest_last(registry: FakeRegistry, store: Store):
    made = image(store, "one", ["a", "b", "c"])
    reference = Reference.parse(registry.reference("team/one"))

    pushed = push(made, store, reference)

    assert pushed == Pushed(Reference(registry.address, "team/one", None, made.digest), size_of(made), 0, 0)
    assert uploaded(registry, "team/one") == size_of(made)
    assert registry.manifests["team/one"][str(made.digest)] == (MANIFEST, made.documents.manifest)
    assert is_complete(registry, "team/one", made)
    writes = registry.lines("PUT *")
    assert writes[-1] == "PUT /v2/team/one/manifests/v1"
    ends = [seen.query for seen in registry.requests if seen.method == "PUT" and "/uploads/" in seen.path]
    assert str(made.manifest.config.digest) in unquote(ends[-1])


def test_what_is_there_is_not_sent_again(registry: FakeRegistry, store: Store):
    made = image(store, "one", ["a", "b"])
    push_to(registry, "team/one", made, store)
    registry.requests.clear()

    again = push(made, store, Reference.parse(registry.reference("team/one")))

    assert (again.sent, again.mounted, again.present) == (0, 0, size_of(made))
    assert {line.partition(" ")[0] for line in registry.lines()} == {"GET", "HEAD"}


def test_a_second_environment_pushes_only_its_own(registry: FakeRegistry, store: Store):
    base, more = image(store, "base", ["a", "b", "c"]), image(store, "more", ["a", "b", "c", "d"])
    push_to(registry, "team/env", base, store, "base")
    registry.requests.clear()

    pushed = push(more, store, Reference.parse(registry.reference("team/env", "more")))

    own = more.manifest.layers[-1].size + more.manifest.config.size
    assert (pushed.sent, pushed.mounted, pushed.present) == (own, 0, size_of(more) - own)
    assert uploaded(registry, "team/env") == own


def test_what_another_repository_has_is_taken_over(registry: FakeRegistry, store: Store):
    base, more = image(store, "base", ["a", "b"]), image(store, "more", ["a", "b", "c"])
    push_to(registry, "team/base", base, store)

    pushed = push(more, store, Reference.parse(registry.reference("team/more")))

    shared = sum(layer.size for layer in base.manifest.layers)
    assert (pushed.sent, pushed.mounted) == (size_of(more) - shared, shared)
    assert uploaded(registry, "team/more") == size_of(more) - shared
    assert is_complete(registry, "team/more", more)


@pytest.mark.parametrize("reason", ["does not mount", "has it no more", "refuses"])
def test_a_hint_is_only_a_hint(registry: FakeRegistry, store: Store, reason: str):
    made = image(store, "one", ["a", "b"])
    push_to(registry, "team/one", made, store)
    if reason == "does not mount":
        registry.mounts = False
    elif reason == "has it no more":
        registry.blobs["team/one"].clear()
    else:
        registry.fail("POST /v2/team/two/*", status=403, code="DENIED", times=3)

    pushed = push(made, store, Reference.parse(registry.reference("team/two")))

    assert (pushed.sent, pushed.mounted, pushed.present) == (size_of(made), 0, 0)
    assert is_complete(registry, "team/two", made)


def test_whereabouts_are_of_one_registry_and_the_latest_first(registry: FakeRegistry, store: Store):
    made = image(store, "one", ["a"])
    (digest,) = (layer.digest for layer in made.manifest.layers)
    for repository in ("x/one", "x/two", "x/one"):
        push_to(registry, repository, made, store)

    assert Whereabouts(store, registry.address).of(digest, but="x/three") == ["x/one", "x/two"]
    assert Whereabouts(store, registry.address).of(digest, but="x/one") == ["x/two"]
    assert Whereabouts(store, "other.test").of(digest, but="x/three") == []


def test_a_layer_that_nobody_has_stops_it_before_anything_is_sent(registry: FakeRegistry, store: Store):
    made = image(store, "one", ["a", "b", "c"])
    for lost in made.manifest.layers[1:]:
        store.blob(lost.digest).unlink()

    with pytest.raises(NotInStoreError, match=r"layer sha256:\w+ and 1 more of the image") as caught:
        push(made, store, Reference.parse(registry.reference("team/one")))

    assert caught.value.exit_code == 2
    assert registry.lines("P*") == []


def test_a_layer_that_the_registry_has_need_not_be_here(registry: FakeRegistry, store: Store):
    made = image(store, "one", ["a", "b"])
    push_to(registry, "team/one", made, store)
    for layer in made.manifest.layers:
        store.blob(layer.digest).unlink()

    pushed = push(made, store, Reference.parse(registry.reference("team/two")))

    assert (pushed.sent, pushed.mounted) == (0, size_of(made))
    assert is_complete(registry, "team/two", made)


def test_a_reference_with_a_digest(registry: FakeRegistry, store: Store):
    made, other = image(store, "one", ["a"]), image(store, "two", ["b"])
    name = f"{registry.address}/team/one"

    with pytest.raises(InputError, match="names another image"):
        push(made, store, Reference.parse(f"{name}@{other.digest}"))
    assert registry.requests == []

    push(made, store, Reference.parse(f"{name}@{made.digest}"))
    assert list(registry.manifests["team/one"]) == [str(made.digest)]
    assert registry.tags == {}
    push(made, store, Reference.parse(name))
    assert registry.tags == {"team/one": {"latest": str(made.digest)}}


def test_a_blob_that_was_damaged_in_the_store(registry: FakeRegistry, store: Store):
    made = image(store, "one", ["a", "b"])
    hurt = store.blob(made.manifest.layers[0].digest)
    data = bytearray(hurt.read_bytes())
    data[5000] ^= 1
    hurt.write_bytes(data)

    with pytest.raises(BlobDamagedError, match=f"{made.manifest.layers[0].digest} in the store is damaged"):
        push(made, store, Reference.parse(registry.reference("team/one")))

    assert registry.tags == {}


#: Each is got over by trying again: the first requests that match fail, later ones do not.
TEMPORARY = [
    {"match": "HEAD *", "status": 429, "retry_after": "0", "times": 2},
    {"match": "HEAD *", "status": 503, "times": 3},
    {"match": "POST *", "status": 500, "times": 2},
    {"match": "POST *", "cut": -1, "reset": True, "times": 2},
    {"match": "PATCH *", "status": 502, "times": 2},
    {"match": "PATCH *", "take": 10_000, "times": 3},
    {"match": "PATCH *", "cut": -1, "reset": True, "times": 2},
    {"match": "PATCH *", "status": 404, "code": "BLOB_UPLOAD_UNKNOWN", "after": 1, "times": 1},
    {"match": "PUT */blobs/*", "status": 503, "times": 2},
    {"match": "PUT */blobs/*", "take": 0, "times": 1},
    {"match": "PUT */blobs/*", "cut": -1, "times": 1},
    {"match": "PUT */manifests/*", "status": 500, "times": 2},
    {"match": "PUT */manifests/*", "cut": -1, "reset": True, "times": 1},
    {"match": "PATCH *", "slow": 0.01},
]


@pytest.mark.parametrize("fault", TEMPORARY, ids=json.dumps)
def test_what_is_temporary_is_got_over(registry: FakeRegistry, store: Store, fault: dict[str, object]):
    made = image(store, "one", ["a", "b", "c"])
    registry.fail(**fault)  # type: ignore[arg-type]

    push(made, store, Reference.parse(registry.reference("team/one")))

    assert is_complete(registry, "team/one", made)


#: What stays, and the error that it is; where needed, only after so many requests that went well.
LASTING: list[tuple[dict[str, object], type[RegistryError]]] = [
    ({"match": "PATCH *", "status": 503, "after": 5}, RegistryUnreachableError),
    ({"match": "PUT */manifests/*", "status": 500}, RegistryUnreachableError),
    ({"match": "POST *", "status": 403, "after": 1}, AccessRefusedError),
    ({"match": "PUT */blobs/*", "status": 400, "after": 1}, RegistryError),
]


@pytest.mark.parametrize(("how", "error"), LASTING, ids=str)
def test_what_stays_is_an_error_and_the_next_push_sends_the_rest(
    registry: FakeRegistry, store: Store, how: dict[str, object], error: type[RegistryError]
):
    made = image(store, "one", ["a", "b", "c"])
    fault = registry.fail(**how, code="SAD")  # type: ignore[arg-type]

    with pytest.raises(error, match="SAD"):
        push(made, store, Reference.parse(registry.reference("team/one")))

    assert registry.tags == {}
    registry.faults.remove(fault)
    before = sum(len(data) for data in registry.blobs.get("team/one", {}).values())
    pushed = push(made, store, Reference.parse(registry.reference("team/one")))
    assert pushed.sent == size_of(made) - before
    assert is_complete(registry, "team/one", made)
