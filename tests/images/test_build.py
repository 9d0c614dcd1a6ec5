"""The whole way, small: a Debian archive, an index and an interpreter of this machine -> an image that runs."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder import http
from envbuilder.errors import HostError, UnreachableError
from envbuilder.images.build import Source, build
from envbuilder.images.extras import ExtraOutOfReachError, find_extra, prebuilt_url, provide_extra
from envbuilder.images.layout import write_layout
from envbuilder.launch.engines import engine
from envbuilder.launch.job import Job
from envbuilder.lock.drift import lock_input, lock_target
from envbuilder.lock.indexconfig import Indexes
from envbuilder.lock.model import Lock, Package
from envbuilder.oci.blob import Compression
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import LAYER_GZIP, LAYER_ZSTD
from envbuilder.spec.catalog import Catalog
from envbuilder.spec.environment import Environment, read_environment
from envbuilder.spec.recipe import read_recipe
from envbuilder.store.partial import WrongBytesError
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from envbuilder.system.locked import lock_system
from envbuilder.wheels.supply import LockedWheels
from tests.indexes import IndexServer, serve
from tests.specs import spec_head
from tests.system.debs import Deb, Thing, make_archive, make_host
from tests.wheelmaker import Made, make_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envbuilder.oci.model import Image
    from envbuilder.system.apt import Host

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
GLIBC = platform.libc_ver()[1]
SPEC = (
    spec_head("Small", MINOR, f'glibc = "{GLIBC}"')
    + """\
requires = ["app==1.0"]
[extras.fast]
requires = ["fast==2.8.3", "helper==1.0"]
wheel = "https://wheels.invalid/fast-{version}+cu{cuda-major}torch{torch-minor}abi{abi}-cp{py}-cp{py}-linux_x86_64.whl"
reason = "needs a compiler that is not here"
"""
)
RECIPE = """
[base]
debian = ["libc6"]
[python]
from = ["host"]
[paths]
python = "/opt/python"
environment = "/opt/env"
[layering]
alone-mib = 8
buckets = 4
budget = 60
[process.env]
GREETING = "hello"
"""
WHEELS = (
    make_wheel(
        "app",
        files={"app.py": "def main():\n    print('app runs')\n"},
        requires=["lib"],
        entry_points={"app": "app:main"},
    ),
    make_wheel("lib", files={"lib/__init__.py": "answer = 42\n"}),
    make_wheel("torch", "2.7.1", tag=f"cp{MINOR.replace('.', '')}-cp{MINOR.replace('.', '')}-manylinux_2_28_x86_64"),
)


def glibc() -> list[Thing]:
    """Return this machine's glibc as members of a package: what a copied interpreter needs of its base."""
    listing = subprocess.run(["ldd", sys.executable], capture_output=True, text=True, check=True).stdout
    folder = Path(re.findall(r"(/\S+)/libc\.so\.6", listing)[0]).resolve()
    names = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libutil.so.1", "librt.so.1", "libresolv.so.2")
    things = [Thing(f"lib/x86_64-linux-gnu/{n}", (folder / n).read_bytes()) for n in names if (folder / n).exists()]
    return [*things, Thing("lib64/ld-linux-x86-64.so.2", Path("/lib64/ld-linux-x86-64.so.2").read_bytes(), mode=0o755)]


