from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from envbuilder.cli import show
from envbuilder.errors import InputError
from envbuilder.images.artifacts import (
    LOCK,
    SBOM,
    Artifact,
    ArtifactError,
    artifact_manifest,
    artifacts_of,
    fetch_artifact,
    publish_artifacts,
)
from envbuilder.images.assemble import Frame, Made, Origin, assemble, metadata_entries
from envbuilder.images.base import look_into
from envbuilder.images.push import push
from envbuilder.lock.drift import lock_input, lock_target
from envbuilder.lock.files import format_lock
from envbuilder.lock.model import Lock
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import MANIFEST, Descriptor
from envbuilder.registry.client import open_repository
from envbuilder.registry.errors import RegistryUnreachableError
from envbuilder.registry.reference import Reference
from envbuilder.spec.environment import read_environment
from envbuilder.spec.recipe import read_recipe
from envbuilder.store.store import Store
from tests.images.bases import Plan, file, system
from tests.images.test_build import RECIPE, SPEC, WHEELS, package_of
from tests.images.test_survey import STATUS
from tests.registries import FakeRegistry, fake_registry, private_configuration, quick_retries
from tests.smallimage import put_layer, small_image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envbuilder.oci.model import Image

PACKAGES = f"opt/env/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@dataclasses.dataclass(frozen=True)
class Case:
    store: Store
    lock: Lock
    image: Image


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Give an environment's image on a pulled base, with an extra."""
    store = Store(tmp_path / "store")
    (tmp_path / "small.toml").write_text(SPEC)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    environment = read_environment(tmp_path / "small.toml")
    packages = tuple(package_of(made) for made in sorted(WHEELS, key=lambda made: made.file))
    lock = Lock("small", lock_input(environment), lock_target(environment), "12.6", packages)
    below = Plan([system(file("var/lib/dpkg/status", STATUS.encode()))]).put(store)
    base = look_into("docker.io/library/duck:7", below.digest, below, "x86_64", store)
    layers = [
        Made(put_layer(store, [file(f"{PACKAGES}/app-1.0.dist-info/METADATA")]), "app 1.0"),
        Made(put_layer(store, metadata_entries(lock, Frame("/opt/env", "/opt/python"))), "small: metadata"),
        Made(put_layer(store, [file(f"{PACKAGES}/Fast_Attn-2.8.dist-info/METADATA")]), "extra fast"),
    ]
    origin = Origin("duck mallard", "host 3.12.1", "/opt/python", base)
    image = assemble(environment, lock, read_recipe(tmp_path / "recipe.toml"), origin, layers)
    return Case(store, lock, image)


def components(image: Image, store: Store) -> dict[str, dict[str, Any]]:
    document = json.loads(artifacts_of(image, store)[1].data)
    return {part["bom-ref"]: part for part in document["components"]}


def test_the_lock_is_the_one_that_the_image_holds(case: Case):
    lock, _ = artifacts_of(case.image, case.store)
    assert lock == Artifact(LOCK, "small.lock.toml", format_lock(case.lock).encode())


def test_the_sbom_names_everything_in_the_image(case: Case):
    _, document = artifacts_of(case.image, case.store)
    assert (document.media_type, document.file) == (SBOM, "small.cdx.json")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(document.data.decode()) is None
    digest = case.image.config.labels["org.opencontainers.image.base.digest"]
    assert set(components(case.image, case.store)) == {
        "os:duck-7",
        "pkg:deb/duck/libc6@2.36-9?arch=amd64&distro=duck-7&upstream=glibc",
        f"pkg:oci/duck@{digest}?repository_url=docker.io%2Flibrary%2Fduck",
        "pkg:generic/python@3.12.1",
        "pkg:pypi/app@1.0",
        "pkg:pypi/lib@1.0",
        "pkg:pypi/torch@2.7.1",
        "pkg:pypi/fast-attn@2.8",
    }
    subject = json.loads(document.data)["metadata"]["component"]
    assert (subject["type"], subject["name"], subject["version"]) == ("container", "small", str(case.image.digest))


def test_parts_that_no_lock_names_say_where_they_lie(case: Case):
    extra = components(case.image, case.store)["pkg:pypi/fast-attn@2.8"]
    assert extra["properties"] == [{"name": "envbuilder:location", "value": f"/{PACKAGES}"}]
    assert "hashes" not in extra


def test_layers_with_locked_packages_are_not_read(case: Case):
    case.store.blob(case.image.manifest.layers[1].digest).unlink()
    assert len(artifacts_of(case.image, case.store)) == 2


def test_the_same_image_makes_the_same_bytes(case: Case):
    assert artifacts_of(case.image, case.store) == artifacts_of(case.image, Store(case.store.root))


def test_an_image_that_holds_another_lock_than_it_says_is_refused(case: Case):
    labels = dict(case.image.config.labels) | {"dev.envbuilder.lock": str(Digest.of(b"another"))}
    lying = dataclasses.replace(case.image, config=dataclasses.replace(case.image.config, labels=labels))
    with pytest.raises(ArtifactError, match="does not hold the lock of small"):
        artifacts_of(lying, case.store)


def test_images_of_others_have_no_artifacts(tmp_path: Path):
    store = Store(tmp_path / "store")
    assert artifacts_of(small_image(store), store) == ()


