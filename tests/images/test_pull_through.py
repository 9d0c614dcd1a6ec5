"""A mirror in front of a registry: Debian's docker-registry as a pull-through cache of another one."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from envbuilder.images.pull import pull
from envbuilder.images.push import push
from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import File
from envbuilder.registry.errors import RegistryUnreachableError
from envbuilder.registry.reference import Reference
from envbuilder.store.store import Store
from tests.registries import DebianRegistry, debian_registry, private_configuration, quick_retries
from tests.smallimage import put_image, put_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.docker


@contextmanager
def pull_through(folder: Path, origin: str) -> Iterator[DebianRegistry]:
    """Run a docker-registry that passes on what ``origin`` has, and keeps it."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\nhttp: {{addr: '{address}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{folder}/data'}}}}\nproxy: {{remoteurl: 'http://{origin}'}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
    try:
        wait_until(lambda: listens(address), "the mirror does not start")
        yield DebianRegistry(address, folder, process)
    finally:
        process.terminate()
        process.wait(10)


def listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def wait_until(true: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[DebianRegistry]:
    with debian_registry(tmp_path / "registry") as registry:
        yield registry


@pytest.fixture
def mirror(registry: DebianRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DebianRegistry]:
    """Give a mirror that keeps what it passes on, and have this machine ask it first."""
    configuration = private_configuration(monkeypatch, tmp_path / "home")
    with pull_through(tmp_path / "mirror", registry.address) as mirror:
        (configuration / "containers").mkdir()
        (configuration / "containers" / "registries.conf").write_text(
            f'[[registry]]\nprefix = "{registry.address}"\nlocation = "{registry.address}"\n'
            f'[[registry.mirror]]\nlocation = "{mirror.address}"\n'
        )
        yield mirror


def test_the_registry_gives_each_layer_once(
    registry: DebianRegistry, mirror: DebianRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    quick_retries(monkeypatch, backoff=0.001)
    made = Store(tmp_path / "made")
    image = put_image(made, "small", [put_layer(made, [File(f"etc/{n}", Bytes(n.encode() * 9000))]) for n in "abc"])
    reference = Reference.parse(f"{registry.address}/team/small:1")
    push(image, made, reference)
    assert mirror.stored_bytes() == 0, "pushes go to the registry itself"
    pulled = pull(reference, Store(tmp_path / "first"))
    assert pulled.image.digest == image.digest
    size = sum(layer.size for layer in image.manifest.layers)
    wait_until(lambda: mirror.stored_bytes() >= size, "the mirror keeps nothing")
    registry.process.terminate()
    registry.process.wait()
    by_digest = Reference.parse(f"{registry.address}/team/small@{image.digest}")
    assert pull(by_digest, Store(tmp_path / "second")).image.digest == image.digest
    # Without both, it is told.
    mirror.process.terminate()
    mirror.process.wait()
    with pytest.raises(RegistryUnreachableError):
        pull(by_digest, Store(tmp_path / "third"))
