from __future__ import annotations

import json
import logging
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from envbuilder.errors import EnvbuilderError, UnreachableError
from envbuilder.images.base import BaseUnfitError, PulledBase
from envbuilder.images.basepull import pull_base
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import DOCKER_INDEX, DOCKER_MANIFEST, INDEX, MANIFEST, Image, canonical_json
from envbuilder.oci.platform import NoSuchPlatformError
from envbuilder.registry.errors import NotInRegistryError
from envbuilder.registry.reference import NotAReferenceError
from envbuilder.store.partial import WrongBytesError
from envbuilder.store.store import Store
from envbuilder.store.unpack import UnpackError
from tests.images.bases import DOCKER_LAYER, Plan, file, index_of, system
from tests.registries import FakeRegistry, fake_registry, private_configuration, quick_retries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MACHINE = platform.machine()
HERE = {"os": "linux", "architecture": "amd64"}
ARM = {"os": "linux", "architecture": "arm64", "variant": "v8"}


@dataclass
class Place:
    """A registry, a store, and another store in which images are made."""

    registry: FakeRegistry
    store: Store
    elsewhere: Store

    def put(self, plan: Plan, tag: str | None = "v1", media_type: str = MANIFEST) -> Image:
        """Put an image into the registry."""
        image = plan.put(self.elsewhere)
        for descriptor in (image.manifest.config, *image.manifest.layers):
            self.registry.add_blob("base", self.elsewhere.read(descriptor.digest))
        self.registry.add_manifest("base", image.documents.manifest, tag, media_type)
        return image

    def pull(self, target: str = ":v1") -> PulledBase:
        return pull_base(f"{self.registry.address}/base{target}", MACHINE, self.store)

    def asked(self) -> list[str]:
        """Return the requests since the last call, without the base of the path."""
        lines = [line.replace("/v2/base/", "") for line in self.registry.lines() if not line.endswith(" /v2/")]
        self.registry.requests.clear()
        return lines


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    private_configuration(monkeypatch, tmp_path / "configuration")
    quick_retries(monkeypatch)
    with fake_registry() as registry:
        yield Place(registry, Store(tmp_path / "store"), Store(tmp_path / "elsewhere"))


def test_a_base_by_tag_is_asked_for_once(place: Place, caplog: pytest.LogCaptureFixture):
    image = place.put(Plan([system(), [file("srv/x")]]))
    with caplog.at_level(logging.INFO):
        base = place.pull()
    assert (base.name, base.digest, base.image) == (f"{place.registry.address}/base:v1", image.digest, image)
    assert f"{base.name} is {image.digest}" in caplog.text
    assert all(place.store.has(layer.digest) for layer in image.manifest.layers)
    place.asked()
    assert place.pull() == base
    assert place.asked() == ["HEAD manifests/v1"]


def test_a_base_by_digest_is_asked_of_nobody_again(place: Place):
    image = place.put(Plan([system()]))
    base = place.pull(f"@{image.digest}")
    assert place.asked()
    assert place.pull(f"@{image.digest}") == base
    assert place.asked() == []


def test_the_base_is_kept_under_its_name_and_the_name_moves(place: Place):
    first = place.put(Plan([system()]))
    name = place.pull().name
    assert place.store.find_image(name) == first.digest
    second = place.put(Plan([system(), [file("srv/x")]]))
    assert place.pull().digest == second.digest
    assert place.store.find_image(name) == second.digest


@pytest.mark.parametrize("media_type", [INDEX, DOCKER_INDEX])
def test_an_index_stands_for_its_image_for_the_platform(place: Place, media_type: str):
    arm, here = place.put(Plan([[file("arm")]], architecture="arm64"), None), place.put(Plan([system()]), None)
    index = index_of(
        (arm, ARM), (here, HERE), (arm, {"os": "unknown", "architecture": "unknown"}), media_type=media_type
    )
    digest = place.registry.add_manifest("base", index, "v1", media_type)
    base = place.pull()
    assert (base.digest, base.image) == (digest, here)
    place.asked()
    assert place.pull(f"@{digest}").image == here
    assert place.asked() == []
    assert place.pull().image == here
    assert place.asked() == ["HEAD manifests/v1"]
    assert not place.store.has(arm.digest)


