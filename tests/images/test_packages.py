from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.images.layering import Group
from envbuilder.images.packages import PackageLayers
from envbuilder.lock.model import Package
from envbuilder.store.store import Store
from envbuilder.wheels.key import InstallPrefix, WheelFile
from tests.wheelmaker import Made, make_wheel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


class Supply:
    """Supplies wheels made in memory and remembers what was asked for."""

    def __init__(self, store: Store, wheels: Sequence[Made]) -> None:
        self.store = store
        self.wheels_made = {wheel.file: wheel for wheel in wheels}
        self.provided: list[str] = []

    def wheels(self, packages: Sequence[Package]) -> Mapping[str, WheelFile]:
        return {p.name: WheelFile(p.file, p.digest, self.store.blob(p.digest)) for p in packages}

    def provide(self, packages: Sequence[Package]) -> None:
        for package in packages:
            self.provided.append(package.name)
            self.store.put(self.wheels_made[package.file].data)


WHEELS = [make_wheel(name, files={f"{name}.py": f"x = {name!r}\n"}) for name in ("a", "b", "c")]
PACKAGES = [Package(w.file.split("-")[0], "1.0", w.file, w.digest, w.size, ()) for w in WHEELS]
GROUPS = [Group("a", (PACKAGES[0],)), Group("b, c", (PACKAGES[1], PACKAGES[2]))]


def layers(store: Store, supply: Supply) -> PackageLayers:
    return PackageLayers(store, InstallPrefix("/opt/env", MINOR), Path(sys.executable), "3.x", supply)


def test_layers_are_made_once(tmp_path: Path):
    store = Store(tmp_path / "store")
    supply = Supply(store, WHEELS)
    made = layers(store, supply).make(GROUPS)
    assert supply.provided == ["a", "b", "c"]
    assert all(store.has(layer.digest) for layer in made)
    again = Supply(store, WHEELS)
    assert layers(store, again).make(GROUPS) == made
    assert again.provided == []


def test_a_layer_whose_blob_is_gone_is_made_again(tmp_path: Path):
    store = Store(tmp_path / "store")
    made = layers(store, Supply(store, WHEELS)).make(GROUPS)
    store.blob(made[1].digest).unlink()
    supply = Supply(store, WHEELS)
    assert layers(store, supply).make(GROUPS) == made
    assert supply.provided == ["b", "c"]


def test_two_stores_two_orders_same_layers(tmp_path: Path):
    one, two = Store(tmp_path / "one"), Store(tmp_path / "elsewhere" / "two")
    made = layers(one, Supply(one, WHEELS)).make(GROUPS)
    assert layers(two, Supply(two, WHEELS)).make(GROUPS[::-1]) == made[::-1]


def test_a_wheel_that_is_refused_leaves_nothing_behind(tmp_path: Path):
    from envbuilder.wheels.archive import WheelError  # noqa: PLC0415
    from tests.wheelmaker import Member  # noqa: PLC0415

    store = Store(tmp_path / "store")
    evil = make_wheel("evil", extra_members=[Member("../evil", b"x")])
    package = Package("evil", "1.0", evil.file, evil.digest, evil.size, ())
    with pytest.raises(WheelError, match="leaves the installation prefix"):
        layers(store, Supply(store, [evil])).make([Group("evil", (package,))])
    assert [p.name for p in (store.root / "blobs" / "sha256").iterdir()] == [evil.digest.hex]
    assert not list((store.root / "partial").iterdir())