@dataclass
class Machine:
    """A machine: its apt, its index, its environment."""

    folder: Path
    host: Host
    index: IndexServer
    source: Source

    def store(self, name: str = "store") -> Store:
        return Store(self.folder / name)

    def emptied(self, name: str) -> Store:
        """Return a store that knows system and interpreter (which take seconds), but no wheel and no layer of one."""
        image = self.build(self.store())
        unpacked = shutil.ignore_patterns("trees", "roots")
        shutil.copytree(self.folder / "store", self.folder / name, copy_function=os.link, ignore=unpacked)
        store = self.store(name)
        (store.root / "index.json").unlink()
        for digest in (*(p.digest for p in self.source.lock.packages), *(x.digest for x in image.manifest.layers[2:])):
            store.blob(digest).unlink()
        return store

    def indexes(self) -> Indexes:
        return Indexes(self.index.url, (), http.new_session(retries=0))

    def build(self, store: Store, source: Source | None = None) -> Image:
        source = source or self.source
        image = build(
            source,
            store,
            lambda python: LockedWheels(store, self.indexes, python, source.environment, "2025-12-01T00:00:00Z"),
            host=self.host,
        )
        store.put_image(image, source.name)
        return image


def package_of(made: Made, *requires: str) -> Package:
    name, version = made.file.split("-")[:2]
    return Package(name, version, made.file, made.digest, made.size, requires)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch, serve(folder / "index") as index:
        patch.setenv("ENVBUILDER_PYTHON", os.path.realpath(sys.executable))
        index.add(*WHEELS)
        sources = make_archive(folder / "archive", "duck", [Deb("libc6", f"{GLIBC}-1", glibc())])
        (folder / "small.toml").write_text(SPEC)
        (folder / "recipe.toml").write_text(RECIPE)
        environment = read_environment(folder / "small.toml")
        packages = tuple(package_of(made) for made in sorted(WHEELS, key=lambda made: made.file))
        lock = Lock("small", lock_input(environment), lock_target(environment), "12.6", packages)
        source = Source(environment, lock, None, read_recipe(folder / "recipe.toml"))
        yield Machine(folder, make_host(folder, sources), index, source)