def test_an_index_may_lead_to_an_index_but_not_for_ever(place: Place):
    here = place.put(Plan([system()]), None)
    data = index_of((here, HERE), media_type=INDEX)
    for _ in range(4):
        digest = place.registry.add_manifest("base", data, "v1", INDEX)
        if len(place.registry.manifests["base"]) == 3:
            assert place.pull().image == here
        entry = {"mediaType": INDEX, "digest": str(digest), "size": len(data), "platform": HERE}
        data = canonical_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]})
    with pytest.raises(EnvbuilderError, match="an index of indexes"):
        place.pull()


def test_a_platform_that_an_index_lacks_is_named(place: Place):
    arm = place.put(Plan([[file("arm")]], architecture="arm64"), None)
    windows = {"os": "windows", "architecture": "amd64", "os.version": "10.0.20348.1"}
    place.registry.add_manifest("base", index_of((arm, ARM), (arm, windows), media_type=INDEX), "v1", INDEX)
    with pytest.raises(NoSuchPlatformError, match="has no image for linux/amd64") as caught:
        place.pull()
    assert caught.value.hint == "it has images for: linux/arm64/v8, windows/amd64"


@pytest.mark.parametrize(("system_name", "architecture"), [("windows", "amd64"), ("linux", "arm64"), ("linux", "386")])
def test_an_image_for_another_platform_is_refused(place: Place, system_name: str, architecture: str):
    place.put(Plan([[file("x")]], os=system_name, architecture=architecture))
    with pytest.raises(BaseUnfitError, match=f"is made for {system_name}/{architecture}, not for linux/amd64"):
        place.pull()
    assert not [line for line in place.asked() if "/blobs/" in line][1:], "no layer is fetched"


def test_dockers_documents_are_read(place: Place):
    plan = Plan([system()], media_type=DOCKER_LAYER, manifest_type=DOCKER_MANIFEST)
    image = place.put(plan, media_type=DOCKER_MANIFEST)
    assert place.pull().image == image


def test_the_first_format_and_what_is_no_image_are_refused(place: Place):
    first = b'{"schemaVersion": 1, "name": "base", "fsLayers": [], "history": []}'
    place.registry.add_manifest("base", first, "v1", "application/vnd.docker.distribution.manifest.v1+json")
    with pytest.raises(BaseUnfitError, match="schema 1"):
        place.pull()
    empty = {"mediaType": "application/vnd.oci.empty.v1+json", "size": 2}
    empty["digest"] = str(place.registry.add_blob("base", b"{}"))
    chart = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "config": empty, "layers": [empty]}).encode()
    place.registry.add_manifest("base", chart, "v1")
    with pytest.raises(BaseUnfitError, match="is made for nothing"):
        place.pull()
    with pytest.raises(EnvbuilderError, match="not a JSON object"):
        place.pull(f"@{place.store.put(b'[]')}")


def test_what_is_not_there_is_said(place: Place):
    with pytest.raises(NotInRegistryError) as caught:
        place.pull(":v2")
    assert caught.value.exit_code == 2
    with pytest.raises(NotAReferenceError):
        place.pull(":v1@sha256:12")


def test_without_the_registry_a_tag_is_what_it_was(place: Place, caplog: pytest.LogCaptureFixture):
    image = place.put(Plan([system()]))
    fault = place.registry.fail("*", status=503)
    with pytest.raises(UnreachableError) as caught:
        place.pull()
    assert caught.value.exit_code == 3
    place.registry.faults.remove(fault)
    place.pull()
    place.registry.fail("*", status=503)
    with caplog.at_level(logging.WARNING):
        assert place.pull().image == image
    assert f"is taken to be {image.digest}, as the last time" in caplog.text


def test_a_layer_with_other_bytes_is_not_kept(place: Place):
    image = place.put(Plan([system()]))
    place.registry.damage("base", image.manifest.layers[0].digest)
    with pytest.raises(WrongBytesError):
        place.pull()
    assert not place.store.has(image.manifest.layers[0].digest)
    assert place.store.find_image(f"{place.registry.address}/base:v1") is None


def test_a_layer_that_the_configuration_lies_about_is_refused(place: Place):
    image = place.put(Plan([system()]))
    config = json.loads(image.documents.config)
    config["rootfs"]["diff_ids"] = [str(Digest.of(b"another"))]
    data = json.dumps(config).encode()
    manifest = json.loads(image.documents.manifest)
    manifest["config"] |= {"digest": str(place.registry.add_blob("base", data)), "size": len(data)}
    place.registry.add_manifest("base", json.dumps(manifest).encode(), "v1")
    with pytest.raises(UnpackError, match=f"not to {Digest.of(b'another')}"):
        place.pull()
