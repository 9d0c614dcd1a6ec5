"""Finding interpreters, and moving one into a layer: with the one these tests run on."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from envbuilder.errors import HostError, InputError
from envbuilder.oci.blob import Compression
from envbuilder.oci.model import LAYER_GZIP, LAYER_TAR, LAYER_ZSTD
from envbuilder.store.store import Store
from envbuilder.system.elf import ElfError, read_elf
from envbuilder.system.interpreter import Interpreter, find_interpreter, interpreter_layer
from envbuilder.system.pythons import NoInterpreterError
from envbuilder.system.pythontree import SYSTEM_LIBRARIES, Picked, carried, check_glibc, pick
from envbuilder.system.relocate import Move, RelocationError, blot_out, parse_variables, rewrite

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
BASE = Path(sys.base_prefix).resolve()
needs_movable = pytest.mark.skipif(
    str(BASE) == "/usr" or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="needs a Python in a folder of its own, with headers",
)


def environ(**names: str) -> dict[str, str]:
    """Return an environment in which nothing but what is named is to be found, and no network is waited for."""
    # uv makes folders in a home of which it could make one: /dev/null is none.
    nowhere = {"HOME": "/dev/null", "PYENV_ROOT": "/dev/null", "UV_NO_CACHE": "1", "UV_OFFLINE": "1"}
    return {"PATH": "", **nowhere, **names}


def program(folder: Path, text: str) -> Path:
    path = folder / f"python{MINOR}"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# -- finding ------------------------------------------------------------------------------------------------------


@needs_movable
def test_one_that_is_named_is_found_and_its_real_folder_told(tmp_path):
    found = find_interpreter(MINOR, ["host"], Store(tmp_path), environ=environ(ENVBUILDER_PYTHON=sys.executable))
    assert (found.kind, found.minor, found.prefix) == ("host", MINOR, BASE)
    assert found.executable == Path(sys.executable).resolve()


@needs_movable
def test_shims_and_versions_of_pyenv(tmp_path):
    shims, versions = tmp_path / "shims", tmp_path / "versions"
    shims.mkdir()
    program(shims, f'exec {sys.executable} "$@"')
    found = find_interpreter(MINOR, ["host"], Store(tmp_path / "1"), environ=environ(PATH=str(shims)))
    assert found.prefix == BASE
    versions.mkdir()
    (versions / f"{MINOR}.99").symlink_to(BASE)
    found = find_interpreter(MINOR, ["host"], Store(tmp_path / "2"), environ=environ(PYENV_ROOT=str(tmp_path)))
    assert found.prefix == BASE


@needs_movable
def test_what_does_not_run_is_passed_over(tmp_path):
    program(tmp_path, "echo broken; exit 1")
    path = f"{tmp_path}:{Path(sys.executable).parent}"
    assert find_interpreter(MINOR, ["host"], Store(tmp_path / "s"), environ=environ(PATH=path)).prefix == BASE


@needs_movable
def test_a_managed_one_that_is_there_is_preferred(tmp_path):
    store = Store(tmp_path / "store")
    folder = store.root / "pythons" / f"cpython-{MINOR}.{sys.version_info.micro}-linux-x86_64-gnu"
    folder.mkdir(parents=True)
    for path in BASE.iterdir():
        (folder / path.name).symlink_to(path)
    found = find_interpreter(MINOR, ["managed", "host"], store, environ=environ())
    assert found.kind == "managed"


@needs_movable
def test_a_failed_download_falls_through_and_is_remembered(tmp_path, caplog):
    store = Store(tmp_path / "store")
    env = environ(ENVBUILDER_PYTHON=sys.executable, UV_PYTHON_INSTALL_DIR=str(tmp_path / "none"))
    with caplog.at_level(logging.INFO):
        assert find_interpreter(MINOR, ["managed", "host"], store, environ=env).kind == "host"
    fetching, instead = (record.getMessage() for record in caplog.records)
    assert fetching == f"Fetching uv's standalone Python {MINOR}"
    assert instead.startswith("uv's standalone Python is out of reach: ")
    assert instead.endswith(f"from {BASE} is used instead")
    (failure,) = (store.root / "known" / "managed-python").iterdir()
    assert json.loads(failure.read_text())["reason"]


@needs_movable
def test_what_was_found_is_not_asked_again_until_it_changes(tmp_path):
    store = Store(tmp_path / "store")
    shim = program(tmp_path, f'echo asked >> {tmp_path}/log; exec {sys.executable} "$@"')
    env = environ(ENVBUILDER_PYTHON=str(shim))
    first = find_interpreter(MINOR, ["host"], store, environ=env)
    assert find_interpreter(MINOR, ["host"], store, environ=env) == first
    assert (tmp_path / "log").read_text() == "asked\n"
    (known,) = (store.root / "known" / "interpreter").iterdir()
    known.write_text(known.read_text().replace('"stamp":[[', '"stamp":[["changed"],['))
    assert find_interpreter(MINOR, ["host"], store, environ=env) == first
    assert (tmp_path / "log").read_text() == "asked\n" * 2


def test_none_to_be_had_says_what_was_tried(tmp_path):
    answer: dict[str, str | int] = {"implementation": "PyPy", "version": "9.9.1", "executable": "/x", "prefix": "/x"}
    answer |= {"headers": True, "free_threaded": False, "bits": 64}
    path = tmp_path / "python9.9"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    path.chmod(0o755)
    env = environ(PATH=str(tmp_path), ENVBUILDER_PYTHON="/nowhere/python")
    with pytest.raises(NoInterpreterError, match=r"no Python 9\.9 is to be had") as caught:
        find_interpreter("9.9", ["host"], Store(tmp_path / "store"), environ=env)
    text = "\n".join(caught.value.tried)
    assert "/nowhere/python, which ENVBUILDER_PYTHON names, is no program" in text
    assert f"{path}: is not the 64 bit CPython" in text


def test_kinds(tmp_path):
    store = Store(tmp_path)
    base = find_interpreter("3.12", ["base"], store, environ=environ())
    assert base == Interpreter("base", "3.12", Path("/usr/bin/python3.12"), Path("/usr"))
    with pytest.raises(InputError, match="has no layer"):
        interpreter_layer(base, "/opt/python", store)
    with pytest.raises(InputError, match="unknown kind of interpreter `conda`"):
        find_interpreter("3.12", ["conda"], store, environ=environ())


# -- moving -------------------------------------------------------------------------------------------------------


class Marker:
    """Compiles to a mark, so that what was compiled can be seen."""

    revision = "mark 1"

    def submit(self, path: str, source: bytes) -> Future[bytes]:
        future: Future[bytes] = Future()
        future.set_result(b"" if path.endswith("/bisect.py") else path.encode() + source[:0])
        return future


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack this Python's layer somewhere and give the new prefix's folder."""
    folder = tmp_path_factory.mktemp("moved")
    store = Store(folder / "store")
    layer = interpreter_layer(Interpreter("host", f"{MINOR}.0", Path(sys.executable).resolve(), BASE), "/opt/py", store)
    with tarfile.open(fileobj=io.BytesIO(store.read(layer.digest)), mode="r:gz") as archive:
        archive.extractall(folder / "root", filter="tar")
    return Path(folder / "root" / "opt" / "py")


