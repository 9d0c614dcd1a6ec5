"""Damage is found, moved aside and repaired; nothing sound is touched."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, File, Hardlink, Symlink
from envbuilder.store import verify as verify_module
from envbuilder.store.roots import root_tree
from envbuilder.store.store import FORMAT, NotInStoreError, Store, StoreDamagedError, StoreFormatError
from envbuilder.store.unpack import tree_of
from envbuilder.store.verify import verify, verify_blobs
from tests.smallimage import put_image, put_layer

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.oci.model import Image, Layer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "s")


def make(store: Store) -> tuple[Image, list[Layer]]:
    layers = [
        put_layer(
            store,
            [
                Directory("usr/lib"),
                File("usr/lib/one", Bytes(b"one" * 9000)),
                File("usr/lib/two", Bytes(b"two")),
                Symlink("usr/lib/link", "two"),
                Hardlink("usr/lib/hard", "usr/lib/two"),
            ],
        ),
        put_layer(store, [File("deep/down/file", Bytes(b"deep")), File("usr/.wh.gone", Bytes(b""))]),
    ]
    for number, layer in enumerate(layers):
        store.remember("layer", str(number), layer.to_json())
    return put_image(store, "env", layers), layers


def test_a_sound_store(store: Store):
    image, _ = make(store)
    root_tree(store, image)
    done = verify(store, trees=True)
    assert done.clean
    assert (done.blobs, done.trees, done.damaged, done.dropped) == (4, 2, (), ())


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "longer"])
def test_every_blob_damaged_is_found_and_repaired_by_putting_again(store: Store, how: str):
    image, layers = make(store)
    loose = store.put(b"a wheel")
    root_tree(store, image)
    good = {path.name: path.read_bytes() for path in (store.root / "blobs" / "sha256").iterdir()}
    for path in (store.root / "blobs" / "sha256").iterdir():
        whole = path.read_bytes()
        half = len(whole) // 2
        flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
        damaged = {"flip": flipped, "truncate": whole[:half], "empty": b"", "longer": whole + b"x"}
        path.write_bytes(damaged[how])
    store.close()
    done = verify(store)
    assert {damage.name for damage in done.damaged} == set(good)
    assert all(damage.quarantine.parent == store.root / "quarantine" for damage in done.damaged)
    assert [(entry.name, entry.missing) for entry in done.incomplete] == [("env", (image.digest,))]
    assert {digest.hex for digest in done.dropped} == {image.digest.hex, *(layer.digest.hex for layer in layers)}
    assert done.forgotten == len(layers) + 3  # and the notes of trees and root
    assert store.recall("layer", "0") is None
    assert not store.has(loose)
    for data in good.values():
        store.put(data)
    assert verify(store, trees=True).clean
    assert store.image(image.digest) == image
    assert (root_tree(store, image) / "usr/lib/one").read_bytes() == b"one" * 9000


@pytest.mark.parametrize("how", ["truncate", "empty", "longer"])
def test_a_blob_of_another_size_is_repaired_without_being_verified(store: Store, how: str):
    image, layers = make(store)
    path = store.blob(layers[0].digest)
    good = path.read_bytes()
    path.write_bytes({"truncate": good[:-1], "empty": b"", "longer": good + b"x"}[how])
    assert not store.has(layers[0].digest, layers[0].size)
    with pytest.raises(NotInStoreError):
        store.put_image(image, "again")
    store.put(good)
    store.put_image(image, "again")
    assert verify(store).clean


def test_what_was_made_anew_while_it_was_read_is_not_moved_aside(store: Store, monkeypatch: pytest.MonkeyPatch):
    digest = store.put(b"data")
    store.blob(digest).write_bytes(b"damaged")
    read = verify_module._read

    def read_and_repair(path: Path, task: object) -> object:
        found = read(path, task)  # type: ignore[arg-type]
        Store(store.root).put(b"data")
        return found

    monkeypatch.setattr(verify_module, "_read", read_and_repair)
    assert verify(store).damaged == ()
    assert store.read(digest) == b"data"


@pytest.mark.parametrize("change", ["content", "shorter", "missing", "link", "extra", "replaced"])
def test_a_changed_tree_is_found_and_made_again(store: Store, change: str):
    image, layers = make(store)
    root = root_tree(store, image)
    lib = tree_of(store, layers[0].descriptor) / "usr/lib"
    match change:
        case "content":
            with (lib / "one").open("r+b") as file:
                file.write(b"evil")
        case "shorter":
            os.truncate(lib / "one", 5)
        case "missing":
            (lib / "two").unlink()
        case "link":
            (lib / "link").unlink()
            (lib / "link").symlink_to("one")
        case "extra":
            (lib / "three").write_text("x")
        case _:
            (lib / "two").unlink()
            (lib / "two").mkdir()
    store.close()
    assert verify(store).clean  # which does not look there
    done = verify(store, trees=True)
    assert not done.clean
    assert done.wrong == (layers[0].digest,)
    assert set(done.dropped) == {layers[0].digest, image.digest}
    assert not root.exists()
    assert (root_tree(store, image) / "usr/lib/one").read_bytes() == b"one" * 9000
    store.close()
    assert verify(store, trees=True).clean


def test_what_is_in_use_is_not_taken_away(store: Store):
    image, layers = make(store)
    root = root_tree(store, image)
    (root / "usr/lib/one").write_bytes(b"evil")
    job = Store(store.root)
    job.protect(image.digest)
    store.close()
    done = verify(store, trees=True)
    assert (done.clean, done.wrong, done.dropped) == (False, (layers[0].digest,), ())
    assert root.exists()


def test_a_power_cut_after_unpacking(store: Store, monkeypatch: pytest.MonkeyPatch):
    """Files that were cut short under names that survived are noticed at the first use after the boot."""
    image, layers = make(store)
    root = root_tree(store, image)
    os.truncate(tree_of(store, layers[0].descriptor) / "usr/lib/one", 0)
    assert root_tree(store, image) == root
    assert (root / "usr/lib/one").read_bytes() == b""  # in one run of the kernel nothing is lost, so nobody looks
    monkeypatch.setattr("envbuilder.store.trees.boot", lambda: "another")
    assert (root_tree(store, image) / "usr/lib/one").read_bytes() == b"one" * 9000
    assert (root / "deep/down/file").read_bytes() == b"deep"
    notes = [store.recall("unpacked", f"trees/{layer.digest.hex}") for layer in layers]
    assert [note["boot"] for note in notes] == ["another", "another"]
    assert verify(store, trees=True).clean


@pytest.mark.parametrize("file", ["index.json", "pins.json"])
def test_a_damaged_index_is_moved_aside(store: Store, file: str):
    image, _ = make(store)
    (store.root / file).write_bytes(b"\0" * 100)
    if file == "index.json":
        with pytest.raises(StoreDamagedError) as caught:
            store.find_image("env")
        assert "cache verify" in (caught.value.hint or "")
    done = verify(store)
    assert [damage.name for damage in done.damaged] == [file]
    assert not done.clean
    store.put_image(image, "env")
    assert verify(store).clean
    assert store.find_image("env") == image.digest


def test_two_versions_of_the_tool(tmp_path: Path):
    old = Store(tmp_path / "s")
    image, _ = make(old)
    (tmp_path / "s" / "format").unlink()  # as a version before there was one
    (tmp_path / "s" / "of the future").mkdir()
    assert Store(tmp_path / "s").find_image("env") == image.digest
    assert (tmp_path / "s" / "format").read_text() == f"{FORMAT}\n"
    assert verify(Store(tmp_path / "s")).clean
    assert (tmp_path / "s" / "of the future").exists()
    (tmp_path / "s" / "format").write_text(f"{FORMAT + 1}\n")
    with pytest.raises(StoreFormatError, match=f"has format {FORMAT + 1}, .* knows {FORMAT}") as caught:
        Store(tmp_path / "s")
    assert caught.value.exit_code == 4
    (tmp_path / "s" / "format").write_bytes(b"\0\0")
    with pytest.raises(StoreDamagedError):
        Store(tmp_path / "s")


def test_only_the_blobs_that_were_asked_for_are_hashed(store: Store):
    good, bad, other = (store.put(data) for data in (b"good", b"bad", b"other"))
    for digest in (bad, other):
        store.blob(digest).write_bytes(b"flipped")
    (damage,) = verify_blobs(store, [good, bad, Digest.of(b"absent"), bad])
    assert damage.name == bad.hex
    assert damage.quarantine.read_bytes() == b"flipped"
    assert store.has(good)
    assert not store.has(bad)
    assert store.has(other)
    assert verify_blobs(store, [good, bad]) == ()
