from __future__ import annotations

import ast
import gzip
import importlib.util
import io
import marshal
import subprocess
import sys
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import pytest

from envbuilder.oci.content import CorruptContentError
from envbuilder.store.store import Store
from envbuilder.wheels import _compile
from envbuilder.wheels.archive import WheelError
from envbuilder.wheels.bytecode import Compiler, CompilerError
from envbuilder.wheels.key import InstallPrefix, WheelFile, layer_key
from envbuilder.wheels.layer import write_wheels
from envbuilder.wheels.remembered import BytecodeCache
from tests.wheelmaker import Made, Member, make_wheel, make_zip

if TYPE_CHECKING:
    from collections.abc import Iterator

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
PREFIX = InstallPrefix("/opt/env", MINOR)
SITE = f"opt/env/lib/python{MINOR}/site-packages"


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with Compiler(Path(sys.executable), workers=1) as made:
        yield made


def wheel_file(made: Made, folder: Path) -> WheelFile:
    return WheelFile(made.file, made.digest, made.write(folder))


def layer_of(
    wheels: list[Made], folder: Path, compiler: Compiler
) -> tuple[str, dict[str, tarfile.TarInfo], tarfile.TarFile]:
    out = io.BytesIO()
    layer = write_wheels([wheel_file(w, folder) for w in wheels], PREFIX, lambda _: nullcontext(compiler), out)
    tar = tarfile.open(fileobj=io.BytesIO(gzip.decompress(out.getvalue())))  # noqa: SIM115
    return str(layer.digest), {m.name: m for m in tar}, tar


def read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def test_every_scheme_lands_where_a_virtual_environment_has_it(tmp_path: Path, compiler: Compiler):
    made = make_wheel(
        "Some.Thing",
        files={
            "some_thing/__init__.py": "x = 1\n",
            "some_thing/tool.sh": "#!/bin/sh\n",
            "some_thing/data.bin": b"\0" * 9,
        },
        executable=["some_thing/tool.sh"],
        entry_points={"thing": "some_thing:main"},
        scripts={"old-tool": "#!python\nprint('hi')\n"},
        data={"data/share/man/thing.1": "man\n", "headers/thing.h": "int x;\n", "purelib/extra.py": "y = 2\n"},
    )
    _, members, tar = layer_of([made], tmp_path, compiler)
    assert members[f"{SITE}/some_thing/tool.sh"].mode == 0o755
    assert members[f"{SITE}/some_thing/data.bin"].mode == 0o644
    assert f"{SITE}/extra.py" in members
    assert "opt/env/share/man/thing.1" in members
    assert f"opt/env/include/site/python{MINOR}/some-thing/thing.h" in members
    assert members["opt/env/bin/thing"].mode == 0o755
    assert read(tar, "opt/env/bin/thing").startswith(b"#!/opt/env/bin/python\n")
    assert read(tar, "opt/env/bin/old-tool").startswith(b"#!/opt/env/bin/python\n")
    assert read(tar, f"{SITE}/Some_Thing-1.0.dist-info/INSTALLER").strip() == b"envbuilder"