def python(moved: Path, code: str) -> str:
    argv = [str(moved / "bin" / "python"), "-I", "-B", "-c", code]
    return str(subprocess.run(argv, check=True, capture_output=True, text=True, env={}).stdout).strip()


@needs_movable
def test_the_moved_python_finds_its_prefix_and_its_libraries(moved):
    assert python(moved, "import sys; print(sys.prefix, sys.version.split()[0])") == f"{moved} {sys.version.split()[0]}"
    modules = "ssl, sqlite3, ctypes, lzma, bz2, hashlib, zlib, curses, uuid, decimal, venv, ensurepip"
    taken = python(moved, f"import {modules}, _ssl; print(_ssl.__file__)")
    assert taken.startswith(str(moved))
    loaded = python(moved, "import ssl, lzma; print(open('/proc/self/maps').read())")
    names = {line.rpartition("/")[2] for line in loaded.splitlines() if ".so" in line and str(moved) not in line}
    assert all(SYSTEM_LIBRARIES.fullmatch(name) for name in names)


@needs_movable
def test_build_variables_hold_in_the_image(moved):
    code = "import sysconfig; print([sysconfig.get_config_var(n) for n in ('CC', 'LIBDIR', 'prefix')])"
    compiler, libdir, prefix = eval(python(moved, code))  # noqa: S307 (our own list)
    assert compiler.split()[0] == "gcc"
    assert libdir == "/opt/py/lib"
    assert prefix == "/opt/py" or prefix == str(moved)
    assert python(moved, "import sysconfig; print(sysconfig.get_path('include'))") == f"{moved}/include/python{MINOR}"
    assert (moved / "include" / f"python{MINOR}" / "Python.h").exists()