def test_the_manifest_follows_the_specification():
    artifact = Artifact(LOCK, "small.lock.toml", b"lock")
    subject = Descriptor(MANIFEST, Digest.of(b"image"), 5, {"org.opencontainers.image.ref.name": "small"})
    document = json.loads(artifact_manifest(artifact, subject, "2026-01-01T00:00:00Z"))
    assert document == {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": LOCK,
        "config": {
            "mediaType": "application/vnd.oci.empty.v1+json",
            "digest": "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
            "size": 2,
        },
        "layers": [
            {
                "mediaType": LOCK,
                "digest": str(Digest.of(b"lock")),
                "size": 4,
                "annotations": {"org.opencontainers.image.title": "small.lock.toml"},
            }
        ],
        "subject": {"mediaType": MANIFEST, "digest": str(Digest.of(b"image")), "size": 5},
        "annotations": {"org.opencontainers.image.created": "2026-01-01T00:00:00Z"},
    }


# -- on a registry ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Published:
    """A case whose image and artifacts are on a registry."""

    case: Case
    registry: FakeRegistry
    reference: Reference

    def publish(self) -> tuple[Descriptor, ...]:
        return publish_artifacts(self.case.image, self.case.store, self.reference)


@pytest.fixture(params=[True, False], ids=["api", "tag"])
def published(
    request: pytest.FixtureRequest, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Published]:
    private_configuration(monkeypatch, tmp_path / "configuration")
    quick_retries(monkeypatch)
    with fake_registry(referrers=request.param) as registry:
        reference = Reference.parse(registry.reference("team/small"))
        push(case.image, case.store, reference)
        yield Published(case, registry, reference)


def test_lock_and_sbom_refer_to_the_image(published: Published):
    descriptors = published.publish()
    repository = open_repository(published.reference)
    found = repository.referrers(published.case.image.digest)
    assert {entry.digest: entry.artifact_type for entry in found} == dict(
        zip((d.digest for d in descriptors), (LOCK, SBOM), strict=True)
    )
    for artifact in artifacts_of(published.case.image, published.case.store):
        assert fetch_artifact(repository, published.case.image.digest, artifact.media_type) == artifact.data


def test_what_was_published_is_not_sent_again(published: Published):
    first = published.publish()
    published.registry.requests.clear()
    assert published.publish() == first
    assert not published.registry.lines("P*"), "neither POST, PUT nor PATCH"


def test_a_broken_publication_is_completed(published: Published):
    fault = published.registry.fail("PUT */manifests/*", status=503, after=1)
    with pytest.raises(RegistryUnreachableError):
        published.publish()
    published.registry.faults.remove(fault)
    published.publish()
    found = open_repository(published.reference).referrers(published.case.image.digest)
    assert {entry.artifact_type for entry in found} == {LOCK, SBOM}


def test_a_registry_that_takes_no_artifacts_is_a_warning(published: Published, caplog: pytest.LogCaptureFixture):
    published.registry.fail("PUT */manifests/*", status=400, code="MANIFEST_INVALID")
    with caplog.at_level(logging.WARNING):
        assert published.publish() == ()
    assert "lock and SBOM are not published" in caplog.text


def test_what_is_not_published_or_not_ours_is_said(published: Published):
    repository, digest = open_repository(published.reference, push=True), published.case.image.digest
    with pytest.raises(InputError, match=r"has no application/vnd\.cyclonedx"):
        fetch_artifact(repository, digest, SBOM)
    subject = published.case.image.descriptor
    document = json.loads(artifact_manifest(Artifact(SBOM, "x", b"x"), subject, "2026-01-01T00:00:00Z"))
    document["layers"] = []
    data = json.dumps(document).encode()
    published.registry.add_blob("team/small", b"{}")
    repository.put_manifest(data, MANIFEST, str(Digest.of(data)))
    with pytest.raises(ArtifactError, match="is not an artifact of one document"):
        fetch_artifact(repository, digest, SBOM)


def shown(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    parser = argparse.ArgumentParser()
    show.configure(parser)
    assert show.run(parser.parse_args(words)) == 0
    return capfd.readouterr().out


def test_show_prints_them_from_store_and_registry(
    published: Published, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    published.publish()
    case, reference = published.case, str(published.reference)
    lock, document = (artifact.data.decode() for artifact in artifacts_of(case.image, case.store))
    assert shown(capfd, "--lock", reference) == lock
    assert shown(capfd, "--sbom", f"{published.reference.name}@{case.image.digest}") == document
    listed = shown(capfd, "--referrers", reference).splitlines()
    assert sorted(line.split("\t")[0] for line in listed) == [SBOM, LOCK]
    found = json.loads(shown(capfd, "--referrers", "--json", reference))
    assert found["image"] == f"{published.reference.name}@{case.image.digest}"
    assert {row["type"] for row in found["referrers"]} == {LOCK, SBOM}
    with pytest.raises(InputError, match="has no image `v2`"):
        shown(capfd, "--sbom", f"{published.reference.name}:v2")
    case.store.put_image(case.image, "small")
    monkeypatch.setattr("envbuilder.store.store.default_root", lambda: case.store.root)
    assert shown(capfd, "--sbom", "small") == document
    small_image(case.store, "other")
    with pytest.raises(InputError, match="`other` is not an environment's"):
        shown(capfd, "--lock", "other")
