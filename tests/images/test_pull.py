from __future__ import annotations

import json
import platform
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from envbuilder import parallel, report
from envbuilder.errors import InputError
from envbuilder.images import ranges, receive
from envbuilder.images.pull import NotAnImageError, default_name, pull
from envbuilder.images.push import push
from envbuilder.images.ranges import connections_for
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import (
    DOCKER_CONFIG,
    DOCKER_INDEX,
    DOCKER_MANIFEST,
    INDEX,
    MANIFEST,
    Descriptor,
    Index,
    Platform,
)
from envbuilder.oci.platform import NoSuchPlatformError, choose, this_platform
from envbuilder.registry.errors import NotInRegistryError
from envbuilder.registry.reference import Reference
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from envbuilder.store.unpack import tree_of
from tests.images.transfer import fetched, image, push_to
from tests.registries import fake_registry, private_configuration, quick_retries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envbuilder.oci.model import Image
    from tests.registries import FakeRegistry

LABEL = "dev.envbuilder.environment"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


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
    """The store that images are pushed from."""
    return Store(tmp_path / "source")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that images are pulled into."""
    return Store(tmp_path / "store")


def foreign(registry: FakeRegistry, repository: str, made: Image, source: Store) -> tuple[bytes, bytes]:
    """Put an image into the registry as Docker would have written it; return manifest and configuration."""
    config = json.loads(made.documents.config)
    config["config"] |= {"Healthcheck": {"Test": ["CMD", "true"]}, "ExposedPorts": {"80/tcp": {}}}
    config |= {"container": "4f2e", "docker_version": "27.0", "variant": ""}
    config["history"].insert(0, {"created_by": "CMD [\u003csh\u003e]", "empty_layer": True})
    config_data = json.dumps(config, indent=3).encode()
    layers = [
        replace(layer, media_type=DOCKER_LAYER, annotations={}).to_json() for layer in made.manifest.layers
    ]  # fmt: skip
    document = {
        "schemaVersion": 2, "mediaType": DOCKER_MANIFEST, "layers": layers, "strange": True,
        "config": {"mediaType": DOCKER_CONFIG, "size": len(config_data), "digest": str(Digest.of(config_data))},
    }  # fmt: skip
    data = json.dumps(document, indent=3).encode() + b"\n"
    registry.add_blob(repository, config_data)
    for layer in made.manifest.layers:
        registry.add_blob(repository, source.blob(layer.digest).read_bytes())
    registry.add_manifest(repository, data, "v1", DOCKER_MANIFEST)
    return data, config_data


def put_index(
    registry: FakeRegistry, repository: str, entries: list[tuple[Digest, Platform | None]], **more: Any
) -> Digest:
    manifests = []
    for digest, its in entries:
        media_type, data = registry.manifests[repository][str(digest)]
        manifests.append(Descriptor(media_type, digest, len(data), platform=its).to_json())
    document = {"schemaVersion": 2, "mediaType": more.get("media_type", INDEX), "manifests": manifests}
    data = json.dumps(document).encode()
    return registry.add_manifest(repository, data, more.get("tag", "all"), more.get("media_type", INDEX))


def is_unpacked(store: Store, made: Image) -> bool:
    return all(tree_of(store, layer).is_dir() for layer in made.manifest.layers)


@pytest.mark.parametrize("unpack", [True, False])
def test_the_image_is_the_same_afterwards(registry: FakeRegistry, source: Store, store: Store, unpack: bool):  # noqa: FBT001
    made = image(source, "one", ["a", "b", "c"])
    reference = push_to(registry, "team/one", made, source)

    pulled = pull(reference, store, unpack=unpack)

    assert pulled.image == made
    assert (pulled.name, pulled.stated) == ("one", made.digest)
    assert str(pulled.reference) == f"{registry.address}/team/one@{made.digest}"
    assert pulled.present == 0
    assert pulled.received == made.manifest.config.size + sum(layer.size for layer in made.manifest.layers)
    assert store.images() == {"one": made.digest}
    assert store.image(made.digest) == made
    assert list((store.root / "partial").iterdir()) == []
    assert is_unpacked(store, made) == unpack
    root = root_tree(store, made)
    assert sorted(path.name for path in root.iterdir() if path.name in "abc") == ["a", "b", "c"]
    assert (root / "a" / "3.bin").stat().st_size == 30_000


def test_only_what_is_missing_is_fetched(registry: FakeRegistry, source: Store, store: Store):
    base, more = image(source, "base", ["a", "b"]), image(source, "more", ["a", "b", "c"])
    first = push_to(registry, "team/base", base, source)
    second = push_to(registry, "team/more", more, source)
    pull(first, store)

    pulled = pull(second, store)

    own = {str(more.manifest.config.digest), str(more.manifest.layers[-1].digest)}
    assert set(fetched(registry, "team/more")) == own
    assert pulled.present == sum(layer.size for layer in base.manifest.layers)
    registry.requests.clear()
    again = pull(second, store)
    assert (again.received, fetched(registry, "team/more")) == (0, [])


def test_a_layer_that_is_here_but_not_unpacked_is_unpacked(registry: FakeRegistry, source: Store, store: Store):
    made = image(source, "one", ["a", "b"])
    reference = push_to(registry, "team/one", made, source)
    pull(reference, store, unpack=False)

    pull(reference, store)

    assert is_unpacked(store, made)


def test_what_the_image_is_called(registry: FakeRegistry, source: Store, store: Store):
    made = image(source, "one", ["a"])
    labelled = replace(made.config, labels={LABEL: "ai-v4"})
    data = labelled.to_bytes()
    config = replace(made.manifest.config, digest=Digest.of(data), size=len(data))
    ours = replace(made, config=labelled, manifest=replace(made.manifest, config=config))
    reference = push_to(registry, "team/ml/runtime", ours, source, "v4")

    assert pull(reference, store).name == "ai-v4"
    assert pull(reference, store, name="mine").name == "mine"
    assert store.images() == {"ai-v4": ours.digest, "mine": ours.digest}


@pytest.mark.parametrize("name", ["", "../up", "two words", "a\nb"])
def test_a_name_that_is_none(registry: FakeRegistry, source: Store, store: Store, name: str):
    made = image(source, "one", ["a"])
    reference = push_to(registry, "team/one", made, source)
    registry.requests.clear()
    with pytest.raises(InputError, match="is no name for an image"):
        pull(reference, store, name=name)
    assert registry.requests == []
    assert default_name(replace(made, config=replace(made.config, labels={LABEL: name})), reference) == "one"


def test_two_at_once_take_turns(registry: FakeRegistry, source: Store, store: Store):
    made = image(source, "one", ["a", "b", "c"])
    reference = push_to(registry, "team/one", made, source)

    pulled = parallel.run_all(lambda _: pull(reference, store), range(3), workers=3)

    assert all(one.image == made for one in pulled)
    layers = sum(layer.size for layer in made.manifest.layers)
    assert layers <= sum(one.received for one in pulled) <= layers + 3 * made.manifest.config.size


def test_a_name_moves_on_to_what_was_pulled_last(registry: FakeRegistry, source: Store, store: Store):
    said: list[str] = []

    class Listener(report.LogReporter):
        def message(self, text: str, kind: report.Kind) -> None:  # noqa: ARG002
            said.append(text)

    first, second = image(source, "first", ["a"]), image(source, "second", ["b"])
    pull(push_to(registry, "team/one", first, source), store)
    with report.using(Listener()):
        pull(push_to(registry, "team/one", second, source), store)

    assert store.images() == {"one": second.digest}
    assert f"`one` was {first.digest} until now" in said


@pytest.mark.parametrize("unpack", [True, False])
def test_an_image_of_another_tool_keeps_its_bytes(registry: FakeRegistry, source: Store, store: Store, unpack: bool):  # noqa: FBT001
    made = image(source, "one", ["a", "b"])
    manifest, config = foreign(registry, "team/one", made, source)

    pulled = pull(Reference.parse(registry.reference("team/one")), store, unpack=unpack)

    assert pulled.image.digest == Digest.of(manifest)
    assert pulled.image.descriptor == Descriptor(DOCKER_MANIFEST, Digest.of(manifest), len(manifest))
    assert store.read(pulled.image.digest) == manifest
    kept = store.image(pulled.image.digest)
    assert (kept.documents.manifest, kept.documents.config) == (manifest, config)
    assert kept.config.cmd == ("true",)
    assert (root_tree(store, kept) / "b" / "0.bin").exists()
    push(kept, store, Reference.parse(registry.reference("other/two")))
    assert registry.manifests["other/two"][str(Digest.of(manifest))] == (DOCKER_MANIFEST, manifest)


@pytest.mark.parametrize("media_type", [INDEX, DOCKER_INDEX])
def test_an_index_stands_for_the_image_of_this_machine(
    registry: FakeRegistry, source: Store, store: Store, media_type: str
):
    mine, other, attested = (image(source, name, [name]) for name in ("mine", "other", "attested"))
    for made in (mine, other, attested):
        push_to(registry, "team/one", made, source)
    here = this_platform()
    foreign_platform = Platform("linux", "s390x")
    entries = [
        (other.digest, foreign_platform), (attested.digest, Platform("unknown", "unknown")), (attested.digest, None),
        (mine.digest, here),
    ]  # fmt: skip
    index = put_index(registry, "team/one", entries, media_type=media_type)

    for text in (registry.reference("team/one", "all"), f"{registry.address}/team/one@{index}"):
        pulled = pull(Reference.parse(text), store)
        assert (pulled.image.digest, pulled.stated) == (mine.digest, index)
    nested = put_index(registry, "team/one", [(index, here)], tag="nested")
    assert pull(Reference.parse(registry.reference("team/one", "nested")), store).stated == nested


@dataclass(frozen=True)
class Offer:
    """What an index has, the machine that asks, and which of it that gets."""

    offered: tuple[str, ...]
    machine: str
    chosen: int | None


@pytest.mark.parametrize(
    "offer",
    [
        Offer(("arm64/v8", "arm64"), "aarch64", 0),
        Offer(("arm64", "arm64/v8"), "aarch64", 1),
        Offer(("arm64",), "aarch64", 0),
        Offer(("arm64/v9",), "aarch64", None),
        Offer(("amd64/v3", "amd64"), "x86_64", 1),
        Offer(("amd64/v3",), "x86_64", None),
        Offer(("arm/v7", "386"), "x86_64", None),
    ],
    ids=str,
)
def test_variants(monkeypatch: pytest.MonkeyPatch, offer: Offer):
    monkeypatch.setattr(platform, "machine", lambda: offer.machine)
    platforms = [Platform("linux", *text.split("/")) for text in offer.offered]
    index = Index(tuple(Descriptor(MANIFEST, Digest.of(str(its).encode()), 1, platform=its) for its in platforms))

    if offer.chosen is None:
        with pytest.raises(NoSuchPlatformError) as caught:
            choose(index, this_platform(), "a name")
        assert caught.value.hint == f"it has images for: {', '.join(sorted(map(str, platforms)))}"
    else:
        assert choose(index, this_platform(), "a name") == index.manifests[offer.chosen]


def test_no_image_for_this_machine_leaves_nothing(registry: FakeRegistry, source: Store, store: Store):
    made = image(source, "one", ["a"])
    push_to(registry, "team/one", made, source)
    put_index(registry, "team/one", [(made.digest, Platform("linux", "s390x"))])

    with pytest.raises(NoSuchPlatformError):
        pull(Reference.parse(registry.reference("team/one", "all")), store)

    assert store.images() == {}


def test_what_is_no_image(registry: FakeRegistry, store: Store):
    config = registry.add_blob("team/chart", b"{}")
    document = {
        "schemaVersion": 2, "mediaType": MANIFEST, "layers": [],
        "config": {"mediaType": "application/vnd.cncf.helm.config.v1+json", "digest": str(config), "size": 2},
    }  # fmt: skip
    registry.add_manifest("team/chart", json.dumps(document).encode(), "v1")
    first = "application/vnd.docker.distribution.manifest.v1+prettyjws"
    registry.add_manifest("team/old", b'{"schemaVersion": 1}', "v1", first)

    with pytest.raises(NotAnImageError, match=r"something else: `application/vnd\.cncf\.helm"):
        pull(Reference.parse(registry.reference("team/chart")), store)
    with pytest.raises(NotAnImageError, match="is not an image that can be pulled"):
        pull(Reference.parse(registry.reference("team/old")), store)
    with pytest.raises(NotInRegistryError):
        pull(Reference.parse(registry.reference("team/none")), store)
    assert store.images() == {}


@pytest.mark.parametrize("can", [True, False])
def test_one_layer_over_several_connections(
    registry: FakeRegistry,
    source: Store,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    can: bool,  # noqa: FBT001
):
    made = image(source, "one", ["large"])
    reference = push_to(registry, "team/one", made, source)
    registry.ranges = can
    monkeypatch.setattr(receive, "CONNECTIONS", 4)
    monkeypatch.setattr(ranges, "RANGE", 5_000)

    assert pull(reference, store).image == made

    assert is_unpacked(store, made)
    (layer,) = made.manifest.layers
    asked = [seen.headers.get("range") for seen in registry.requests if seen.path.endswith(str(layer.digest))]
    parts = len([text for text in asked if text])
    if can:
        assert parts >= layer.size // 5_000 > 20
    else:
        # The first parts that were asked for at once brought the whole blob each; from then on it comes in one piece.
        assert 0 < parts <= 8


def test_connections_are_dealt_by_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranges, "RANGE", 10)
    assert connections_for([1000], 6, 3) == [6]
    assert connections_for([600, 100, 100, 100, 100], 6, 3) == [4, 2, 2, 2, 2]
    assert connections_for([600, 19, 5, 0], 6, 3) == [6, 1, 1, 1]
    assert connections_for([500, 500], 2, 2) == [1, 1]
    assert connections_for([], 6, 3) == []