def run_inside(machine: Machine, store: Store, image: Image, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    job = Job("small", words, machine.folder, {})
    code = engine("sandbox").run(job, image.config, str(root_tree(store, image)))
    out, error = capfd.readouterr()
    assert code == 0, error
    return out


def test_an_image_is_built_and_runs(machine: Machine, capfd: pytest.CaptureFixture[str]):
    store = machine.store()
    image = machine.build(store)
    assert run_inside(machine, store, image, capfd, "app") == "app runs\n"
    program = (
        "import sys, lib, importlib.metadata as m; print(sys.prefix, lib.answer, m.version('app'), sys.flags.optimize)"
    )
    assert run_inside(machine, store, image, capfd, "python", "-c", program) == "/opt/env 42 1.0 0\n"
    program = "import os, lib; print(os.environ['GREETING'], lib.__cached__, os.path.exists(lib.__cached__))"
    cached = f"/opt/env/lib/python{MINOR}/site-packages/lib/__pycache__/__init__.cpython-{MINOR.replace('.', '')}.pyc"
    assert run_inside(machine, store, image, capfd, "python", "-c", program) == f"hello {cached} True\n"


def test_the_image_says_what_it_is(machine: Machine):
    image = machine.build(machine.store())
    config = image.config
    assert config.labels["dev.envbuilder.environment"] == "small"
    assert config.labels["dev.envbuilder.cuda"] == "12.6"
    assert config.labels["dev.envbuilder.driver-floor"] == "525.60.13"
    assert config.labels["dev.envbuilder.gpu-architectures"] == "sm_86"
    assert config.labels["dev.envbuilder.interpreter"] == f"host {platform.python_version()}"
    assert config.env["NVIDIA_REQUIRE_CUDA"] == "cuda>=12.0"
    assert config.created == "2025-12-01T00:00:00Z"
    assert len(config.history) == len(config.diff_ids) == len(image.manifest.layers)
    assert str(machine.folder) not in config.to_bytes().decode() + image.manifest.to_bytes().decode()


def test_the_digest_is_that_of_another_store_and_another_time(machine: Machine):
    first = machine.build(machine.store())
    asked = len(machine.index.requests)
    assert machine.build(machine.store()) == first
    assert len(machine.index.requests) == asked, "nothing is asked of the index when nothing has changed"
    assert machine.build(machine.store("another/store")).digest == first.digest


def test_the_layout_is_taken_by_skopeo(machine: Machine):
    image = machine.build(machine.store())
    folder = machine.folder / "layout"
    write_layout(image, machine.store(), folder, "small")
    done = subprocess.run(["skopeo", "inspect", f"oci:{folder}:small"], capture_output=True, text=True, check=True)
    inspected = json.loads(done.stdout)
    assert inspected["Digest"] == str(image.digest)
    copied = machine.folder / "copied"
    subprocess.run(["skopeo", "copy", "--quiet", f"oci:{folder}:small", f"dir:{copied}"], check=True)
    assert (copied / "manifest.json").read_bytes() == image.manifest.to_bytes()


def test_a_wheel_with_other_bytes_is_refused_and_never_kept(machine: Machine):
    store = machine.emptied("wrong")
    fault = machine.index.fail("*/lib-1.0-*.whl", corrupt=True)
    try:
        with pytest.raises(WrongBytesError, match=r"lib-1\.0"):
            machine.build(store)
    finally:
        machine.index.faults.remove(fault)
    assert not store.has(machine.source.lock.by_name["lib"].digest)
    assert store.find_image("small") is None
    assert machine.build(store).digest == machine.build(machine.store()).digest


@pytest.mark.parametrize("place", ["who may execute a file", "the unused end of a deflate stream"])
def test_a_wheel_that_was_damaged_in_the_store_is_fetched_again(machine: Machine, place: str):
    """Neither RECORD nor CRC-32 tell of these; the layer would be another one."""
    store = machine.emptied(place.replace(" ", "-"))
    wheel = next(made for made in WHEELS if made.file.startswith("app-"))
    changed = bytearray(wheel.data)
    if place == "who may execute a file":
        changed[wheel.data.index(b"PK\1\2") + 40] ^= 1
    else:
        changed[wheel.data.index(b"PK\3\4", 4) - 1] ^= 1 << 7
    store.blob(wheel.digest).write_bytes(changed)
    assert machine.build(store).digest == machine.build(machine.store()).digest
    assert store.read(wheel.digest) == wheel.data
    assert len(list((store.root / "quarantine").iterdir())) == 1


def test_an_index_out_of_reach_is_exit_3_and_the_next_run_continues(machine: Machine):
    store = machine.emptied("interrupted")
    fault = machine.index.fail("*/torch-2.7.1-*.whl", status=503)
    try:
        with pytest.raises(UnreachableError, match="still to be fetched") as caught:
            machine.build(store)
    finally:
        machine.index.faults.remove(fault)
    assert caught.value.exit_code == 3
    asked = len(machine.index.paths("*/lib-1.0-*.whl"))
    assert machine.build(store).digest == machine.build(machine.store()).digest
    kept = store.has(machine.source.lock.by_name["lib"].digest)
    assert kept
    assert len(machine.index.paths("*/lib-1.0-*.whl")) <= asked + 1


def test_a_base_whose_glibc_is_too_old_is_refused(machine: Machine):
    newer = dataclasses.replace(
        machine.source.lock, target=dataclasses.replace(machine.source.lock.target, glibc="2.99")
    )
    with pytest.raises(HostError, match=r"glibc .*, but the lock's wheels need 2\.99"):
        machine.build(machine.store(), dataclasses.replace(machine.source, lock=newer))


def test_all_layers_have_the_compression_asked_for(machine: Machine, capfd: pytest.CaptureFixture[str]):
    """Also when the store holds each of them in another, and also those that an extending environment shares."""
    store, source = machine.store(), machine.source
    plain = machine.build(store)
    layering = dataclasses.replace(source.recipe.layering, compression=Compression.ZSTD.value)
    smaller = dataclasses.replace(source, recipe=dataclasses.replace(source.recipe, layering=layering))
    image = machine.build(store, smaller)
    assert {layer.media_type for layer in plain.manifest.layers} == {LAYER_GZIP}
    assert {layer.media_type for layer in image.manifest.layers} == {LAYER_ZSTD}
    assert run_inside(machine, store, image, capfd, "app") == "app runs\n"
    child = dataclasses.replace(source.lock, environment="child")
    extending = machine.build(store, dataclasses.replace(smaller, lock=child, parent=source.lock))
    assert extending.manifest.layers[: len(image.manifest.layers)] == image.manifest.layers
    assert len(extending.manifest.layers) == len(image.manifest.layers) + 1
    assert machine.build(store) == plain


def test_extras_lie_on_top_of_an_unchanged_environment(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    store = machine.store()
    plain = machine.build(store)
    tag = f"cp{MINOR.replace('.', '')}"
    fast = make_wheel("fast", "2.8.3+cu12torch2.7", tag=f"{tag}-{tag}-linux_x86_64")
    machine.index.add(make_wheel("helper"))
    monkeypatch.setenv("ENVBUILDER_EXTRA_FAST_URL", f"file://{fast.write(machine.folder / 'elsewhere')}")
    extra = find_extra(machine.source.environment, "fast")
    group = provide_extra(extra, machine.source.lock, store, machine.indexes())
    image = machine.build(store, dataclasses.replace(machine.source, extras=(group,)))
    assert image.manifest.layers[:-1] == plain.manifest.layers
    assert store.find_image("small+fast") == image.digest
    assert [package.name for package in group.packages] == ["fast", "helper"]


def test_an_extra_out_of_reach_says_where_it_would_be(machine: Machine):
    extra = find_extra(machine.source.environment, "fast")
    url = prebuilt_url(extra, machine.source.lock)
    tag = f"cp{MINOR.replace('.', '')}"
    assert url == f"https://wheels.invalid/fast-2.8.3+cu12torch2.7abiTRUE-{tag}-{tag}-linux_x86_64.whl"
    with pytest.raises(ExtraOutOfReachError, match=r"wheels\.invalid.*needs a compiler") as caught:
        provide_extra(extra, machine.source.lock, machine.store(), machine.indexes())
    assert caught.value.exit_code == 3
    assert "ENVBUILDER_EXTRA_FAST_URL" in str(caught.value.hint)


def test_flash_attn_of_base_v4_is_the_wheel_that_matches():
    from envbuilder.lock.files import read_lock  # noqa: PLC0415

    catalog = Catalog(Path(__file__).parents[2])
    environment: Environment = catalog.environment("base-v4")
    url = prebuilt_url(find_extra(environment, "flash-attn"), read_lock(catalog.lock_file("base-v4")))
    assert url is not None
    assert url.endswith("/v2.8.3/flash_attn-2.8.3+cu12torch2.7cxx11abiTRUE-cp312-cp312-linux_x86_64.whl")


def test_a_locked_base_is_the_same_and_one_that_is_gone_is_told(machine: Machine, caplog: pytest.LogCaptureFixture):
    store = machine.store()
    plain = machine.build(store)
    lock = lock_system(machine.source.recipe, store, host=machine.host)
    with caplog.at_level(logging.WARNING):
        assert machine.build(machine.store(), dataclasses.replace(machine.source, system=lock)) == plain
    assert not caplog.records
    (package,) = lock.plan.packages
    gone = dataclasses.replace(package, version="1", file="pool/gone.deb", digest=Digest.of(b"gone"))
    plan = dataclasses.replace(lock.plan, packages=(gone,))
    older = dataclasses.replace(machine.source, system=dataclasses.replace(lock, plan=plan))
    with caplog.at_level(logging.WARNING):
        assert machine.build(machine.store(), older) == plain
    (record,) = caplog.records
    assert f"1 moved on (libc6: 1 -> {package.version})" in record.getMessage()
    assert "`envbuilder lock small --system` renews the lock" in record.getMessage()