def test_record_tells_the_truth_about_every_file(tmp_path: Path, compiler: Compiler):
    made = make_wheel(
        "thing",
        files={"thing/__init__.py": "x = 1\n"},
        entry_points={"thing": "thing:main"},
        scripts={"s": "#!python\n"},
    )
    _, members, tar = layer_of([made], tmp_path, compiler)
    target = tmp_path / "root"
    tar.extractall(target, filter="data")
    program = (
        "import base64, hashlib, importlib.metadata, pathlib, sys\n"
        f"site = pathlib.Path({str(target / SITE)!r})\n"
        "d = next(importlib.metadata.distributions(path=[str(site)]))\n"
        "for f in d.files:\n"
        "    p = pathlib.Path(f.locate())\n"
        "    if f.hash is None: assert f.name == 'RECORD', f; continue\n"
        "    h = base64.urlsafe_b64encode(hashlib.sha256(p.read_bytes()).digest()).decode().rstrip('=')\n"
        "    assert (f.hash.value, f.size) == (h, p.stat().st_size), f\n"
        "print(len(d.files))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    files = [m for m in members.values() if m.isfile() and m.name.startswith("opt/")]
    assert int(done.stdout) == len(files)


def test_bytecode_is_that_of_the_source_and_unchecked(tmp_path: Path, compiler: Compiler):
    source = "def f():\n    return {'a', 'b', 'c'}\n"
    made = make_wheel("thing", files={"thing/mod.py": source, "thing/py2.py": "print 'no'\n"})
    _, members, tar = layer_of([made], tmp_path, compiler)
    data = read(tar, f"{SITE}/thing/__pycache__/mod.{TAG}.pyc")
    assert data[:4] == importlib.util.MAGIC_NUMBER
    assert data[4:8] == b"\1\0\0\0"
    assert data[8:16] == importlib.util.source_hash(source.encode())
    code = marshal.loads(data[16:])  # noqa: S302
    assert code.co_filename == f"/{SITE}/thing/mod.py"
    assert f"{SITE}/thing/__pycache__/py2.{TAG}.pyc" not in members


def test_bytecode_does_not_depend_on_what_was_compiled_before():
    """marshal's reference marks depend on reference counts of interned strings; ours must not."""
    library = Path(ast.__file__).parent
    sources = {name: (library / f"{name}.py").read_bytes() for name in ("ast", "argparse", "enum", "typing", "tarfile")}

    def compile_in(order: list[str]) -> dict[str, bytes]:
        with Compiler(Path(sys.executable), workers=1) as fresh:
            return {name: fresh.submit(name, sources[name]).result() for name in order}

    forwards, backwards = compile_in(sorted(sources)), compile_in(sorted(sources, reverse=True))
    assert forwards == backwards
    assert compile_in(["enum"])["enum"] == forwards["enum"]


def test_bytecode_does_not_depend_on_letters_that_were_names_before():
    """A name of one Latin-1 letter interns that letter's only object; base-v3 had two digests because of it."""
    symbols = "table = {" + ", ".join(f"'{chr(n)}': '\\\\{n}'" for n in range(0xC0, 0x100)) + "}\n"
    names = "".join(f"{chr(n)} = {n}\n" for n in range(0xC0, 0x100) if chr(n).isidentifier())

    def compile_after(*sources: str) -> bytes:
        with Compiler(Path(sys.executable), workers=1) as fresh:
            for source in sources:
                fresh.submit("before.py", source.encode()).result()
            return fresh.submit("symbols.py", symbols.encode()).result()

    assert compile_after() == compile_after(names)


def test_bytecode_does_not_depend_on_where_objects_lie():
    """The compiler merges equal frozensets of two functions or not, by their addresses; ai-v4 had two digests by it.

    Whether it does cannot be provoked, so this looks at what makes it harmless: no two are one object.
    """
    source = "".join(f"def f{n}(x):\n    return x in {{'one', 'two'}} or (x, ({{1, 2}},))\n" for n in range(3))
    code = _compile.settle(compile(source, "a.py", "exec"), [])

    def sets(value: object) -> Iterator[frozenset[object]]:
        if isinstance(value, frozenset):
            yield value
        for inner in value.co_consts if isinstance(value, CodeType) else value if isinstance(value, tuple) else ():
            yield from sets(inner)

    found = list(sets(code))
    assert len(found) == 3
    assert len({id(one) for one in found}) == 3
    namespace: dict[str, Any] = {}
    exec(code, namespace)  # noqa: S102
    assert namespace["f1"]("one") is True


def test_each_of_many_sources_gets_its_own_bytecode():
    """More than one batch of them, some longer than a pipe holds, and one that is not valid Python."""
    sources = {f"m{n}.py": b"x = %d\n" % n * (n % 20) ** 3 for n in range(60)} | {"bad.py": b"print 'no'\n"}
    with Compiler(Path(sys.executable), workers=2) as many, Compiler(Path(sys.executable), workers=1) as one:
        waiting = {path: many.submit(path, source) for path, source in sources.items()}
        compiled = {path: future.result() for path, future in waiting.items()}
        assert compiled["bad.py"] == b""
        assert all(compiled[path] == one.submit(path, sources[path]).result() for path in ("m0.py", "m7.py", "m59.py"))
    for path in waiting.keys() - {"bad.py"}:
        code = marshal.loads(compiled[path][16:])  # noqa: S302 (our own)
        assert code.co_filename == path
        namespace: dict[str, Any] = {}
        exec(code, namespace)  # noqa: S102
        number = int(path[1:-3])
        assert namespace.get("x") == (number if number % 20 else None)


def test_a_compiler_that_ends_early_is_an_error_for_all_that_waits(tmp_path: Path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec head -c 20 > /dev/null\n")
    program.chmod(0o755)
    with Compiler(program, workers=2) as compiler:
        waiting = [compiler.submit(f"m{n}.py", b"x = 1\n" * 20_000) for n in range(20)]
        for future in waiting:
            with pytest.raises(CompilerError, match=r"ended while it compiled m\d+\.py"):
                future.result()


def test_remembered_bytecode_is_used_and_is_the_same(tmp_path: Path):
    store = Store(tmp_path / "store")
    wheel = wheel_file(make_wheel("thing", files={"thing.py": "x = 1\n", "no.py": "print 'no'\n"}), tmp_path)
    layers = []
    for python in (Path(sys.executable), Path("/no/such/python")):  # the second one must not be needed
        with Compiler(python, workers=1) as compiler:
            remembered = BytecodeCache(store, compiler, "3.x /opt/env")
            layers.append(write_wheels([wheel], PREFIX, remembered.of, io.BytesIO()))
    assert layers[0] == layers[1]
    with Compiler(Path(sys.executable), workers=1) as compiler:
        assert write_wheels([wheel], PREFIX, lambda _: nullcontext(compiler), io.BytesIO()) == layers[0]
        other = BytecodeCache(store, compiler, "another scope")
        assert write_wheels([wheel], PREFIX, other.of, io.BytesIO()) == layers[0]


def test_same_wheels_same_digest_wherever_they_lie(tmp_path: Path, compiler: Compiler):
    wheels = [make_wheel("a", files={"a.py": "1\n"}), make_wheel("b", files={"b.py": "2\n"})]
    one, _, _ = layer_of(wheels, tmp_path / "one", compiler)
    two, _, _ = layer_of(wheels, tmp_path / "two", compiler)
    assert one == two


@pytest.mark.parametrize("same", [True, False])
def test_two_wheels_may_own_one_path(
    tmp_path: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture, *, same: bool
):
    wheels = [
        make_wheel(name, files={"space/__init__.py": "# same\n" if same else f"# {name}\n", f"space/{name}.py": ""})
        for name in ("a", "b")
    ]
    _, _, tar = layer_of(wheels, tmp_path, compiler)
    assert read(tar, f"{SITE}/space/__init__.py") == (b"# same\n" if same else b"# b\n")
    told = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert told == (
        []
        if same
        else [
            "a-1.0-py3-none-any.whl and b-1.0-py3-none-any.whl both hold space/__init__.py; that of the latter is taken"
        ]
    )


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (Member("../evil", b"x"), "leaves the installation prefix"),
        (Member("a/../../evil", b"x"), "leaves the installation prefix"),
        (Member("/etc/evil", b"x"), "leaves the installation prefix"),
        (Member("thing-1.0.data/data/../../../evil", b"x"), "leaves the installation prefix"),
        (Member.symlink("thing/link", "/etc/passwd"), "symbolic link"),
        (Member("thing.py", b"twice"), "twice"),
        (Member("a\nb", b"x"), "control character"),
    ],
    ids=["parent", "hidden parent", "absolute", "data parent", "symlink", "duplicate", "control"],
)
def test_members_that_mislead_are_refused_by_name(tmp_path: Path, compiler: Compiler, member: Member, reason: str):
    made = make_wheel("thing", extra_members=[member])
    with pytest.raises(WheelError, match=reason) as caught:
        layer_of([made], tmp_path, compiler)
    assert caught.value.wheel == made.file
    assert caught.value.member is not None