@needs_movable
def test_nothing_of_the_old_prefix_remains(moved):
    old = str(BASE).encode()
    if old.decode() in {"/usr/local", "/opt"}:
        pytest.skip("this Python's prefix says nothing of the machine")
    left = [path for path in moved.rglob("*") if path.is_file() and old in path.read_bytes()]
    assert left == []


@needs_movable
def test_tests_packages_and_screens_are_left_behind(moved):
    library = moved / "lib" / f"python{MINOR}"
    assert list((library / "site-packages").iterdir()) == []
    for name in ("test", "idlelib", "tkinter", "turtle.py", "__pycache__"):
        assert not (library / name).exists()
    assert (library / "unittest" / "case.py").exists()
    assert (moved / "bin" / "python3").readlink() == Path(f"python{MINOR}")


def small_python(prefix: Path) -> Interpreter:
    """Copy a few files of this Python to a prefix of its own."""
    library = f"lib/python{MINOR}"
    names = [f"bin/python{MINOR}", f"{library}/os.py", f"{library}/bisect.py", f"include/python{MINOR}/Python.h"]
    patterns = [f"{library}/_sysconfigdata*.py", "lib/libpython*.so*", f"{library}/lib-dynload/_lzma*.so"]
    for path in [*(BASE / name for name in names), *(path for pattern in patterns for path in BASE.glob(pattern))]:
        target = prefix / path.relative_to(BASE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target, follow_symlinks=False)
    return Interpreter("host", f"{MINOR}.0", prefix / "bin" / f"python{MINOR}", prefix)


@needs_movable
def test_same_files_same_bytes_wherever_they_lay(tmp_path):
    one, two = Store(tmp_path / "1"), Store(tmp_path / "2")
    layer = interpreter_layer(small_python(tmp_path / "here"), "/opt/py", one, Marker())
    assert interpreter_layer(small_python(tmp_path / "elsewhere"), "/opt/py", two, Marker()) == layer
    with tarfile.open(fileobj=io.BytesIO(one.read(layer.digest)), mode="r:gz") as archive:
        compiled = {member.name for member in archive if member.name.endswith(".pyc")}
    tag, library = sys.implementation.cache_tag, f"opt/py/lib/python{MINOR}"
    assert f"{library}/__pycache__/os.{tag}.pyc" in compiled
    assert f"{library}/__pycache__/bisect.{tag}.pyc" not in compiled


@needs_movable
def test_an_unchanged_interpreter_is_not_read_again_and_a_changed_one_is(tmp_path):
    store, small = Store(tmp_path / "store"), small_python(tmp_path / "py")
    layer = interpreter_layer(small, "/opt/py", store)
    begin = time.perf_counter()
    assert interpreter_layer(small, "/opt/py", store) == layer
    assert time.perf_counter() - begin < 0.1
    source = small.prefix / "lib" / f"python{MINOR}" / "os.py"
    before = source.stat()
    source.write_bytes(source.read_bytes().replace(b"import", b"pmiort", 1))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = interpreter_layer(small, "/opt/py", store)
    assert changed != layer, "neither its size nor the time of its modification tells that it is another file"
    source.with_name("added.py").touch()
    assert interpreter_layer(small, "/opt/py", store) not in {layer, changed}
    source.with_name("added.py").unlink()
    source.write_bytes(source.read_bytes().replace(b"pmiort", b"import", 1))
    assert interpreter_layer(small, "/opt/py", store) == layer


@needs_movable
def test_another_compression_is_another_layer(tmp_path):
    store, small = Store(tmp_path / "store"), small_python(tmp_path / "py")
    layers = [interpreter_layer(small, "/opt/py", store, Marker(), compression) for compression in Compression]
    assert [layer.media_type for layer in layers] == [LAYER_GZIP, LAYER_ZSTD, LAYER_TAR]
    assert layers == [interpreter_layer(small, "/opt/py", store, Marker(), compression) for compression in Compression]
    with tarfile.open(fileobj=io.BytesIO(store.read(layers[2].digest)), mode="r:") as archive:
        assert f"opt/py/bin/python{MINOR}" in archive.getnames()


