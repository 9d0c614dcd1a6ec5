from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from envbuilder.errors import HostError, InputError
from envbuilder.images.load import archive, load, reference
from envbuilder.oci.digest import Digest
from envbuilder.store.store import Store
from tests.engines import need
from tests.smallimage import small_image

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.oci.model import Image


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("load") / "store")


@pytest.fixture(scope="module")
def image(store: Store) -> Image:
    return small_image(store)


def test_reference():
    digest = Digest("0123456789abcdef" * 4)
    assert reference("ai-v4", digest) == "envbuilder/ai-v4:0123456789ab"
    assert reference("My Env+extra_", digest) == "envbuilder/my-env-extra:0123456789ab"


def test_archive_is_a_layout_and_a_saved_image(store: Store, image: Image):
    data = b"".join(archive(store, image, "envbuilder/small:tag"))
    assert data == b"".join(archive(store, image, "envbuilder/small:tag"))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]
    (saved,) = json.loads(files["manifest.json"])
    assert saved["RepoTags"] == ["envbuilder/small:tag"]
    assert json.loads(files[saved["Config"]])["rootfs"]["diff_ids"] == [str(d) for d in image.config.diff_ids]
    assert len(saved["Layers"]) == 2
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["digest"] == str(image.digest)
    assert entry["annotations"]["io.containerd.image.name"] == "docker.io/envbuilder/small:tag"
    for name, content in files.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize("transport", ["oci", "oci-archive", "docker-archive"])
def test_skopeo_accepts_it(store: Store, image: Image, tmp_path: Path, transport: str):
    need("skopeo")
    file = tmp_path / "image.tar"
    file.write_bytes(b"".join(archive(store, image, "envbuilder/small:tag")))
    source = f"oci:{store.root}:small" if transport == "oci" else f"{transport}:{file}"
    done = subprocess.run(["skopeo", "inspect", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    inspected = json.loads(done.stdout)
    assert len(inspected["Layers"]) == 2
    if transport != "docker-archive":  # that one has manifests of its own
        assert inspected["Digest"] == str(image.digest)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK forgets its socket
def test_an_engine_that_is_not_there(store: Store, image: Image, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("CONTAINER_HOST", f"unix://{tmp_path}/none.sock")
    for engine, start in (("docker", "systemctl start docker"), ("podman", "systemctl --user start podman.socket")):
        with pytest.raises(HostError, match=f"the {engine} engine cannot be used") as caught:
            load(image, store, engine, "small")
        assert start in (caught.value.hint or "")
        del caught
    gc.collect()  # now, where that warning is ignored
    with pytest.raises(InputError, match="`dokcer`"):
        load(image, store, "dokcer", "small")


@pytest.mark.docker
def test_docker_runs_it(store: Store, image: Image, docker_engine: str, monkeypatch: pytest.MonkeyPatch):
    tag = load(image, store, "docker", "small")
    assert tag == f"envbuilder/small:{image.digest.hex[:12]}"
    words = ["docker", "run", "--rm", "--network", "none", tag, "sh", "-c", "echo $GREETING; id -un; exit 3"]
    environment = os.environ | {"DOCKER_HOST": docker_engine}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (3, "hello from the image\nroot\n"), done.stderr
    # Loaded once: the second time no layer is read.
    monkeypatch.setattr("envbuilder.images.load.archive", None)
    assert load(image, store, "docker", "small") == tag
