"""kill -9 at random moments of pull and push, against a real registry: the store stays sound, the next run succeeds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from envbuilder.images.pull import pull
from envbuilder.images.push import push
from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import Directory, File
from envbuilder.registry.reference import Reference
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from envbuilder.store.verify import verify
from tests.registries import debian_registry, private_configuration
from tests.smallimage import put_image, put_layer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envbuilder.oci.model import Image, Layer

pytestmark = pytest.mark.slow

#: Commands that were killed at work, in each test; and attempts before the next command is let end.
KILLS, IN_A_ROW = 32, 3


@dataclass(frozen=True)
class Source:
    """The image, the store that it was made in, and where it goes."""

    image: Image
    store: Store
    address: str

    def reference(self, name: str) -> Reference:
        return Reference.parse(f"{self.address}/{name}:v1")


def layer(store: Store, name: str, size: int) -> Layer:
    """Put a layer into the store, half of which compresses well."""
    dice = random.Random(name)  # noqa: S311 (no secret)
    pieces = (dice.randbytes(size // 40) + bytes(size // 40) for _ in range(20))
    files = (File(f"{name}/{number}.bin", Bytes(piece)) for number, piece in enumerate(pieces))
    return put_layer(store, [Directory(name), *files])


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    private_configuration(monkeypatch, tmp_path / "configuration")
    store = Store(tmp_path / "source" / "envbuilder" / "store")
    layers = [layer(store, f"layer{number}", size << 20) for number, size in enumerate((24, 12, 6, 3, 1))]
    made = put_image(store, "made", layers)
    with debian_registry(tmp_path / "registry") as registry:
        yield Source(made, store, registry.address)


def start(cache: Path, *words: str) -> subprocess.Popen[bytes]:
    """Run a command on the store of a cache folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "envbuilder", *words], env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def seconds_of(cache: Path, *words: str) -> float:
    begin = time.monotonic()
    with start(cache, *words) as process:
        assert process.wait() == 0
    return time.monotonic() - begin


def kill(process: subprocess.Popen[bytes], after: float) -> bool:
    """Kill a command after some seconds; return whether it was still at work."""
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def test_kill_9_of_pull(source: Source, tmp_path: Path):
    reference = source.reference("kill/pull")
    push(source.image, source.store, reference)
    whole = seconds_of(tmp_path / "undisturbed", "pull", str(reference))
    dice, killed, number = random.Random(1), 0, 0  # noqa: S311 (no secret)

    while killed < KILLS:
        number += 1
        cache = tmp_path / f"cache{number}"
        for _ in range(IN_A_ROW):
            killed += kill(start(cache, "pull", str(reference)), dice.uniform(0.2, 0.9) * whole)
        store = Store(cache / "envbuilder" / "store")
        assert verify(store, trees=True).clean
        pulled = pull(reference, store)
        assert pulled.image == source.image
        assert verify(store, trees=True).clean
        root = root_tree(store, pulled.image)
        assert (root / "layer0" / "19.bin").stat().st_size == 2 * ((24 << 20) // 40)
        assert [path.name for path in (store.root / "partial").iterdir() if not path.name.startswith(".tmp-")] == []
    assert number <= KILLS


def test_kill_9_of_push(source: Source, tmp_path: Path):
    cache = tmp_path / "source"
    whole = seconds_of(cache, "push", "made", str(source.reference("kill/first")))
    dice, killed, number = random.Random(2), 0, 0  # noqa: S311 (no secret)

    while killed < KILLS:
        number += 1
        # Each in a registry of its own as far as the store knows: nothing is to be taken over.
        reference = source.reference(f"kill/push{number}")
        (source.store.root / "known" / "registry").rename(tmp_path / f"known{number}")
        for _ in range(IN_A_ROW):
            killed += kill(start(cache, "push", "made", str(reference)), dice.uniform(0.2, 0.9) * whole)
        pushed = push(source.image, source.store, reference)
        assert pushed.reference.digest == source.image.digest
        store = Store(tmp_path / f"back{number}")
        assert pull(reference, store, unpack=False).image == source.image
        assert verify(store).clean
    assert verify(source.store).clean
    assert number <= KILLS
