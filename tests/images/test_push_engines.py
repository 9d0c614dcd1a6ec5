"""Other people's tools take what we push, and we take what they push: Debian's registry, skopeo, Docker."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from envbuilder.cli.main import main
from envbuilder.images.load import load
from envbuilder.images.pull import pull
from envbuilder.images.push import push
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import DOCKER_MANIFEST, MANIFEST, TOC_DIGEST
from envbuilder.registry.reference import Reference
from envbuilder.store.store import Store
from tests.engines import need
from tests.registries import debian_registry, private_configuration
from tests.smallimage import small_image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envbuilder.oci.model import Image

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with debian_registry(tmp_path_factory.mktemp("registry")) as registry:
        yield registry.address


@dataclass(frozen=True)
class Made:
    """An image that runs, and the store that it was made in."""

    image: Image
    store: Store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    store = Store(tmp_path_factory.mktemp("source") / "store")
    return Made(small_image(store), store)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Give the user's store, which is empty, in a folder of the test's own."""
    private_configuration(monkeypatch, tmp_path / "configuration")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return Store(tmp_path / "cache" / "envbuilder" / "store")


def skopeo(*words: str) -> str:
    need("skopeo")
    done = subprocess.run(["skopeo", "--insecure-policy", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def docker(engine: str, *words: str) -> str:
    done = subprocess.run(
        ["docker", *words], capture_output=True, text=True, check=False, env=os.environ | {"DOCKER_HOST": engine}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def greets(capfd: pytest.CaptureFixture[str], name: str) -> bool:
    """Return whether the image of that name runs in the sandbox."""
    need("bwrap")
    capfd.readouterr()
    code = main(["launch", name, "--", "sh", "-c", "echo $GREETING; exit 3"])
    return (code, capfd.readouterr().out) == (3, "hello from the image\n")


def test_what_we_push_is_taken_by_skopeo(address: str, made: Made, tmp_path: Path):
    push(made.image, made.store, Reference.parse(f"{address}/ours/skopeo:v1"))

    for name in (f"{address}/ours/skopeo:v1", f"{address}/ours/skopeo@{made.image.digest}"):
        inspected = json.loads(skopeo("inspect", "--tls-verify=false", f"docker://{name}"))
        assert inspected["Digest"] == str(made.image.digest)
        assert inspected["Layers"] == [str(layer.digest) for layer in made.image.manifest.layers]
    skopeo("copy", "--src-tls-verify=false", f"docker://{address}/ours/skopeo:v1", f"oci:{tmp_path}/layout:v1")
    (entry,) = json.loads((tmp_path / "layout" / "index.json").read_bytes())["manifests"]
    assert entry["digest"] == str(made.image.digest)


def test_what_we_push_runs_in_docker(address: str, made: Made, docker_engine: str):
    reference = push(made.image, made.store, Reference.parse(f"{address}/ours/docker:v1")).reference

    docker(docker_engine, "pull", "-q", str(reference))

    words = ("run", "--rm", "--network", "none", str(reference), "sh", "-c", "echo $GREETING; id -un")
    assert docker(docker_engine, *words) == "hello from the image\nroot"


def test_what_we_push_comes_back_and_runs(address: str, made: Made, machine: Store, capfd: pytest.CaptureFixture[str]):
    push(made.image, made.store, Reference.parse(f"{address}/ours/small:v1"))

    assert main(["pull", f"{address}/ours/small:v1"]) == 0

    assert capfd.readouterr().out == f"{address}/ours/small@{made.image.digest}\n"
    assert machine.images() == {"small": made.image.digest}
    assert machine.image(made.image.digest) == made.image
    assert greets(capfd, "small")


@pytest.mark.parametrize("kind", ["oci", "v2s2"])
def test_what_skopeo_pushes_runs_here(
    address: str, made: Made, machine: Store, capfd: pytest.CaptureFixture[str], kind: str
):
    where = f"docker://{address}/theirs/{kind}:v1"
    skopeo("copy", "--dest-tls-verify=false", "--format", kind, f"oci:{made.store.root}:small", where)
    raw = skopeo("inspect", "--raw", "--tls-verify=false", where).encode()

    pulled = pull(Reference.parse(f"{address}/theirs/{kind}:v1"), machine, name="theirs")

    assert pulled.image.digest == Digest.of(raw)
    assert pulled.image.descriptor.media_type == {"oci": MANIFEST, "v2s2": DOCKER_MANIFEST}[kind]
    assert [layer.digest for layer in pulled.image.manifest.layers] == [
        layer.digest for layer in made.image.manifest.layers
    ]
    assert greets(capfd, "theirs")


def test_what_docker_pushes_runs_here_and_there_again(
    address: str, made: Made, machine: Store, docker_engine: str, capfd: pytest.CaptureFixture[str]
):
    tag = load(made.image, made.store, "docker", "small")
    docker(docker_engine, "tag", tag, f"{address}/theirs/docker:v1")
    docker(docker_engine, "push", "-q", f"{address}/theirs/docker:v1")

    pulled = pull(Reference.parse(f"{address}/theirs/docker:v1"), machine, name="theirs")

    assert not any(TOC_DIGEST in layer.annotations for layer in pulled.image.manifest.layers)  # compressed anew
    assert pulled.image.config.diff_ids == made.image.config.diff_ids
    assert greets(capfd, "theirs")
    words = ("run", "--rm", "--network", "none", load(pulled.image, machine, "docker", "theirs"), "sh", "-c", "id -un")
    assert docker(docker_engine, *words) == "root"
    back = push(pulled.image, machine, Reference.parse(f"{address}/back/docker:v1"))
    assert (back.sent, back.reference.digest) == (0, pulled.image.digest)
