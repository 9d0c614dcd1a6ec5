"""Bases as others push them, to a registry of others: built upon, run, loaded."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from typing import TYPE_CHECKING

import docker
import pytest

from envbuilder.images.artifacts import LOCK, SBOM, artifacts_of, fetch_artifact, publish_artifacts
from envbuilder.images.build import Source, with_base
from envbuilder.images.layout import write_layout
from envbuilder.images.load import load
from envbuilder.images.pull import pull
from envbuilder.images.push import push
from envbuilder.launch.engines import engine
from envbuilder.launch.job import Job
from envbuilder.oci.blob import Compression
from envbuilder.oci.layer import Directory
from envbuilder.oci.model import INDEX, LAYER_GZIP
from envbuilder.registry.client import open_repository
from envbuilder.registry.reference import Reference
from envbuilder.spec.recipe import ImageBase, read_recipe
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from tests import engines
from tests.images.bases import OS_RELEASE, Plan, file, index_of
from tests.images.test_build import RECIPE, Machine, glibc, machine
from tests.registries import debian_registry, private_configuration
from tests.smallimage import _programs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envbuilder.oci.layer import Entry
    from envbuilder.oci.model import Image
    from tests.system.debs import Thing

__all__ = ["machine"]

pytestmark = pytest.mark.docker
PROCESS = {"Env": ["PATH=/usr/bin:/bin", "TOOL=1"], "Labels": {"maintainer": "somebody"}, "Cmd": ["sh"]}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        private_configuration(patch, tmp_path_factory.mktemp("configuration"))
        with debian_registry(tmp_path_factory.mktemp("registry")) as running:
            yield running.address


@pytest.fixture(scope="module")
def below(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Image]:
    """Give an image that runs ``sh``, with layers compressed in every way."""
    store = Store(tmp_path_factory.mktemp("below") / "store")
    plan = Plan(layers(), PROCESS, [Compression.GZIP, Compression.ZSTD, Compression.NONE])
    return store, plan.put(store)


def layers() -> list[list[Entry]]:
    """Return layers of which an upper one removes files of a lower one."""
    return [
        [*_programs(), file("etc/os-release", OS_RELEASE), file("srv/secret/a"), file("srv/kept"), file("srv/old/x")],
        [file("srv/.wh.secret"), Directory("srv/old"), file("srv/old/.wh..wh..opq"), file("srv/old/new")],
        [file(thing.path, _data(thing), 0o755) for thing in glibc()],
    ]


def _data(thing: Thing) -> bytes:
    assert isinstance(thing.text, bytes)
    return thing.text


def copy(base: tuple[Store, Image], folder: Path, to: str, *words: str) -> None:
    """Push a base as skopeo does."""
    engines.need("skopeo")
    write_layout(base[1], base[0], folder / "layout", "base")
    argv = ["skopeo", "copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false", *words]
    subprocess.run([*argv, f"oci:{folder}/layout:base", f"docker://{to}"], check=True)


def source_on(machine: Machine, reference: str) -> Source:
    return dataclasses.replace(
        machine.source, recipe=dataclasses.replace(machine.source.recipe, base=ImageBase(reference))
    )


def build_on(machine: Machine, store: Store, reference: str) -> Image:
    return machine.build(store, with_base(source_on(machine, reference), store))


def run_in(machine: Machine, store: Store, image: Image, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    code = engine("sandbox").run(Job("small", words, machine.folder, {}), image.config, str(root_tree(store, image)))
    out, error = capfd.readouterr()
    assert code == 0, error
    return out


@pytest.mark.usefixtures("docker_engine")
def test_an_environment_on_a_base_of_others(
    machine: Machine, registry: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    name = f"{registry}/base:docker"
    own = Store(tmp_path / "below")
    copy((own, Plan(layers(), PROCESS).put(own)), tmp_path, name, "--format", "v2s2")
    store = machine.store("bases")
    image = build_on(machine, store, name)
    manifest = json.loads(open_repository(Reference.parse(name)).manifest("docker").data)
    assert manifest["mediaType"] == "application/vnd.docker.distribution.manifest.v2+json"
    assert [str(layer.digest) for layer in image.manifest.layers[:3]] == [x["digest"] for x in manifest["layers"]]
    assert {layer.media_type for layer in image.manifest.layers} == {LAYER_GZIP}
    assert image.config.labels["org.opencontainers.image.base.name"] == name

    assert run_in(machine, store, image, capfd, "app") == "app runs\n"
    program = "import os, sys; print(sys.prefix, os.environ['TOOL'], os.environ['PATH'])"
    path = "/opt/env/bin:/opt/python/bin:/usr/bin:/bin"
    assert run_in(machine, store, image, capfd, "python", "-c", program) == f"/opt/env 1 {path}\n"
    assert (
        run_in(machine, store, image, capfd, "sh", "-c", "echo /srv/* /srv/old/*")
        == "/srv/kept /srv/old /srv/old/new\n"
    )

    tag = load(image, store, "docker", "small")
    client = docker.from_env()
    try:
        words = ["sh", "-c", "app; echo /srv/* /srv/old/*"]
        out = client.containers.run(tag, words, network_mode="host", remove=True)
        client.images.remove(tag)
    finally:
        client.close()
    assert out == b"app runs\n/srv/kept /srv/old /srv/old/new\n"


def test_an_index_gives_the_image_of_the_locks_platform(
    machine: Machine, registry: str, below: tuple[Store, Image], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    copy(below, tmp_path, f"{registry}/multi:one", "--preserve-digests")
    other = Plan([[file("other")]], architecture="arm64")
    other_store = Store(tmp_path / "other")
    other_image = other.put(other_store)
    write_layout(other_image, other_store, tmp_path / "arm", "base")
    subprocess.run(
        ["skopeo", "copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false", "--preserve-digests",
         f"oci:{tmp_path}/arm:base", f"docker://{registry}/multi:two"], check=True,
    )  # fmt: skip
    index = index_of(
        (other_image, {"os": "linux", "architecture": "arm64", "variant": "v8"}),
        (below[1], {"os": "linux", "architecture": "amd64"}),
        media_type=INDEX,
    )
    reference = Reference.parse(f"{registry}/multi:all")
    digest = open_repository(reference, push=True).put_manifest(index, INDEX, "all")

    store = machine.store("bases")
    image = build_on(machine, store, str(reference))
    assert image.manifest.layers[:3] == below[1].manifest.layers
    assert image.config.labels["org.opencontainers.image.base.digest"] == str(digest)
    assert run_in(machine, store, image, capfd, "app") == "app runs\n"

    # What was built is pushed, with lock and SBOM; skopeo and our own pull read it back.
    to = Reference.parse(f"{registry}/small:1")
    push(image, store, to)
    published = publish_artifacts(image, store, to)
    assert len(published) == 2
    assert publish_artifacts(image, store, to) == published
    repository = open_repository(to)
    assert {entry.digest for entry in repository.referrers(image.digest)} == {entry.digest for entry in published}
    for artifact in artifacts_of(image, store):
        assert fetch_artifact(repository, image.digest, artifact.media_type) == artifact.data
    assert {entry.artifact_type for entry in repository.referrers(image.digest)} == {LOCK, SBOM}
    inspected = subprocess.run(
        ["skopeo", "inspect", "--tls-verify=false", f"docker://{registry}/small:1"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert json.loads(inspected.stdout)["Digest"] == str(image.digest)
    pulled = pull(to, Store(tmp_path / "pulled")).image
    assert artifacts_of(pulled, Store(tmp_path / "pulled")) == artifacts_of(image, store)


def test_the_bases_own_python_is_used(
    machine: Machine, registry: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """A base made of one of our images that has an interpreter, as any other base with Python would have it."""
    store = machine.store("bases")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('environment = "/opt/env"', 'environment = "/opt/first"'))
    first = dataclasses.replace(machine.source, recipe=read_recipe(tmp_path / "recipe.toml"))
    push(machine.build(store, first), store, Reference.parse(f"{registry}/python:1"))
    (tmp_path / "own.toml").write_text(RECIPE.replace('["host"]', '["base"]').replace("/opt/python", "/opt/none"))
    recipe = dataclasses.replace(read_recipe(tmp_path / "own.toml"), base=ImageBase(f"{registry}/python:1"))
    second = machine.store("on-python")
    on_python = dataclasses.replace(machine.source, recipe=recipe)
    image = machine.build(second, on_python)
    assert image.config.labels["dev.envbuilder.interpreter"] == f"base {'.'.join(platform.python_version_tuple()[:2])}"
    program = "import sys, lib; print(sys.prefix, sys.base_prefix, lib.__file__.split('/lib/')[0])"
    assert run_in(machine, second, image, capfd, "python", "-c", program) == "/opt/env /opt/python /opt/env\n"