@needs_movable
def test_the_libraries_taken_along_are_watched_too(tmp_path):
    store = Store(tmp_path / "store")
    small = small_python(tmp_path / "py")
    interpreter_layer(small, "/opt/py", store)
    (known,) = (store.root / "known" / "interpreter-layer").iterdir()
    watched = json.loads(known.read_text())["stamps"]
    files, _ = pick(small.prefix, MINOR)
    assert {str(file.source) for file in carried(files, small.prefix)} <= set(watched)


def test_a_newer_glibc_than_the_bases_is_refused():
    elf = read_elf(Path(sys.executable).read_bytes(), sys.executable)
    picked = [Picked("bin/python", Path(sys.executable), elf)]
    check_glibc(picked, ".".join(map(str, elf.glibc)))
    check_glibc(picked, "2.99")
    with pytest.raises(HostError, match=r"and the base has 2\.2"):
        check_glibc(picked, "2.2")


def test_what_is_no_elf_file_is_refused():
    whole = Path(sys.executable).read_bytes()
    with pytest.raises(ElfError, match="not a 64 bit"):
        read_elf(b"\x7fELF\x01\x01" + bytes(100), "x")
    with pytest.raises(ElfError, match="damaged"):
        read_elf(whole[:64], "x")


MOVE = Move(("/home/anna/py/3.12.1", "/usr/local"), "/opt/py")


def test_rewriting_texts():
    config = b"prefix=/usr/local\nlibs=-L/usr/local/lib -I/home/anna/py/3.12.1/include /x/usr/local /usr/local2\n"
    assert rewrite("lib/pkgconfig/python-3.12.pc", config, MOVE) == (
        b"prefix=/opt/py\nlibs=-L/opt/py/lib -I/opt/py/include /x/usr/local /usr/local2\n"
    )
    source = b"#! /usr/local/bin/python\n# /home/anna/py/3.12.1/x and /home/anna/py/3.12.10\n"
    assert rewrite("lib/python3.12/cgi.py", source, MOVE) == (
        b"#! /usr/local/bin/python\n# /opt/py/x and /home/anna/py/3.12.10\n"
    )
    assert rewrite("bin/python3.12-config", b"#!/usr/local/bin/python3.12\n", MOVE) == b"#!/opt/py/bin/python3.12\n"
    assert rewrite("lib/python3.12/x.bin", b"\0/home/anna/py/3.12.1", MOVE) == b"\0/home/anna/py/3.12.1"


def test_rewriting_build_variables():
    data = b"# c\nbuild_time_vars = {'CC': '/home/anna/bin/clang -pthread', 'B': 1, 'LIBDIR': '/usr/local/lib', 'AR': ''}\n"
    found = parse_variables(rewrite("lib/python3.12/_sysconfigdata_x.py", data, MOVE), "x")
    assert found == {"AR": "", "B": 1, "CC": "gcc -pthread", "LIBDIR": "/opt/py/lib"}
    for bad in (b"x = 1", b"build_time_vars = {", b"build_time_vars = open()"):
        with pytest.raises(RelocationError):
            parse_variables(bad, "x")


def test_a_compiled_in_prefix_loses_its_folder_and_keeps_its_length_and_end():
    data = b"\0/home/anna/py/3.12.1\0/home/anna/py/3.12.1/lib\0/home/anna/py/3.12.12\0/usr/local\0"
    assert blot_out(data, MOVE) == (
        b"\0/opt/py///////3.12.1\0/opt/py///////3.12.1/lib\0/home/anna/py/3.12.12\0/usr/local\0"
    )
    assert blot_out(data, Move(MOVE.old, "/a/very/long/prefix")) == data


def test_libraries_of_the_system_stay_with_the_system():
    for name in (
        "libc.so.6",
        "ld-linux-x86-64.so.2",
        "libm.so.6",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "linux-vdso.so.1",
    ):
        assert SYSTEM_LIBRARIES.fullmatch(name)
    for name in ("libcrypt.so.1", "libcrypto.so.3", "libz.so.1", "libncursesw.so.6", "libmpdec.so.3"):
        assert not SYSTEM_LIBRARIES.fullmatch(name)
