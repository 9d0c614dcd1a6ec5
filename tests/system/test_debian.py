"""Packages → layer, whole."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from envbuilder.oci.blob import Compression
from envbuilder.oci.digest import Digest
from envbuilder.oci.listing import listing
from envbuilder.oci.model import LAYER_GZIP, LAYER_TAR, LAYER_ZSTD
from envbuilder.spec.recipe import DebianBase, read_recipe
from envbuilder.store.store import Store
from envbuilder.store.unpack import open_layer
from envbuilder.system.apt import DebianPackage, StalePackageError
from envbuilder.system.debian import SystemPlan, known_layer, make_system, system_layer
from tests.system.debs import Deb, Thing, make_archive, make_host

DEBS = [
    Deb("base-files", things=[
        Thing("tmp", mode=0o1777), Thing("bin"), Thing("root", mode=0o700),
        Thing("usr/share/doc/base-files/copyright", "GPL"), Thing("usr/share/doc/base-files/NEWS", "no"),
    ]),
    Deb("tool", things=[
        Thing("bin/tool", "#!/bin/sh\n", 0o4755), Thing("bin/alias", link="./bin/tool", hard=True),
        Thing("usr/lib/big.bin", bytes(range(256)) * 800), Thing("tmp"),
    ], fields={"Depends": "base-files"}),
]  # fmt: skip


def plan_of(debs: list[Deb], store: Store) -> SystemPlan:
    """Return a plan whose packages are in the store already."""
    found = [DebianPackage(d.name, d.version, "amd64", "", store.put(d.data), len(d.data)) for d in debs]
    return SystemPlan("duck", "debian", tuple(found))


def members(store: Store, digest: Digest) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(store.read(digest)), mode="r:gz") as archive:
        return {member.name: member for member in archive}


def test_layer_of_packages(tmp_path):
    store = Store(tmp_path)
    layer = system_layer(plan_of(DEBS, store), store)
    found = members(store, layer.digest)
    assert found["tmp"].mode == 0o1777
    assert found["bin"].linkname == "usr/bin"
    assert found["usr/bin/tool"].mode == 0o4755
    assert found["usr/bin/alias"].islnk()
    assert found["usr/bin/alias"].linkname == "usr/bin/tool"
    assert "usr/share/doc/base-files/copyright" in found
    assert "usr/share/doc/base-files/NEWS" not in found
    assert "var/lib/dpkg/status" in found
    assert not list((store.root / "partial").iterdir())


def test_same_packages_same_bytes_whatever_the_order_and_the_clock(tmp_path):
    first, second = Store(tmp_path / "1"), Store(tmp_path / "2")
    one = system_layer(plan_of(DEBS, first), first)
    two = system_layer(plan_of(DEBS[::-1], second), second)
    assert one == two


def test_a_known_layer_is_not_made_again(tmp_path):
    store = Store(tmp_path)
    plan = plan_of(DEBS, store)
    layer = system_layer(plan, store)
    for package in plan.packages:
        store.blob(package.digest).unlink()
    assert system_layer(plan, store) == layer


def test_each_compression_has_its_own_layer_of_the_same_files(tmp_path):
    store = Store(tmp_path)
    plan = plan_of([*DEBS, Deb("large", "1", [Thing("usr/share/large", b"0123456789abcdef" * 8192)])], store)
    layers = {compression: system_layer(plan, store, compression) for compression in Compression}
    assert [layer.media_type for layer in layers.values()] == [LAYER_GZIP, LAYER_ZSTD, LAYER_TAR]
    assert {compression: known_layer(plan, store, compression) for compression in Compression} == layers
    listings = []
    for layer in layers.values():
        with open_layer(store, layer.descriptor) as stream:
            # A gzip layer ends with what its table of contents needs.
            listings.append([line for line in listing(stream) if "stargz" not in line and ".no.prefetch" not in line])
    assert listings[0] == listings[1] == listings[2]
    assert any(line.endswith("usr/share/large") for line in listings[0])


def test_the_key_is_about_contents(tmp_path):
    store = Store(tmp_path)
    plan = plan_of(DEBS, store)
    elsewhere = SystemPlan("duck", "debian", tuple(
        DebianPackage(p.name, p.version, p.architecture, "elsewhere", p.digest, p.size) for p in plan.packages
    ))  # fmt: skip
    for compression in Compression:
        assert elsewhere.key(compression) == plan.key(compression)
        assert plan_of(DEBS[:1], store).key(compression) != plan.key(compression)
    assert len({plan.key(compression) for compression in Compression}) == len(Compression)


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_from_an_archive_to_a_layer_and_back_from_the_store(tmp_path):
    host = make_host(tmp_path, make_archive(tmp_path / "archive", "duck", DEBS))
    store, base = Store(tmp_path / "store"), DebianBase(None, ("tool",))
    plan, layer = make_system(base, store, host=host)
    assert {p.name for p in plan.packages} == {"base-files", "tool"}
    assert all(store.has(package.digest) for package in plan.packages)
    shutil.rmtree(tmp_path / "archive")
    assert make_system(base, store, host=host) == (plan, layer)


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_an_archive_that_lies_about_a_package_is_not_believed(tmp_path):
    host = make_host(tmp_path, make_archive(tmp_path / "archive", "duck", DEBS))
    store, base = Store(tmp_path / "store"), DebianBase(None, ("tool",))
    deb = tmp_path / "archive" / "pool" / DEBS[1].file
    deb.write_bytes(deb.read_bytes()[:-1] + b"!")
    with pytest.raises(StalePackageError, match="no longer what was resolved"):
        make_system(base, store, host=host)
    assert not store.has(Digest.of(deb.read_bytes()))


@pytest.mark.slow
def test_the_default_base_of_this_machine_works(tmp_path):
    """The packages of the default recipe, from the machine's own mirror, entered through bubblewrap."""
    store = Store(tmp_path / "store")
    base = read_recipe(Path(__file__).parents[2] / "images" / "default.toml").base
    assert isinstance(base, DebianBase)
    plan, layer = make_system(base, store)
    root = tmp_path / "root"
    root.mkdir()
    with tarfile.open(store.blob(layer.digest), "r:gz") as archive:
        archive.extractall(root, filter="tar")

    def inside(*words: str) -> str:
        argv = ["bwrap", "--bind", root, "/", "--dev", "/dev", "--proc", "/proc", "--clearenv", "--setenv", "PATH",
                "/usr/sbin:/usr/bin:/sbin:/bin", *words]  # fmt: skip
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    assert plan.glibc is not None
    assert "libc.so.6" in inside("ldconfig", "-p")
    assert inside("sh", "-c", "echo a b | awk '{print $2}'") == "b\n"
    assert inside("git", "--version").startswith("git version")
    compiled = "cd /tmp && echo 'int main(void){return 0;}' > x.c && cc x.c -o x && ./x && echo works"
    assert inside("sh", "-c", compiled) == "works\n"
