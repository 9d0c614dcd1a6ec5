"""``envbuilder cache``: what it prints, and its exit codes."""

from __future__ import annotations

import gc as garbage
import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from envbuilder.cli.cache_gc import parse_size
from envbuilder.cli.cache_verify import repair
from envbuilder.cli.main import main
from envbuilder.errors import InputError
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import File
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from envbuilder.store.verify import Incomplete
from tests.smallimage import put_image, put_layer

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Cache:
    """Runs the command in this process; what it holds of the store is let go."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> Done:
        try:
            code = main(["cache", *words])
        except SystemExit as end:  # --help
            code = int(end.code or 0)
        garbage.collect()
        return Done(code, *self._capsys.readouterr())


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> Cache:
    return Cache(capsys)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Give a store with two images that share a layer, one of them unpacked, and a wheel that was not used for days."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = Store(tmp_path / "envbuilder" / "store")
    base = put_layer(store, [File("base", Bytes(os.urandom(30_000)))])
    one = put_image(store, "one", [base, put_layer(store, [File("one", Bytes(os.urandom(20_000)))])])
    put_image(store, "two", [base])
    root_tree(store, one)
    wheel = store.put(b"PK\x03\x04" + os.urandom(100_000))
    os.utime(store.blob(wheel), (time.time() - 9e5,) * 2)
    store.close()
    return store


def document(done: Done) -> dict[str, object]:
    found: dict[str, object] = json.loads(done.stdout)
    assert found["schema"] == 1
    return found


def test_ls_pin_and_rm(store: Store, cache: Cache):
    done = cache("pin", "one")
    assert (done.returncode, done.stdout) == (0, "one\n"), done.stderr
    images = document(cache("ls", "--json"))["images"]
    assert isinstance(images, list)
    one, two = images
    assert (one["name"], one["unpacked"], one["pinned"]) == ("one", True, True)
    assert (two["name"], two["unpacked"], two["pinned"]) == ("two", False, False)
    assert one["size"] > one["own"] > 20_000
    assert two["size"] > 30_000 > two["own"]
    assert one["last-used"].startswith("20")
    assert cache("ls").stdout.splitlines()[0].split("\t")[4] == "unpacked, pinned"
    refused = cache("rm", "two", "one")
    assert refused.returncode == 2
    assert "`one` is pinned" in refused.stderr
    assert "cache pin --remove one" in refused.stderr
    assert set(store.images()) == {"one", "two"}
    assert cache("pin", "--remove", "one").stdout == ""
    assert cache("rm", "one").stdout == "one\n"
    assert set(store.images()) == {"two"}


@pytest.mark.usefixtures("store")
def test_du(cache: Cache):
    found = document(cache("du", "--json"))
    kinds = found["kinds"]
    assert isinstance(kinds, dict)
    assert {kind: entry["count"] for kind, entry in kinds.items()} == {
        "layer": 2, "wheel": 1, "document": 4, "tree": 2, "root": 1,
    }  # fmt: skip
    assert isinstance(found["shared"], int)
    assert 30_000 < found["shared"] < 40_000
    assert "unpacked layers\t2\t" in cache("du").stdout


def test_gc(store: Store, cache: Cache, monkeypatch: pytest.MonkeyPatch):
    dry = cache("gc", "--budget", "0", "--dry-run", "--json")
    assert dry.returncode == 1
    assert "over the budget" in dry.stderr
    planned = document(dry)
    assert [entry["kind"] for entry in planned["removed"] if entry["reason"] == "budget"] == ["wheel"]  # type: ignore[attr-defined]
    monkeypatch.setenv("ENVBUILDER_BUDGET", "0")
    done = document(cache("gc", "--json"))
    assert done["removed"] == planned["removed"]
    assert (planned["dry-run"], done["dry-run"]) == (True, False)
    text = cache("gc", "--now", "--budget", "0")
    assert "evicted to keep to the budget" in text.stdout
    assert not list((store.root / "trees").iterdir())
    text = cache("gc", "--budget", "1GB")
    assert text.returncode == 0
    assert " left\n" in text.stdout
    assert set(store.images()) == {"one", "two"}


def test_verify(store: Store, cache: Cache):
    done = cache("verify", "--all")
    assert (done.returncode, done.stdout.split(": ")[-1]) == (0, "sound\n"), done.stderr
    image = store.image(store.images()["two"])
    store.close()
    layer = store.blob(image.manifest.layers[0].digest)
    layer.write_bytes(layer.read_bytes()[:-1])
    done = cache("verify", "--json")
    assert done.returncode == 1
    found = document(done)
    assert [entry["name"] for entry in found["damaged"]] == [layer.name]  # type: ignore[attr-defined]
    assert [entry["repair"] for entry in found["incomplete"]] == [  # type: ignore[attr-defined]
        "envbuilder build one",
        "envbuilder build two",
    ]
    done = cache("verify")
    assert done.returncode == 1
    assert "incomplete: `one` misses 1 blobs; run `envbuilder build one`" in done.stdout


def test_how_images_are_repaired():
    def command(name: str) -> str:
        return repair(Incomplete(name, Digest.of(b""), ()))

    assert command("ai-v4") == "envbuilder build ai-v4"
    assert command("ai-v4+flash-attn") == "envbuilder build ai-v4 --extra flash-attn"
    assert command("registry.example:5000/ai-v4:1") == "envbuilder pull registry.example:5000/ai-v4:1"


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("50GB", 50 * 10**9), ("1.5 kB", 1500), ("2GiB", 2 << 30), ("3T", 3 * 10**12)],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1XB", "1 GB 2"])
def test_no_sizes(text: str):
    with pytest.raises(InputError, match="is not a size"):
        parse_size(text)


@pytest.mark.usefixtures("store")
def test_wrong_words(cache: Cache):
    done = cache("verfy")
    assert done.returncode == 2
    assert "did you mean `verify`?" in done.stderr
    done = cache("rm", "on")
    assert (done.returncode, "did you mean `one`?" in done.stderr) == (2, True)
    assert cache().returncode == 2
    for action in ("ls", "du", "gc", "verify", "pin", "rm"):
        assert "example: envbuilder cache" in cache(action, "--help").stdout
