"""``cache plan`` and ``cache warm``, and the options of ``build`` that have to do with caches."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.cli import build, buildcache, cache
from envbuilder.cli.console import format_size
from envbuilder.errors import InputError
from envbuilder.images.fleet import Listing, Piece, fleet_plan
from envbuilder.images.push import push
from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import File
from envbuilder.registry.reference import Reference
from envbuilder.store.store import Store, default_root
from tests.registries import fake_registry, private_configuration
from tests.smallimage import put_image, put_layer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envbuilder.oci.model import Image
    from tests.registries import FakeRegistry

#: The catalog of this project.
CATALOG = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    private_configuration(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("environments", "lockfiles", "images"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as registry:
        yield registry


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cache.configure(parser)
    return cache.run(parser.parse_args(argv))


def two_images(store: Store) -> tuple[Image, Image]:
    """Put two images into the store: ``base`` of two layers, and ``more`` with one on top."""
    layers = [
        put_layer(store, [File(name, Bytes(name.encode() * 500))]) for name in ("etc/one", "etc/two", "etc/three")
    ]
    for number, layer in enumerate(layers[:2]):
        store.remember("layer", str(number), layer.to_json())
    return put_image(store, "base", layers[:2]), put_image(store, "more", layers)


# -- the arithmetic -----------------------------------------------------------------------------------------------


def listing(name: str, *pieces: tuple[str, int, int | None]) -> Listing:
    return Listing(name, tuple(Piece(id_, id_, size, unpacked) for id_, size, unpacked in pieces))


BASE = listing("base", ("a", 100, 300), ("b", 10, 30))
MORE = listing("more", ("a", 100, 300), ("b", 10, 30), ("c", 5, 9), ("d", 2, None), ("d", 2, None))
OTHER = listing("other", ("c", 5, 9), ("e", 1, 2))


def test_what_a_host_has_is_not_fetched():
    plan = fleet_plan([MORE], [BASE], 1000)
    (share,) = plan.shares
    assert [piece.id for piece in share.missing] == ["c", "d"]
    assert (plan.size, plan.total, share.unpacked, share.unmeasured) == (7, 7000, 9, 1)
    assert plan.seconds(plan.total, 0.000_056) == pytest.approx(1.0)
    assert MORE.size == 117


def test_what_images_share_is_fetched_once():
    plan = fleet_plan([BASE, OTHER, MORE], [])
    assert [[piece.id for piece in share.missing] for share in plan.shares] == [["a", "b"], ["c", "e"], ["d"]]
    assert plan.size == sum(share.size for share in plan.shares) == 118
    assert plan.shares[0].unpacked == 330


def test_a_host_that_has_all_fetches_nothing():
    plan = fleet_plan([BASE], [MORE], 3)
    assert (plan.size, plan.shares[0].unpacked, plan.total) == (0, 0, 0)


# -- the command --------------------------------------------------------------------------------------------------


def test_images_of_the_store(capsys: pytest.CaptureFixture[str]):
    base, more = two_images(Store(default_root()))
    assert run("plan", "more", "--have", "base", "--hosts", "2000", "--bandwidth", "10", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    top = more.manifest.layers[2]
    assert document["schema"] == 1
    assert document["estimated"] is False
    assert document["host"] == {"bytes": top.size}
    assert document["registry"]["bytes"] == 2000 * top.size
    (image,) = document["images"]
    assert image["unpacked"] == {"bytes": 0, "layers-not-known": 1}, "nothing is remembered of the third layer"
    assert image["fetch"]["layers"] == [
        {"id": str(top.digest), "title": "a test", "bytes": top.size, "unpacked-bytes": None}
    ]
    assert run("plan", "base", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["host"]["bytes"] == sum(layer.size for layer in base.manifest.layers)
    assert document["images"][0]["unpacked"]["bytes"] > 3000


def test_the_table_says_it_in_words(capsys: pytest.CaptureFixture[str]):
    _, more = two_images(Store(default_root()))
    size = more.manifest.layers[2].size
    assert run("plan", "more", "--have", "base", "--hosts", "2000") == 0
    table, host, alone, once = capsys.readouterr().out.splitlines()
    assert table.split("\t") == [
        "more",
        "3",
        format_size(sum(x.size for x in more.manifest.layers)),
        "1",
        f"{size} B",
        "-",
    ]
    assert host == f"a host that has base fetches {size} B"
    assert alone.startswith("2000 hosts cost one registry ")
    assert once.startswith(f"it gives {size} B once")


def test_an_image_of_which_only_the_registry_knows(registry: FakeRegistry, capsys: pytest.CaptureFixture[str]):
    base, more = two_images(store := Store(default_root()))
    push(more, store, Reference.parse(registry.reference("team/more")))
    store.drop_image("more")
    registry.requests.clear()
    assert run("plan", registry.reference("team/more"), "--have", "base", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["host"]["bytes"] == more.manifest.layers[2].size
    assert base.manifest.layers == more.manifest.layers[:2]
    assert not registry.lines("GET */blobs/*"), "the manifest is enough"


def test_what_was_not_built_is_estimated_by_its_lock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ENVBUILDER_CATALOG", str(CATALOG))
    with caplog.at_level(logging.WARNING):
        assert run("plan", "ai-v4", "--have", "base-v4", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimated"] is True
    assert "ai-v4, base-v4: not built on this machine" in caplog.text
    (image,) = document["images"]
    assert 0 < image["fetch"]["bytes"] < image["bytes"] / 5, "base-v4's layers are a prefix of ai-v4's"


def test_unknown_names_are_told():
    two_images(Store(default_root()))
    with pytest.raises(InputError, match="no environment and no image is named `bace`") as caught:
        run("plan", "bace")
    assert caught.value.hint == "did you mean `base`?"
    with pytest.raises(InputError, match="no environment is named `x`"):
        run("warm", "x")


@pytest.mark.parametrize("argv", [("--hosts", "0"), ("--hosts", "x"), ("--bandwidth", "-1"), ("--bandwidth", "inf")])
def test_impossible_numbers_are_refused(argv: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run("plan", "base", *argv)
    assert "must be a number" in capsys.readouterr().err


def test_warm_brings_an_image_and_makes_its_root(
    registry: FakeRegistry, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    made = Store(tmp_path / "elsewhere")
    _, more = two_images(made)
    push(more, made, Reference.parse(registry.reference("team/more")))
    assert run("warm", registry.reference("team/more"), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "images": [{"name": "more", "digest": str(more.digest)}],
    }
    store = Store(default_root())
    assert (store.root / "roots" / more.digest.hex / "etc" / "three").exists()
    registry.requests.clear()
    assert run("warm", registry.reference("team/more")) == 0
    assert capsys.readouterr().out == f"more@{more.digest}\n"
    assert not registry.lines("GET */blobs/*")


# -- the options of build -----------------------------------------------------------------------------------------


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    build.configure(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--trust-cache",), "--trust-cache says how a cache is read"),
        (("--record", "--cache", "r/c"), "--record writes what caches are held against"),
        (("--cache-to", "r/c", "--cache", "r/c", "--trust-cache"), "--cache-to would pass on"),
    ],
)
def test_options_that_contradict_each_other(argv: tuple[str, ...], message: str):
    with pytest.raises(InputError, match=message):
        buildcache.check_cache_options(parse("ai-v4", *argv))
    buildcache.check_cache_options(parse("ai-v4", "--cache", "r/c", "--cache", "r/d", "--cache-to", "r/c"))