@pytest.mark.parametrize("where", ["files", "scripts"])
def test_a_record_that_lies_about_a_file_is_refused(tmp_path: Path, compiler: Compiler, where: str):
    contents = {"thing/mod.py": "x = 1\n"} if where == "files" else {"tool": "#!python\n"}
    name = "thing/mod.py" if where == "files" else "thing-1.0.data/scripts/tool"
    honest = make_wheel("thing", **{where: contents})  # type: ignore[arg-type]
    with zipfile.ZipFile(io.BytesIO(honest.data)) as archive:
        rows = archive.read("thing-1.0.dist-info/RECORD").decode().splitlines()
    hash_of_nothing = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    lies = [f"{name},{hash_of_nothing},{row.rpartition(',')[2]}" if row.startswith(f"{name},") else row for row in rows]
    made = make_wheel("thing", record="\n".join(lies) + "\n", **{where: contents})  # type: ignore[arg-type]
    with pytest.raises(CorruptContentError, match=f"{name}: does not have the sha256 that RECORD names"):
        layer_of([made], tmp_path, compiler)


def test_a_file_where_another_wheel_has_a_folder_is_refused(tmp_path: Path, compiler: Compiler):
    wheels = [make_wheel("a", files={"space/a.py": ""}), make_wheel("b", files={"space": "not a folder"})]
    with pytest.raises(WheelError, match=r"a-1\.0.*space"):
        layer_of(wheels, tmp_path, compiler)


