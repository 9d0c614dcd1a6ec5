"""Write, read, compare: the lock's file, its drift, the target's wheels, torch's CUDA."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from envbuilder.lock.cuda import cuda_of
from envbuilder.lock.drift import drift, lock_input, lock_target
from envbuilder.lock.files import LockMissingError, format_lock, read_lock, write_lock
from envbuilder.lock.model import Build, Lock, Package, Target
from envbuilder.lock.target import best_wheel, supported_tags
from envbuilder.oci.digest import Digest
from envbuilder.spec.environment import Environment, read_environment
from envbuilder.tomlread import TomlError
from tests.spec.test_environment import write

if TYPE_CHECKING:
    from pathlib import Path


def package(name: str, version: str = "1.0", **more: object) -> Package:
    plain = Package(name, version, f"{name}-{version}-py3-none-any.whl", Digest.of(name.encode()), 1000, ())
    return dataclasses.replace(plain, **more)  # type: ignore[arg-type]


def make_lock(environment: Environment, *packages: Package) -> Lock:
    return Lock(environment.name, lock_input(environment), lock_target(environment), environment.cuda, packages)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return read_environment(write(tmp_path))


def test_what_is_written_is_read_back(tmp_path: Path, environment: Environment):
    lock = make_lock(
        environment,
        package("a", requires=('b>=1; extra == "x\\"y"', "c"), requires_python=">=3.9"),
        package("psutil", file="psutil-5.9.0.tar.gz", build=Build((("A", "1"),))),
        package("torch", index="pytorch"),
        package("wadllib", file="wadllib-1.tar.gz", build=Build(())),
    )
    file = tmp_path / "env.lock.toml"
    write_lock(lock, file)
    assert read_lock(file) == lock
    assert format_lock(read_lock(file)) == file.read_text()
    assert file.read_text().endswith("\n")


def test_a_lock_names_no_host(environment: Environment):
    assert "://" not in format_lock(make_lock(environment, package("a")))


def test_reading_refuses_what_is_no_lock(tmp_path: Path, environment: Environment):
    file = tmp_path / "env.lock.toml"
    with pytest.raises(LockMissingError) as caught:
        read_lock(file)
    assert caught.value.hint == "run `envbuilder lock env`"
    text = format_lock(make_lock(environment, package("a")))
    for old, new, place in (
        ("schema = 1", "schema = 2", "schema"),
        ('sha256 = "', 'sha256 = "x', "package[0].sha256"),
        ("a-1.0-py3", "../a-1.0-py3", "package[0].file"),
        ("size = 1000", 'size = 1000\nurl = "x"', "package[0].url"),
    ):  # fmt: skip
        file.write_text(text.replace(old, new))
        with pytest.raises(TomlError) as wrong:
            read_lock(file)
        assert wrong.value.place == place


def test_a_fresh_lock_has_no_drift(environment: Environment):
    assert drift(make_lock(environment, package("a")), environment, None) == ()


def test_drift_is_named(environment: Environment):
    lock = make_lock(environment, package("a"))
    changed = dataclasses.replace(
        environment,
        cuda="12.8",
        glibc="2.36",
        requires=("torch==2.8.0", "ray[data]>=2"),
        constraints=("x<2",),
        builds=(),
    )
    assert [str(d) for d in drift(lock, changed, None)] == [
        "glibc: 2.35 -> 2.36",
        "cuda: 12.6 -> 12.8",
        "packages.requires: - torch==2.7.1",
        "packages.requires: + torch==2.8.0",
        "packages.constraints: + x<2",
        "build: - ('psutil', (('A', '1'),))",
    ]


def test_a_moved_parent_is_drift(environment: Environment):
    lock = make_lock(environment, package("a"), package("b"))
    parent = make_lock(environment, package("a", "2.0"), package("b"))
    assert [str(d) for d in drift(lock, environment, parent)] == [f"{environment.name}.a: 1.0 -> 2.0"]


TARGET = Target("3.12", "x86_64", "2.35")


@pytest.mark.parametrize(
    ("files", "best"),
    [
        (["x-1-py3-none-any.whl", "x-1-cp312-cp312-manylinux_2_28_x86_64.whl"], 1),
        (["x-1-cp312-cp312-manylinux_2_28_x86_64.whl", "x-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"], 0),
        (["x-1-cp312-cp312-manylinux_2_39_x86_64.whl"], None),
        (["x-1-cp38-abi3-manylinux1_x86_64.whl"], 0),
        (["x-1-cp311-cp311-manylinux_2_17_x86_64.whl", "x-1-cp312-cp312-win_amd64.whl"], None),
        (["x-1-cp312-cp312-manylinux_2_17_aarch64.whl", "x-1-cp312-cp312-musllinux_1_2_x86_64.whl"], None),
        (["x-1-py3-none-any.whl", "x-1-2-py3-none-any.whl"], 1),
        (["x-1-py2.py3-none-any.whl", "not a wheel.whl"], 0),
        (["x-1-cp312-cp312t-manylinux_2_17_x86_64.whl"], None),
        (["x-1-cp312-cp312-linux_x86_64.whl"], 0),
    ],
)  # fmt: skip
def test_the_target_takes_the_wheel_that_an_installer_takes(files: list[str], best: int | None):
    for order in (files, files[::-1]):
        assert best_wheel(order, supported_tags(TARGET)) == (None if best is None else files[best])


@pytest.mark.parametrize(
    ("version", "requires", "cuda"),
    [
        ("2.7.1", ["filelock", "nvidia-cuda-runtime-cu12==12.6.77; platform_system == 'Linux'"], "12.6"),
        ("2.6.0", ["nvidia-cuda-runtime-cu12 (==12.4.127)"], "12.4"),
        ("2.11.0", ["nvidia-cuda-runtime==13.0.96; platform_system == 'Linux'"], "13.0"),
        ("2.15.0", ["cuda-toolkit[cublas,cudart]==13.2.1; platform_system == 'Linux'"], "13.2"),
        ("2.7.1+cu118", ["nvidia-cuda-runtime-cu11==11.8.89"], "11.8"),
        ("2.7.1+cu126", [], "12.6"),
        ("2.7.1+cpu", [], None),
        ("2.7.1", ["filelock"], None),
    ],
)
def test_cuda_is_read_from_torch_itself(version: str, requires: list[str], cuda: str | None):
    assert cuda_of(version, requires) == cuda
