from __future__ import annotations

import io
import os
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder import http
from envbuilder.errors import HostError
from envbuilder.lock.indexconfig import Indexes
from envbuilder.lock.model import Build, Package
from envbuilder.oci.digest import Digest
from envbuilder.store.store import NotInStoreError, Store
from envbuilder.system.pythons import find_interpreter
from envbuilder.wheels.built import BuiltWheel, find_tools
from envbuilder.wheels.fetch import fetch
from envbuilder.wheels.repack import repack
from envbuilder.wheels.source import Builder, BuildFailedError, WrongArchiveError, WrongWheelError
from tests.wheelmaker import BACKEND, Member, make_sdist, make_wheel, make_zip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.wheelmaker import Made

SOURCE = make_sdist("My.Source", "1.5", files={**BACKEND, "src/my_source/__init__.py": "x = 1\n"})
FAILING = {**BACKEND, "backend.py": "def build_wheel(*args):\n    raise SystemExit('no curses here')\n"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "uv"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")


def builder(store: Store) -> Builder:
    nowhere = Indexes("http://127.0.0.1:9/simple/", [], http.new_session(retries=0))
    return Builder(store, Path(sys.executable), nowhere, "2026-01-15T00:00:00Z", find_tools(Path(sys.executable)))


def locked(made: Made, store: Store, name: str = "my-source", env: Mapping[str, str] | None = None) -> Package:
    store.put(made.data)
    build = Build(tuple((env or {}).items()))
    return Package(name, "1.5", made.file, made.digest, made.size, (), build=build)


def members(wheel: BuiltWheel, store: Store) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(store.read(wheel.digest))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def workshop() -> Path:
    return Path(tempfile.gettempdir()) / f"envbuilder-{os.getuid()}"


def test_a_store_below_a_folder_with_spaces_builds_the_same(store: Store, tmp_path: Path):
    package = locked(SOURCE, store)
    other = Store(tmp_path / "a folder with spaces" / "store")
    locked(SOURCE, other)
    assert builder(other).build(package) == builder(store).build(package)


def test_a_workshop_that_others_can_enter_is_refused(store: Store):
    workshop().mkdir(mode=0o777)
    workshop().chmod(0o777)
    with pytest.raises(HostError, match="not a folder of this user alone"):
        builder(store).build(locked(SOURCE, store))


def test_build_twice_gives_the_same_bytes(store: Store, tmp_path: Path):
    package = locked(SOURCE, store, env={"BUILD_NOTE": "for the test"})
    first = builder(store).build(package)
    assert first.file == "my_source-1.5-py3-none-any.whl"
    assert first.size == store.blob(first.digest).stat().st_size
    assert members(first, store)["my_source/note.txt"] == b"for the test"
    assert not [path for path in workshop().iterdir() if path.is_dir()]
    other = Store(tmp_path / "elsewhere" / "store")
    locked(SOURCE, other)
    assert builder(other).build(package) == first


def test_what_was_built_is_remembered(store: Store, monkeypatch: pytest.MonkeyPatch):
    package = locked(SOURCE, store)
    first = builder(store).build(package)

    def never(*_args: object) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(Builder, "_build", never)
        assert builder(store).build(package) == first
        with pytest.raises(AssertionError):
            builder(store).build(replace(package, build=Build((("BUILD_NOTE", "other"),))))
        store.blob(first.digest).unlink()  # collected meanwhile
        with pytest.raises(AssertionError):
            builder(store).build(package)
    assert builder(store).build(package) == first


def test_the_build_sees_nothing_of_the_user(store: Store, monkeypatch: pytest.MonkeyPatch):
    backend = BACKEND["backend.py"].replace('os.environ.get("BUILD_NOTE", "")', "repr(sorted(os.environ.items()))")
    made = make_sdist("My.Source", "1.5", files={**BACKEND, "backend.py": backend})
    for name in ("PYTHONPATH", "MAKEFLAGS", "UV_EXCLUDE_NEWER", "PIP_INDEX_URL", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "2000-01-01")
    package = locked(made, store, env={"CFLAGS": "-O1", "LC_ALL": "C"})
    note = members(builder(store).build(package), store)["my_source/note.txt"].decode()
    seen = dict(eval(note))  # noqa: S307  (our own repr)
    assert "2000-01-01" not in seen.values()
    assert (seen["SOURCE_DATE_EPOCH"], seen["PYTHONHASHSEED"], seen["LC_ALL"]) == ("315532800", "0", "C")
    assert seen["CFLAGS"].startswith("-g0 -ffile-prefix-map=")
    assert seen["CFLAGS"].endswith(" -O1")


def test_failing_build_names_its_last_lines_its_needs_and_the_log(store: Store):
    made = make_sdist("My.Source", "1.5", files=FAILING)
    with pytest.raises(BuildFailedError, match="no curses here") as caught:
        builder(store).build(locked(made, store), ("a C compiler", "the headers of curses"))
    error = caught.value
    assert error.exit_code == 4
    assert error.hint is not None
    assert error.hint.startswith("the build needs a C compiler and the headers of curses; the whole log: ")
    assert "no curses here" in error.log.read_text()
    assert not [path for path in workshop().iterdir() if path.is_dir()]


def test_build_requirements_out_of_reach(store: Store):
    pyproject = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    made = make_sdist("My.Source", "1.5", files={"pyproject.toml": pyproject})
    with pytest.raises(http.OutOfReachError, match=r"what the build of my_source-1\.5\.tar\.gz needs"):
        builder(store).build(locked(made, store))


@pytest.mark.parametrize(("name", "version", "wrong"), [("My.Source", "1.6", "1.6"), ("other", "1.5", "other")])
def test_another_wheel_than_asked_for(store: Store, name: str, version: str, wrong: str):
    made = make_sdist(name, version, files=BACKEND)
    with pytest.raises(WrongWheelError, match=f"{wrong}.* instead of a wheel of my-source 1.5"):
        builder(store).build(locked(made, store))


def test_archive_that_is_absent_or_damaged(store: Store):
    package = locked(SOURCE, store)
    store.blob(package.digest).write_bytes(SOURCE.data[:-9] + bytes(9))
    with pytest.raises(WrongArchiveError, match="damaged"):
        builder(store).build(package)
    store.blob(package.digest).unlink()
    with pytest.raises(NotInStoreError, match=r"my_source-1\.5\.tar\.gz is not in the store"):
        builder(store).build(package)


def test_archive_that_would_leave_its_folder(store: Store):
    made = make_sdist("My.Source", "1.5", files={**BACKEND, "../../escaped.txt": "x"})
    with pytest.raises(WrongArchiveError, match="does not unpack"):
        builder(store).build(locked(made, store))
    assert list(store.root.rglob("escaped.txt")) == []


def test_zip_archive(store: Store):
    files = {**BACKEND, "PKG-INFO": SOURCE.metadata.decode(), "src/my_source/__init__.py": "x = 1\n"}
    data = make_zip([Member(f"my_source-1.5/{path}", text.encode()) for path, text in files.items()])
    made = replace(SOURCE, file="my_source-1.5.zip", data=data)
    assert builder(store).build(locked(made, store)).file == "my_source-1.5-py3-none-any.whl"


def test_repack_depends_on_contents_alone(tmp_path: Path):
    made = make_wheel("pkg", files={"pkg/b.py": "b", "pkg/a.py": "a", "pkg/run": "#!"}, executable={"pkg/run"})
    made.write(tmp_path)
    with zipfile.ZipFile(tmp_path / made.file) as archive:
        contents = {info.filename: (archive.read(info), info.external_attr >> 16) for info in archive.infolist()}
    order = sorted(contents, reverse=True)
    record = contents["pkg-1.0.dist-info/RECORD"][0]
    backwards = b"".join(reversed(record.splitlines(keepends=True)))
    contents["pkg-1.0.dist-info/RECORD"] = (backwards, 0o100600)
    other = make_zip([Member("pkg/", mode=0o40755), *(Member(name, *contents[name], 0) for name in order)])
    (tmp_path / "other.whl").write_bytes(other)
    for source, target in ((made.file, "one"), ("other.whl", "two")):
        repack(tmp_path / source, tmp_path / target)
    assert Digest.of_file(tmp_path / "one") == Digest.of_file(tmp_path / "two")
    with zipfile.ZipFile(tmp_path / "one") as archive:
        infos = archive.infolist()
        assert [info.filename for info in infos] == [
            "pkg/a.py", "pkg/b.py", "pkg/run", "pkg-1.0.dist-info/METADATA", "pkg-1.0.dist-info/WHEEL",
            "pkg-1.0.dist-info/RECORD",
        ]  # fmt: skip
        assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
        assert [oct(info.external_attr >> 16) for info in infos[1:3]] == ["0o100644", "0o100755"]
        assert sorted(archive.read("pkg-1.0.dist-info/RECORD").splitlines()) == sorted(record.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(("project", "version"), [("psutil", "5.9.0"), ("lazr-uri", "1.0.6")])
def test_real_archives_give_the_same_bytes_twice(store: Store, tmp_path: Path, project: str, version: str):
    python = find_interpreter("3.12", ("host", "managed"), store).executable
    with http.new_session() as session:
        indexes = Indexes(None, [], session)
        file = next(f for f in indexes.of(None).files(project) if f.file.endswith(f"-{version}.tar.gz"))
        assert file.digest is not None
        assert file.size is not None
        package = Package(project, version, file.file, file.digest, file.size, (), build=Build(()))
        built = []
        for one in (store, Store(tmp_path / "another" / "store")):
            fetch([package], one, indexes)
            built.append(Builder(one, python, indexes, "2026-01-15T00:00:00Z", find_tools(python)).build(package))
    assert built[0] == built[1]
    assert os.fsencode(store.root) not in store.read(built[0].digest)
