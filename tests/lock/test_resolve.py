"""Resolving with the real uv against an index served from a folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder import http
from envbuilder.errors import UnreachableError
from envbuilder.lock.files import format_lock
from envbuilder.lock.indexconfig import Indexes
from envbuilder.lock.metadata import MetadataSource
from envbuilder.lock.resolve import CudaMismatchError, ResolveError, Resolver
from envbuilder.spec.environment import read_environment
from tests.indexes import IndexServer, serve
from tests.wheelmaker import make_sdist, make_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envbuilder.lock.model import Lock, Package

LINUX = "cp312-cp312-manylinux_2_28_x86_64"
SPEC = """
{head}
title = "Test"
released = 2025-08-13
end-of-support = 2028-08-13
status = "supported"
python = "3.12"
exclude-newer = 2025-12-01T00:00:00Z
{index}
[cuda]
version = "{cuda}"
[gpu]
accelerators = ["1xA10"]
[packages]
requires = {requires}
constraints = {constraints}
{build}
"""


@dataclass
class Lab:
    """An index and a folder for environments."""

    server: IndexServer
    folder: Path

    def lock(self, *requires: str, parent: Lock | None = None, url: str | None = None, **more: str) -> Lock:
        text = {"head": "", "index": "", "cuda": "12.6", "constraints": "[]", "build": ""} | more
        file = self.folder / "env.toml"
        file.write_text(SPEC.format(requires=list(requires), **text))
        environment = read_environment(file)
        indexes = Indexes(url or self.server.url, environment.indexes, http.new_session(retries=0))

        def build(package: Package) -> bytes:
            return f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\nRequires-Dist: a".encode()

        return Resolver(indexes, Path(sys.executable), MetadataSource(indexes, build)).resolve(environment, parent)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with serve(tmp_path / "index") as server:
        server.add(
            make_wheel("a", "1.0"),
            make_wheel("a", "2.0"),
            make_wheel(
                "b", "1.0", requires=["A>=1", "c; sys_platform == 'win32'", "d; extra == 'more'"], extras=["more"]
            ),
            make_wheel("d", "1.0", tag=LINUX),
            make_wheel("d", "1.0", tag="cp312-cp312-win_amd64"),
        )
        for version, cuda in (("2.6.0", "12.4.127"), ("2.7.0", "12.6.77"), ("2.7.1", "12.6.77"), ("2.8.0", "12.8.90")):
            server.add(make_wheel("torch", version, requires=[f"nvidia-cuda-runtime-cu12=={cuda}"], tag=LINUX))
            server.add(make_wheel("nvidia-cuda-runtime-cu12", cuda, tag="py3-none-manylinux2014_x86_64"))
        yield Lab(server, tmp_path)


def names(lock: Lock) -> list[str]:
    return [f"{package.name} {package.version}" for package in lock.packages]


def test_versions_files_and_the_graph(lab: Lab):
    lock = lab.lock("b[more]")
    assert names(lock) == ["a 2.0", "b 1.0", "d 1.0"]
    b, d = lock.by_name["b"], lock.by_name["d"]
    assert b.requires == ("a>=1", 'c; sys_platform == "win32"', 'd; extra == "more"')
    assert d.file == f"d-1.0-{LINUX}.whl"
    assert (d.digest, d.size) == (make_wheel("d", "1.0", tag=LINUX).digest, make_wheel("d", "1.0", tag=LINUX).size)


def test_the_same_input_gives_the_same_bytes(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = format_lock(lab.lock("b", "torch==2.7.1"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another"))
    assert format_lock(lab.lock("b", "torch==2.7.1")) == first
    assert "127.0.0.1" not in first


def test_what_extends_keeps_every_package_of_what_it_extends(lab: Lab):
    parent = lab.lock("a==1.0", "d")
    lock = lab.lock("b", parent=parent, head='extends = "base"')
    assert names(lock) == ["a 1.0", "b 1.0", "d 1.0"]
    with pytest.raises(ResolveError, match=r"requires\[0\]: `a==2\.0`"):
        lab.lock("a==2.0", parent=parent, head='extends = "base"')


def test_constraints_constrain_and_do_not_require(lab: Lab):
    assert names(lab.lock("b", constraints='["a<2", "d==1.0"]')) == ["a 1.0", "b 1.0"]


def test_the_wrong_cuda_is_refused_with_who_carries_it(lab: Lab):
    with pytest.raises(
        CudaMismatchError, match=r"torch 2\.8\.0 carries CUDA 12\.8, but the environment says 12\.6"
    ) as caught:
        lab.lock("torch==2.8.0")
    assert caught.value.hint == "on this index CUDA 12.6 is carried by torch 2.7.1, 2.7.0"
    assert caught.value.exit_code == 1
    with pytest.raises(CudaMismatchError) as caught:
        lab.lock("torch==2.8.0", cuda="11.8")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("no torch on this index carries CUDA 11.8; it has 2.8.0 (12.8), 2.7.1 (12.6)")


def test_source_only_packages_need_a_build_table(lab: Lab):
    lab.server.add(make_sdist("s", "1.0", files={"pyproject.toml": "[project]\nname = 's'\nversion = '1.0'\n"}))
    with pytest.raises(ResolveError, match=r"s==1\.0"):
        lab.lock("s==1.0")
    lock = lab.lock("s==1.0", build='[build.s]\nreason = "r"\nenv = { X = "1" }')
    s = lock.by_name["s"]
    assert s.file == "s-1.0.tar.gz"
    assert s.build is not None
    assert s.build.env == (("X", "1"),)
    assert s.requires == ("a",)


def test_impossible_requirements_name_file_and_place(lab: Lab):
    with pytest.raises(ResolveError, match=r"env\.toml: packages\.requires\[1\]: `nothing-like-it`"):
        lab.lock("a", "nothing-like-it")
    with pytest.raises(ResolveError, match=r"requires\[0\]: `a==9`"):
        lab.lock("a==9")


def test_a_package_from_a_named_index_comes_from_nowhere_else(lab: Lab, tmp_path: Path):
    with serve(tmp_path / "other") as other:
        other.add(make_wheel("a", "1.5+local"))
        index = f'[[index]]\nname = "special"\nurl = "{other.url}"\npackages = ["a"]'
        lock = lab.lock("a", "d", index=index)
    assert names(lock) == ["a 1.5+local", "d 1.0"]
    assert lock.by_name["a"].index == "special"
    assert lock.by_name["d"].index is None


def test_an_index_out_of_reach_is_no_verdict(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(UnreachableError) as caught:
        lab.lock("a", url="http://127.0.0.1:9/simple/")
    assert caught.value.exit_code == 3