def test_a_covered_source_leaves_no_bytecode(tmp_path: Path, compiler: Compiler):
    """The last wheel's file is no valid Python: bytecode of another wheel's would be run in its place."""
    wheels = [make_wheel("a", files={"x.py": "a = 1\n"}), make_wheel("b", files={"x.py": "print 'no'\n"})]
    _, members, tar = layer_of(wheels, tmp_path, compiler)
    assert read(tar, f"{SITE}/x.py") == b"print 'no'\n"
    assert [name for name in members if name.endswith(".pyc")] == []


def test_a_program_among_scripts_is_copied_as_the_wheel_has_it(tmp_path: Path, compiler: Compiler):
    program = b"\x7fELF" + b"".join(n.to_bytes(4, "big") for n in range(50_000))
    made = make_wheel("thing", scripts={"tool": program, "tiny": "#!"})
    _, members, tar = layer_of([made], tmp_path, compiler)
    assert read(tar, "opt/env/bin/tool") == program
    assert read(tar, "opt/env/bin/tiny") == b"#!"
    assert members["opt/env/bin/tool"].mode == members["opt/env/bin/tiny"].mode == 0o755
    with zipfile.ZipFile(io.BytesIO(made.data)) as archive:
        info = archive.getinfo("thing-1.0.data/scripts/tool")
    start = info.header_offset + 30 + len(info.filename)
    out = io.BytesIO()
    write_wheels([wheel_file(made, tmp_path)], PREFIX, None, out)
    assert made.data[start : start + info.compress_size] in out.getvalue()


def test_an_enormous_source_gets_no_bytecode(tmp_path: Path, compiler: Compiler):
    made = make_wheel("thing", files={"small.py": "x = 1\n", "large.py": "x = 1\n" * 800_000})
    _, members, _ = layer_of([made], tmp_path, compiler)
    compiled = [name.rpartition("/")[2] for name in members if name.endswith(".pyc")]
    assert compiled == [f"small.{TAG}.pyc"]


def test_a_bytecode_folder_in_a_wheel_is_passed_over(tmp_path: Path, compiler: Compiler):
    made = make_wheel("thing", extra_members=[Member(f"__pycache__/thing.{TAG}.pyc", b"evil")])
    _, _, tar = layer_of([made], tmp_path, compiler)
    assert read(tar, f"{SITE}/__pycache__/thing.{TAG}.pyc") != b"evil"


def test_stored_members_are_fine(tmp_path: Path, compiler: Compiler):
    made = make_wheel("thing", files={"thing.py": "x = 1\n" * 100}, compression=zipfile.ZIP_STORED)
    _, _, tar = layer_of([made], tmp_path, compiler)
    assert read(tar, f"{SITE}/thing.py") == b"x = 1\n" * 100


def test_damaged_wheels_are_refused(tmp_path: Path, compiler: Compiler):
    made = make_wheel("thing", files={"thing.bin": bytes(range(256)) * 400})
    hit = made.data.index(b"thing.bin") + 200
    broken = Made(made.file, made.data[:hit] + bytes([made.data[hit] ^ 0xFF]) + made.data[hit + 1 :], made.metadata)
    with pytest.raises(CorruptContentError, match=r"thing\.bin"):
        layer_of([broken], tmp_path, compiler)
    with pytest.raises(WheelError, match="not a ZIP archive"):
        layer_of([Made(made.file, made.data[:100], made.metadata)], tmp_path, compiler)
    with pytest.raises(WheelError, match=r"dist-info"):
        layer_of([Made(made.file, make_zip([Member("x.py", b"")]), b"")], tmp_path, compiler)


def test_the_key_knows_everything_that_changes_the_bytes(tmp_path: Path):
    a, b = (wheel_file(make_wheel(n), tmp_path) for n in "ab")
    key = layer_key([a, b], PREFIX, "3.12.1")
    assert key == layer_key([a, b], PREFIX, "3.12.1")
    others = [
        layer_key([a], PREFIX, "3.12.1"),
        layer_key([b, a], PREFIX, "3.12.1"),
        layer_key([a, b], InstallPrefix("/opt/other", MINOR), "3.12.1"),
        layer_key([a, b], PREFIX, "3.12.2"),
    ]
    assert key not in others
    assert len(set(others)) == len(others)
