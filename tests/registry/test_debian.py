"""Against Debian's docker-registry: plain, with htpasswd, with TLS; and skopeo takes what we put there."""

from __future__ import annotations

import base64
import io
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.oci.model import CONFIG, MANIFEST, Config, Descriptor, Manifest
from envbuilder.registry.client import open_repository
from envbuilder.registry.errors import AccessRefusedError, NotInRegistryError, RegistryUnreachableError, RejectedError
from envbuilder.registry.reference import Reference
from envbuilder.run import run
from tests import engines
from tests.registries import debian_registry, make_authority, quick_retries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from envbuilder.registry.client import Repository
    from tests.registries import DebianRegistry

pytestmark = pytest.mark.slow

BIG = random.Random(1).randbytes(5_000_000)  # noqa: S311 (no secret)
LAYER = "application/vnd.oci.image.layer.v1.tar"


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch, configuration: Path) -> Path:
    """Let the client send chunks of a megabyte, and wait long enough for a registry that is started again."""
    quick_retries(monkeypatch, monolithic=1 << 20, chunk=1 << 20, backoff=0.1)
    return configuration


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[DebianRegistry]:
    with debian_registry(tmp_path / "registry") as registry:
        yield registry


def there(registry: DebianRegistry, name: str = "team/app") -> Repository:
    return open_repository(Reference.parse(f"{registry.address}/{name}"), push=True)


def put(repository: Repository, data: bytes) -> Digest:
    digest = Digest.of(data)
    sent: list[int] = []
    repository.put_blob(digest, len(data), lambda: io.BytesIO(data), sent.append)
    assert sum(sent) == len(data)
    assert repository.has_blob(digest)
    return digest


def image(repository: Repository) -> Digest:
    """Put an image of one layer, a tar without files, under the tag `v1`."""
    tar = b"\0" * 10240
    config = Config("amd64", "1970-01-01T00:00:00Z", {}, {}, (Digest.of(tar),), ()).to_bytes()
    parts = [Descriptor(kind, put(repository, data), len(data)) for kind, data in ((CONFIG, config), (LAYER, tar))]
    return repository.put_manifest(Manifest(parts[0], (parts[1],)).to_bytes(), MANIFEST, "v1")


def log_in(configuration: Path, registry: DebianRegistry, password: str) -> None:
    encoded = base64.b64encode(f"user:{password}".encode()).decode()
    (configuration / "config.json").write_text(json.dumps({"auths": {registry.address: {"auth": encoded}}}))


def test_blobs(registry: DebianRegistry):
    repository = there(registry)
    repository.check()
    for data in (b"", b"small", BIG):
        digest = put(repository, data)
        with repository.read_blob(digest) as pieces:
            assert b"".join(pieces) == data
    with repository.read_blob(Digest.of(BIG), 1_000_000, 2_000_001) as pieces:
        assert b"".join(pieces) == BIG[1_000_000:2_000_001]
    with pytest.raises(RejectedError, match="DIGEST_INVALID"):
        repository.put_blob(Digest.of(b"other"), len(BIG), lambda: io.BytesIO(BIG), lambda _: None)
    with pytest.raises(NotInRegistryError, match="BLOB_UNKNOWN"):
        repository.blob(Digest.of(b"other"))


def test_mount(registry: DebianRegistry):
    digest = put(there(registry, "other/app"), BIG)
    before = registry.stored_bytes()
    assert there(registry).mount(digest, "other/app")
    assert there(registry).has_blob(digest)
    assert registry.stored_bytes() == before
    assert not there(registry).mount(Digest.of(b"x"), "other/app")
    assert there(registry).blob(put(there(registry), b"x")) == b"x"


def test_images_tags_and_referrers(registry: DebianRegistry, tmp_path: Path):
    engines.need("skopeo")
    repository = there(registry)
    digest = image(repository)
    assert repository.resolve("v1") == repository.manifest(str(digest)).descriptor
    assert repository.resolve("v2") is None
    assert list(repository.tags()) == ["v1"]
    data = json.dumps({
        "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": "application/vnd.test",
        "config": Descriptor(CONFIG, Digest.of(b"small"), 5).to_json(), "layers": [],
        "subject": Descriptor(MANIFEST, digest, 1).to_json(),
    }).encode()  # fmt: skip
    put(repository, b"small")
    repository.put_manifest(data, MANIFEST, str(Digest.of(data)))
    assert [d.digest for d in repository.referrers(digest, "application/vnd.test")] == [Digest.of(data)]
    source = f"docker://{registry.address}/team/app@{digest}"
    run(
        [
            "skopeo",
            "--insecure-policy",
            "copy",
            "--preserve-digests",
            "--src-tls-verify=false",
            source,
            f"oci:{tmp_path}/copied",
        ]
    )
    assert (tmp_path / "copied" / "blobs" / "sha256" / digest.hex).exists()


def test_it_is_killed_in_the_middle_of_an_upload(tmp_path: Path):
    """The upload goes on, or begins anew, with the registry that is started in its place."""
    folder = tmp_path / "registry"
    started: list[DebianRegistry | None] = []
    with debian_registry(folder) as first:
        port = int(first.address.rpartition(":")[2])

        def source() -> BinaryIO:
            if first.process.poll() is None and len(started) == 3:
                first.process.kill()
                first.process.wait()
                started.append(second.__enter__())
            started.append(None)
            return io.BytesIO(BIG)

        second = debian_registry(folder, port=port)
        try:
            there(first).put_blob(Digest.of(BIG), len(BIG), source, lambda _: None)
            assert there(first).blob(Digest.of(BIG)) == BIG
        finally:
            second.__exit__(None, None, None)
    assert any(started)


def test_password(tmp_path: Path, configuration: Path):
    with debian_registry(tmp_path / "registry", password=True) as registry:
        with pytest.raises(AccessRefusedError, match="UNAUTHORIZED") as caught:
            there(registry).manifest("v1")
        assert f"docker login {registry.address}" in (caught.value.hint or "")
        log_in(configuration, registry, "wrong-one")
        with pytest.raises(AccessRefusedError) as caught:
            there(registry).check()
        assert "wrong-one" not in f"{caught.value} {caught.value.hint}"
        log_in(configuration, registry, "secret")
        there(registry).check()
        image(there(registry))


def test_tls(tmp_path: Path, configuration: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    authority = make_authority(tmp_path / "authority")
    with debian_registry(tmp_path / "registry", password=True, authority=authority) as registry:
        log_in(configuration, registry, "secret")
        with pytest.raises(RegistryUnreachableError, match="not trusted"):
            there(registry).check()
        authority.trust(configuration, registry.address)
        repository = there(registry)
        with ThreadPoolExecutor(4) as pool:
            digests = list(pool.map(lambda n: put(repository, BIG[n:]), range(4)))
        assert [repository.blob(digest) for digest in digests] == [BIG[n:] for n in range(4)]
        assert image(repository) == Digest.of(repository.manifest("v1").data)


def test_it_stops_and_continues(registry: DebianRegistry):
    """A registry that hangs for a while is waited for."""
    repository = there(registry)
    digest = put(repository, BIG)
    os.kill(registry.process.pid, 19)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(repository.blob, digest)
        assert not future.done()
        os.kill(registry.process.pid, 18)
        assert future.result() == BIG
