"""What can go wrong during a pull: nothing that is wrong is kept, and the next pull needs only the rest."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from envbuilder.atomic import DiskFullError
from envbuilder.errors import EnvbuilderError
from envbuilder.images import ranges, receive
from envbuilder.images.pull import pull
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import CONFIG, Descriptor, ImageFormatError
from envbuilder.registry.errors import RegistryUnreachableError, WrongAnswerError
from envbuilder.registry.reference import Reference
from envbuilder.store.partial import WrongBytesError
from envbuilder.store.store import Store
from envbuilder.store.unpack import UnpackError, tree_of
from tests.engines import small_disk
from tests.images.transfer import image, push_to
from tests.registries import fake_registry, private_configuration, quick_retries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envbuilder.oci.model import Image
    from tests.registries import FakeRegistry


@pytest.fixture(autouse=True)
def small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_configuration(monkeypatch, tmp_path / "configuration")
    quick_retries(monkeypatch)
    monkeypatch.setattr(receive, "_SMALL", 1000)
    monkeypatch.setattr(receive, "_TAIL", 2000)
    monkeypatch.setattr(ranges, "RANGE", 30_000)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as registry:
        yield registry


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return Store(tmp_path / "source")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def check(store: Store, made: Image) -> None:
    """Make sure that the store has the image, and nothing that is not whole."""
    assert store.image(made.digest) == made
    assert all(tree_of(store, layer).is_dir() for layer in made.manifest.layers)
    assert_sound(store)


def assert_sound(store: Store) -> None:
    """Make sure that every blob is what its name says, and that nothing unpacked is half-written."""
    for blob in (store.root / "blobs" / "sha256").iterdir():
        assert Digest.of_file(blob).hex == blob.name
    assert [path.name for path in (store.root / "trees").glob(".tmp-*")] == []


TEMPORARY = [
    {"match": "GET */manifests/*", "status": 429, "retry_after": "0", "times": 2},
    {"match": "GET */manifests/*", "cut": 10, "times": 2},
    {"match": "GET */blobs/*", "status": 503, "times": 3},
    {"match": "GET */blobs/*", "status": 500, "after": 3, "times": 2},
    {"match": "GET */blobs/*", "cut": 15_000, "times": 6},
    {"match": "GET */blobs/*", "cut": 1000, "reset": True, "times": 6},
    {"match": "GET */blobs/*", "cut": -1, "reset": True, "after": 2, "times": 3},
    {"match": "GET */blobs/*", "slow": 0.02},
]


@pytest.mark.parametrize("fault", TEMPORARY, ids=json.dumps)
def test_what_is_temporary_is_got_over(registry: FakeRegistry, source: Store, store: Store, fault: dict[str, object]):
    made = image(source, "one", ["a", "b"])
    reference = push_to(registry, "team/one", made, source)
    registry.fail(**fault)  # type: ignore[arg-type]

    pull(reference, store)

    check(store, made)
    assert list((store.root / "partial").iterdir()) == []


LASTING: list[tuple[dict[str, object], type[EnvbuilderError]]] = [
    ({"match": "GET */blobs/*", "status": 503, "after": 2}, RegistryUnreachableError),
    ({"match": "GET */blobs/*", "cut": 0, "after": 4}, RegistryUnreachableError),
    ({"match": "GET */blobs/*", "corrupt": True}, EnvbuilderError),
    ({"match": "GET */blobs/*", "corrupt": True, "after": 4}, WrongBytesError),
    ({"match": "GET */blobs/*", "short": 10, "after": 4}, EnvbuilderError),
    ({"match": "GET */manifests/*", "corrupt": True}, EnvbuilderError),
    ({"match": "GET */manifests/*", "digest": f"sha256:{'0' * 64}"}, WrongAnswerError),
]


@pytest.mark.parametrize(("how", "error"), LASTING, ids=str)
def test_what_stays_is_an_error_and_the_next_pull_goes_on(
    registry: FakeRegistry, source: Store, store: Store, how: dict[str, object], error: type[EnvbuilderError]
):
    made = image(source, "one", ["a", "b", "c"])
    reference = push_to(registry, "team/one", made, source)
    fault = registry.fail(**how)  # type: ignore[arg-type]

    with pytest.raises(error):
        pull(reference, store)

    assert store.images() == {}
    assert_sound(store)
    registry.faults.remove(fault)
    pull(reference, store)
    check(store, made)


def test_a_layer_that_is_another_one(registry: FakeRegistry, source: Store, store: Store):
    made = image(source, "one", ["a", "b"])
    reference = push_to(registry, "team/one", made, source)
    bad = made.manifest.layers[1]
    registry.damage("team/one", bad.digest)

    with pytest.raises(WrongBytesError, match=f"layer {bad.digest}: has sha256:") as caught:
        pull(reference, store)

    assert caught.value.exit_code == 1
    assert not store.has(bad.digest)
    assert not store.partial(bad.digest).exists()
    assert not tree_of(store, bad).exists()
    assert store.images() == {}


@pytest.mark.parametrize("change", [-500, 500])
def test_a_layer_of_another_size(registry: FakeRegistry, source: Store, store: Store, change: int):
    made = image(source, "one", ["a"])
    reference = push_to(registry, "team/one", made, source)
    (layer,) = made.manifest.layers
    data = registry.blobs["team/one"][str(layer.digest)]
    registry.blobs["team/one"][str(layer.digest)] = data[:change] if change < 0 else data + bytes(change)

    if change < 0:
        with pytest.raises(EnvbuilderError):
            pull(reference, store)
        assert not store.has(layer.digest)
        assert_sound(store)
    else:  # no more is taken than was asked for, and that is right
        pull(reference, store)
        check(store, made)


@pytest.mark.parametrize("left", ["beginning", "all", "nonsense", "bad end", "too much"])
def test_what_an_earlier_pull_left(registry: FakeRegistry, source: Store, store: Store, left: str):
    made = image(source, "one", ["a"])
    reference = push_to(registry, "team/one", made, source)
    (layer,) = made.manifest.layers
    data = source.read(layer.digest)
    wrong = data[:70_000] + bytes(1000)
    store.partial(layer.digest).write_bytes(
        {
            "beginning": data[:50_000], "all": data, "nonsense": bytes(50_000), "bad end": wrong,
            "too much": data + b"more",
        }[left]
    )  # fmt: skip

    pulled = pull(reference, store)

    check(store, made)
    if left in {"beginning", "all"}:
        assert pulled.received < layer.size


@pytest.mark.parametrize("of_ours", [True, False])
def test_a_configuration_that_lies_about_a_layer(registry: FakeRegistry, source: Store, store: Store, of_ours: bool):  # noqa: FBT001
    made = image(source, "one", ["a"])
    lie = replace(made.config, diff_ids=(Digest.of(b"another"),))
    data = lie.to_bytes()
    layers = (
        made.manifest.layers if of_ours else tuple(replace(layer, annotations={}) for layer in made.manifest.layers)
    )
    manifest = replace(made.manifest, config=Descriptor(CONFIG, Digest.of(data), len(data)), layers=layers)
    reference = push_to(registry, "team/one", replace(made, manifest=manifest, config=lie), source)

    if of_ours:  # the table of contents stands for the diff id: see store/unpack.py
        pull(reference, store)
    else:
        with pytest.raises(UnpackError, match="unpacks to"):
            pull(reference, store)
        assert store.images() == {}
    assert_sound(store)


def test_documents_that_do_not_belong_together(registry: FakeRegistry, source: Store, store: Store):
    made = image(source, "one", ["a", "b"])
    manifest = replace(made.manifest, layers=made.manifest.layers[:1])
    push_to(registry, "team/one", made, source)
    registry.add_manifest("team/one", manifest.to_bytes(), "odd")

    with pytest.raises(ImageFormatError, match="the manifest has 1 layers, but the configuration has 2"):
        pull(Reference.parse(registry.reference("team/one", "odd")), store)


def test_an_error_in_one_layer_stops_the_others(registry: FakeRegistry, source: Store, store: Store):
    made = image(source, "one", ["a", "b", "c"])
    reference = push_to(registry, "team/one", made, source)
    bad = made.manifest.layers[2]
    registry.damage("team/one", bad.digest)
    for layer in made.manifest.layers[:2]:
        registry.fail(f"GET */blobs/{layer.digest}", slow=0.5)

    begin = time.monotonic()
    with pytest.raises(WrongBytesError):
        pull(reference, store)

    assert time.monotonic() - begin < 4
    assert_sound(store)


def test_a_disk_that_fills_up(registry: FakeRegistry, source: Store, tmp_path: Path):
    made = image(source, "one", ["a", "b", "c", "d", "e", "f"])
    reference = push_to(registry, "team/one", made, source)
    small = tmp_path / "small"
    with small_disk(small, "1m"):
        store = Store(small / "store")
        kept = store.put(b"what was there")
        with pytest.raises(DiskFullError, match="no space left"):
            pull(reference, store)
        assert store.read(kept) == b"what was there"
        assert store.images() == {}
        assert_sound(store)
        subprocess.run(["mount", "-o", "remount,size=16m", small], check=True)
        pulled = pull(reference, store)
        check(store, made)
        assert pulled.received < sum(layer.size for layer in made.manifest.layers)
        store.close()
