"""Whole builds that find blobs damaged, or the clock wrong: the next build has the digest of an undisturbed one."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, TypeAlias

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.store.pins import pin, unpin
from envbuilder.store.roots import root_tree
from envbuilder.store.store import BlobMismatchError
from envbuilder.store.unpack import UnpackError
from envbuilder.store.usage import named_by_digest
from envbuilder.store.verify import verify
from tests.images.test_build import machine  # noqa: F401  # a fixture
from tests.images.test_build_faults import Workshop, collect

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.images.test_build import Machine

pytestmark = pytest.mark.slow

Damage: TypeAlias = "Callable[[bytes], bytes]"
DAMAGES: dict[str, Damage] = {
    "truncated": lambda data: data[: len(data) // 2],
    "flipped": lambda data: flipped(data, len(data) // 2),
    "emptied": lambda _: b"",
}


@pytest.fixture(scope="module")
def workshop(machine: Machine) -> Workshop:  # noqa: F811
    return Workshop(machine, machine.build(machine.store()))


def flipped(data: bytes, position: int, bit: int = 0) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def damage(path: Path, how: Damage) -> None:
    """Write a file anew, damaged: others may share the old one by hard link."""
    data = how(path.read_bytes())
    path.unlink()
    path.write_bytes(data)


# -- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGES)
def test_every_blob_damaged_is_found_and_made_again(workshop: Workshop, how: str):
    store = workshop.machine.emptied(f"damaged-{how}")
    workshop.check(store)
    workshop.unpack(store)
    blobs = named_by_digest(store.root / "blobs" / "sha256")
    for blob in blobs:
        damage(blob, DAMAGES[how])
        found = verify(store)
        store.close()
        assert [entry.name for entry in found.damaged] == [blob.name]
        assert found.damaged[0].quarantine.is_file()
        assert not blob.exists()
        workshop.check(store)  # what a wheel or a package made is there: they are not brought again
    store = workshop.machine.emptied(f"all-{how}")
    workshop.check(store)
    for blob in blobs:
        damage(store.blob(Digest(blob.name)), DAMAGES[how])
    found = verify(store)
    store.close()
    assert sorted(entry.name for entry in found.damaged) == [blob.name for blob in blobs]
    workshop.check(store)
    workshop.unpack(store)
    sys.stdout.write(f"{len(blobs)} blobs {how} one by one, and all at once\n")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_build_that_meets_damage_without_verify(workshop: Workshop, how: str):
    store = workshop.machine.emptied(f"met-{how}")
    image = workshop.machine.build(store)
    system, python, *layers = (store.blob(layer.digest) for layer in image.manifest.layers)
    sources = [store.blob(package.digest) for package in workshop.machine.source.lock.packages]
    documents = [store.blob(image.digest), store.blob(image.manifest.config.digest)]
    for path in sources + documents:
        damage(path, DAMAGES[how])
    for path in layers:
        path.unlink()  # so that the wheels are needed again
    workshop.check(store)

    for path in (system, python, *layers):
        for unpacked in ("trees", "roots"):
            shutil.rmtree(store.root / unpacked, ignore_errors=True)
        damage(path, DAMAGES[how])
        assert workshop.machine.build(store) == image
        if how == "flipped" and path != layers[-1]:  # as long as it should be: who reads it notices
            with pytest.raises(UnpackError) as caught:
                root_tree(store, image)
            assert "envbuilder cache verify" in str(caught.value.hint)
            store.close()
            assert [entry.name for entry in verify(store).damaged] == [path.name]
        # The last layer, with the metadata, is written by every build.
        workshop.check(store)


def test_a_flipped_document_is_refused_and_put_right_by_the_next_build(workshop: Workshop):
    store = workshop.machine.emptied("document")
    image = workshop.machine.build(store)
    for digest in (image.digest, image.manifest.config.digest):
        damage(store.blob(digest), DAMAGES["flipped"])
        with pytest.raises(BlobMismatchError) as caught:
            store.image(image.digest)
        assert "envbuilder cache verify" in str(caught.value.hint)
        workshop.check(store)


def test_no_flipped_bit_of_a_wheel_gets_into_an_image(workshop: Workshop):
    """Not even those that neither RECORD nor CRC-32 cover: executable bits, and what is unused in a deflate stream."""
    store = workshop.machine.emptied("wheels")
    image = workshop.machine.build(store)
    package = workshop.machine.source.lock.by_name["app"]
    blob = store.blob(package.digest)
    good = blob.read_bytes()
    central = good.index(b"PK\1\2")
    places = {
        "a CRC-32 in a local header": (14, 0),
        "a name in a local header": (30, 0),
        "a deflate stream": (45, 3),
        "the unused end of a deflate stream": (good.index(b"PK\3\4", 4) - 1, 7),
        "a date": (central + 12, 1),
        "who may execute a file": (central + 40, 0),
        "a name in the directory": (central + 46, 0),
        "the end record": (len(good) - 4, 2),
    }
    places |= {f"byte {position}": (position, position % 8) for position in range(0, len(good), len(good) // 24)}
    for position, bit in places.values():
        blob.unlink()
        blob.write_bytes(flipped(good, position, bit))
        for layer in image.manifest.layers[2:]:
            store.blob(layer.digest).unlink()
        assert workshop.machine.build(store) == image
        assert blob.read_bytes() == good
    assert len(list((store.root / "quarantine").iterdir())) == len(places)
    workshop.check(store)
    sys.stdout.write(f"{len(places)} flips of a wheel of {len(good)} bytes\n")


# -- clocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("years", [3, 100, -3, -50])
def test_a_clock_that_goes_wrong_and_comes_back(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, years: int):
    """What is in use stays whatever the clock says; what is not may be evicted, and is made again."""
    store = workshop.machine.emptied(f"clock{years}")
    shift = years * 365.25 * 24 * 3600
    with monkeypatch.context() as patch:
        real = time.time
        patch.setattr(time, "time", lambda: real() + shift)
        workshop.check(store)  # resolves anew, and remembers when
        date_all(store.root, time.time())
    collect(store)
    assert store.find_image("small") == workshop.digest
    workshop.check(store)

    date_all(store.root, time.time() + shift)
    collect(store, 0)
    assert all(store.has(layer.digest, layer.size) for layer in workshop.image.manifest.layers)
    store.close()
    workshop.check(store)

    date_all(store.root, time.time() + shift)
    pin(store, "small")
    collect(store, 0, images=True)
    assert store.find_image("small") == workshop.digest
    unpin(store, "small")
    workshop.check(store)


def date_all(root: Path, when: float) -> None:
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            os.utime(f"{folder}/{name}", (when, when), follow_symlinks=False)
