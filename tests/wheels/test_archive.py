"""What is refused of wheels, by name and with the reason, and what is not refused although it is odd."""

from __future__ import annotations

import gc
import hashlib
import io
import random
import stat
import struct
import sys
import tracemalloc
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import pytest

from envbuilder.errors import EnvbuilderError
from envbuilder.images.layering import Group
from envbuilder.lock.model import Package
from envbuilder.oci.content import CorruptContentError, Deflated
from envbuilder.store.store import Store
from envbuilder.wheels.archive import Limits, MemberStream, WheelError, open_wheel
from envbuilder.wheels.bytecode import Compiler
from tests.images.test_packages import Supply, layers
from tests.wheelmaker import Made, Member, make_wheel, make_zip, record_hash
from tests.wheels import fuzz_wheels
from tests.wheels.damage import DATA, GOOD, INFO, installed, patched, read, refused

# Names


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../evil", "leaves the installation prefix"),
        ("a/../../evil", "leaves the installation prefix"),
        ("a/..", "leaves the installation prefix"),
        ("/evil", "leaves the installation prefix"),
        ("a\\b", "leaves the installation prefix"),
        ("C:evil", "leaves the installation prefix"),
        ("a\0b", "control character"),
        ("a\rb", "control character"),
        ("a\x7fb", "control character"),
        ("a\x85b", "control character"),
        (".", "not a plain path"),
        ("./a", "not a plain path"),
        ("a//b", "not a plain path"),
        ("a//", "not a plain path"),
        ("x" * 256, "name that is too long"),
        ("é" * 128, "name that is too long"),
        ("x" * 250 + ".py", "name that is too long"),
        ("/".join(["x" * 250] * 16), "path that is too long"),
        ("d/" * 1200 + "f", "path that is too long"),
        ("a/__pycache__", "folder that bytecode is written to"),
        ("thing.py/x", "both a file and a folder"),
        ("thing.py/", "both a file and a folder"),
        (INFO, "both a file and a folder"),
        (DATA, "known folder"),
        (f"{DATA}/scripts", "known folder"),
        (f"{DATA}/bogus/x", "known folder"),
        (f"{DATA}/purelib/thing.py", "lands where 'thing.py' does"),
        (f"{DATA}/platlib/{INFO}/RECORD", "lands where"),
        (f"{DATA}/data/lib/python3.12/site-packages/thing.py", "lands where 'thing.py' does"),
        (f"{DATA}/data/lib/python3.12", "both a file and a folder"),
        (f"{DATA}/data/bin", "both a file and a folder"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_names_that_are_refused(tmp_path: Path, name: str, reason: str):
    made = make_wheel("thing", extra_members=[Member(name, b"" if name.endswith("/") else b"x")])
    with pytest.raises(WheelError, match=reason) as caught:
        read(made.data, tmp_path)
    assert caught.value.member in {name, "thing.py", f"{INFO}/METADATA"} or name == INFO


def test_a_path_of_two_schemes_is_one_place(tmp_path: Path):
    made = make_wheel("thing", scripts={"tool": "#!python\n"}, data={"data/bin/tool": "x"})
    refused(made.data, tmp_path, "lands where", member=f"{DATA}/scripts/tool")


@pytest.mark.parametrize(
    "name",
    ["THING.py", "..data", "a ", "a.", " a", "a\u2028b", "ü", "a,b", 'a"b', "~", "ab:c", "é" * 127, "d/" * 90 + "f"],
)
def test_odd_names_that_are_fine(tmp_path: Path, name: str):
    made = make_wheel("thing", files={"thing.py": "", name: b"x"}, record=f"{INFO}/RECORD,,\n")
    assert read(made.data, tmp_path)[name] == b"x"
    installed(made.data, tmp_path)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [(stat.S_IFLNK, "symbolic link"), (stat.S_IFIFO, "neither"), (stat.S_IFCHR, "neither"), (stat.S_IFDIR, "neither")],
)
def test_types_that_are_refused(tmp_path: Path, mode: int, reason: str):
    made = make_wheel("thing", extra_members=[Member("odd", b"x", mode | 0o644)])
    refused(made.data, tmp_path, reason, member="odd")


def test_folders_are_passed_over_but_hold_nothing(tmp_path: Path):
    made = make_wheel(
        "thing", files={"thing.py": ""}, extra_members=[Member("empty/", b""), Member(f"{DATA}/odd/", b"")]
    )
    assert "empty/" not in read(made.data, tmp_path)
    made = make_wheel("thing", extra_members=[Member("full/", b"x")])
    refused(made.data, tmp_path, "a folder that holds bytes", member="full/")


def test_names_that_do_not_say_they_are_utf8(tmp_path: Path):
    """Code page 437, as for zipfile and pip."""
    made = make_wheel("thing", extra_members=[Member("th_ng", b"x")])
    assert "th\xe9ng" in read(made.data.replace(b"th_ng", b"th\x82ng"), tmp_path)
    data = make_wheel("thing", extra_members=[Member("thé", b"x")]).data
    refused(data.replace("thé".encode(), b"th\xff\xfe"), tmp_path, "not UTF-8", member="th\ufffd\ufffd")


@pytest.mark.parametrize("honest", [True, False])
def test_a_second_name_in_an_extra_field_must_be_the_same(tmp_path: Path, honest: bool):  # noqa: FBT001
    """Info-ZIP writes one; zipfile follows it since Python 3.13."""
    raw = "é".encode()
    field = b"\1" + struct.pack("<L", zlib.crc32(raw)) + (raw if honest else b"ev")
    info = zipfile.ZipInfo("__")
    info.extra = struct.pack("<HH", 0x7075, len(field)) + field
    out = io.BytesIO(make_wheel("thing").data)
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr(info, b"x")
    data = out.getvalue().replace(b"__", raw)
    if honest:
        assert "é" in read(data, tmp_path)
    else:
        refused(data, tmp_path, "two names", member=raw.decode("cp437"))


# What is in a wheel


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[console_scripts]\n../evil = a:b\n", "'../evil', which is not the name of a file"),
        ("[console_scripts]\n.. = a:b\n", "not the name of a file"),
        ("[gui_scripts]\na\\b = a:b\n", "not the name of a file"),
        ("[console_scripts]\n" + "x" * 256 + " = a:b\n", "not the name of a file"),
        ("[console_scripts]\nx = a\n", "'x', which is not `module:object`"),
        ("[console_scripts]\nx = a:b; import os\n", "'x', which is not `module:object`"),
        ("[console_scripts]\nx = a:b\n[gui_scripts]\nx = a:b\n", "'x' twice"),
        ("[console_scripts]\nx = a:b\nx = a:b\n", "malformed"),
        ("x = a:b\n", "malformed"),
        ("[console_scripts]\nx\n", "malformed"),
        ("[console_scripts]\na0=%(a1)s%(a1)s\na1=aaaa\nx = %(a0)s\n", "not `module:object`"),
    ],
)
def test_entry_points_that_are_refused(tmp_path: Path, text: str, reason: str):
    made = make_wheel("thing", entry_points=text)
    refused(made.data, tmp_path, reason, member=f"{INFO}/entry_points.txt")


def test_interpolation_in_entry_points_is_not_even_tried(tmp_path: Path):
    """Two hundred bytes that would stand for 10**20: what installer's parser would make of them fills any memory."""
    lines = [f"a{index} = " + f"%(a{index + 1})s" * 100 for index in range(10)]
    text = "[console_scripts]\n" + "\n".join(lines) + "\na10 = x\n"
    refused(
        make_wheel("thing", entry_points=text).data, tmp_path, "not `module:object`", member=f"{INFO}/entry_points.txt"
    )


def test_the_script_of_an_entry_point_wins(tmp_path: Path):
    """As with pip, which writes it last."""
    made = make_wheel("thing", scripts={"tool": "#!python\nold\n"}, entry_points={"tool": "thing:main"})
    assert f"{DATA}/scripts/tool" not in read(made.data, tmp_path)
    assert fuzz_wheels.run(made.data, tmp_path, None) == "layer"


def test_an_installer_that_a_wheel_names_is_passed_over(tmp_path: Path):
    made = make_wheel("thing", files={"thing.py": "", f"{INFO}/INSTALLER": "evil\n"})
    assert f"{INFO}/INSTALLER" not in read(made.data, tmp_path)
    assert fuzz_wheels.run(made.data, tmp_path, None) == "layer"


def record(row: str) -> bytes:
    return make_wheel("thing", files={"thing.py": "x = 1\n"}, record=f"{row}\n{INFO}/RECORD,,\n").data


@pytest.mark.parametrize(
    ("row", "reason", "member"),
    [
        ("thing.py,,7", "has 6 bytes, not the '7' that RECORD states", "thing.py"),
        ("thing.py,,six", "not the 'six' that RECORD states", "thing.py"),
        ("thing.py,,006", "not the '006' that RECORD states", "thing.py"),
        ("thing.py," + "9" * 5000, "malformed", f"{INFO}/RECORD"),
        ("thing.py,," + "9" * 5000, "that RECORD states", "thing.py"),
        ("thing.py,md5=1B2M2Y8AsgTpgAmY7PhCfg,6", "no hash in RECORD that is accepted", "thing.py"),
        ("thing.py,sha256=short,6", "no hash in RECORD that is accepted", "thing.py"),
        ("thing.py,sha256=ééé,6", "no hash in RECORD that is accepted", "thing.py"),
        ("thing.py,sha256,6", "no hash in RECORD that is accepted", "thing.py"),
        ("thing.py,,6,more", "malformed", f"{INFO}/RECORD"),
        ("thing.py", "malformed", f"{INFO}/RECORD"),
        ('"' + "x" * 200_000, "malformed", f"{INFO}/RECORD"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_rows_of_record_that_are_refused(tmp_path: Path, row: str, reason: str, member: str):
    refused(record(row), tmp_path, reason, member=member)


def test_rows_that_name_what_is_not_there_are_passed_over(tmp_path: Path):
    assert "thing.py" in read(record("gone.py,sha256=x,1"), tmp_path)


@pytest.mark.parametrize("algorithm", ["sha256", "sha384", "sha512"])
def test_hashes_of_record_are_compared(tmp_path: Path, algorithm: str):
    source = b"x = 1\n"
    good, bad = hashlib.new(algorithm, source), hashlib.new(algorithm, b"other")
    read(record(f"thing.py,{algorithm}={good.hexdigest()},6"), tmp_path)  # as gmsh 4.15 has it
    read(record(f"thing.py,{record_hash(source)},6"), tmp_path)
    with pytest.raises(CorruptContentError, match=rf"{GOOD.file}: thing.py: does not have the {algorithm} that RECORD"):
        read(record(f"thing.py,{algorithm}={bad.hexdigest()},6"), tmp_path)


def test_texts_that_are_missing_or_no_text(tmp_path: Path):
    path = tmp_path / GOOD.file
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{INFO}/WHEEL", "")
    refused(path.read_bytes(), tmp_path / "x", f"has no {INFO}/RECORD")
    made = make_wheel("thing", extra_members=[Member(f"{INFO}/entry_points.txt", b"\xff")])
    refused(made.data, tmp_path / "y", "is not UTF-8", member=f"{INFO}/entry_points.txt")
    members = [Member(f"{INFO}/RECORD", b"\xff"), Member(f"{INFO}/WHEEL", b"")]
    refused(make_zip(members), tmp_path / "z", "is not UTF-8", member=f"{INFO}/RECORD")


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("other-1.0", "another package"),
        ("thing-2.0", "another version"),
        ("thing-x", "another version"),
        ("thing", "another"),
    ],
)
def test_what_is_inside_is_what_the_name_says(tmp_path: Path, folder: str, reason: str):
    refused(make_zip([Member(f"{folder}.dist-info/RECORD")]), tmp_path, f"holds {folder}.dist-info, which is {reason}")
    read(make_zip([Member("Thing-1.dist-info/RECORD")]), tmp_path)


def test_a_file_name_that_is_no_wheels(tmp_path: Path):
    path = GOOD.write(tmp_path)
    with pytest.raises(WheelError, match="does not have a wheel's name"), open_wheel(path, "thing.whl"):
        pass


# Sizes


@pytest.mark.parametrize(
    ("limits", "reason", "member"),
    [
        (Limits(total=100_000), "inflates from .* more than is accepted", None),
        (Limits(ratio=10, floor=100_000), "inflates from .* more than is accepted", None),
        (Limits(members=5), "has 6 members", None),
        (Limits(whole=200), "central directory of", None),
        (Limits(sources=1000), "bytes of Python sources", None),
        (Limits(page=10), "has 81 bytes, more than the 10", f"{INFO}/WHEEL"),
    ],
)
def test_wheels_that_are_too_large(tmp_path: Path, limits: Limits, reason: str, member: str | None):
    made = make_wheel("thing", files={"thing.py": "x = 1\n" * 200, "big": bytes(200_000)}, scripts={"tool": "y" * 1000})
    path = made.write(tmp_path)
    with pytest.raises(WheelError, match=reason) as caught, open_wheel(path, made.file, limits) as wheel:
        wheel.read_dist_info("WHEEL")
    assert caught.value.member == member


@pytest.mark.parametrize("name", ["thing.py", f"{INFO}/RECORD"])
def test_what_is_read_whole_is_bounded(tmp_path: Path, name: str):
    files = {"thing.py": b"", f"{INFO}/RECORD": b""} | {name: bytes(100_000)}
    refused(
        make_zip([Member(n, d) for n, d in files.items()]),
        tmp_path,
        "more than the 50000",
        member=name,
        limits=Limits(whole=50_000),
    )


def test_a_script_is_bounded_only_where_it_is_read_whole(tmp_path: Path):
    made = make_wheel("thing", scripts={"tool": b"#!python\n" + bytes(100_000)})
    path = made.write(tmp_path)
    with open_wheel(path, made.file, Limits(whole=50_000)) as wheel:
        streams = {record[0]: stream for record, stream, _ in wheel.get_contents()}
        tool = streams["thing-1.0.data/scripts/tool"]
        assert isinstance(tool, MemberStream)
        assert sum(len(data) for data in tool.content.chunks()) == 100_009
        with pytest.raises(WheelError, match="more than the 50000"):
            tool.read()


def test_folders_that_names_imply_are_bounded(tmp_path: Path):
    names = [f"{index}/" + "d/" * 90 + "f" for index in range(200)]
    data = make_wheel("thing", files=dict.fromkeys(names, b"")).data
    refused(data, tmp_path, "more folders", limits=Limits(whole=500_000))


def test_a_bomb_does_not_fill_memory():
    """A gigabyte of zeros in a megabyte is honest, and goes through in pieces."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    raw = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    end = zlib.compressobj(9, zlib.DEFLATED, -15).flush()
    content = Deflated("bomb", 200 << 20, 0, lambda: iter([raw] * 200 + [end]))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptContentError, match="CRC-32"):
            for _ in content.chunks():
                pass
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# The whole way


def bad_wheels() -> list[bytes]:
    value = {"crc32": 7}
    return [
        make_wheel("thing", extra_members=[Member("../evil", b"x")]).data,
        patched(GOOD.data, "thing.bin", local=value, central=value),
        patched(GOOD.data, "thing.bin", central={"size": 1}),
        make_wheel("thing", entry_points="[console_scripts]\na/b = c:d\n").data,
        record("thing.py,,7"),
        GOOD.data[:-1],
    ]


@pytest.mark.parametrize("data", bad_wheels(), ids=range(6))
def test_refused_wheels_leave_nothing_in_the_store(tmp_path: Path, data: bytes):
    store = Store(tmp_path / "store")
    made = Made(GOOD.file, data, b"")
    package = Package("thing", "1.0", made.file, made.digest, made.size, ())
    with pytest.raises(EnvbuilderError, match=r"thing-1\.0-py3-none-any\.whl"):
        layers(store, Supply(store, [made])).make([Group("thing", (package,))])
    assert [path.name for path in (store.root / "blobs" / "sha256").iterdir()] == [made.digest.hex]
    assert not list((store.root / "partial").iterdir())


def test_a_compiler_that_is_given_up_leaves_no_process():
    """It happened when a wheel was refused just as the first source was sent off; warnings are errors here."""
    for _ in range(5):
        with suppress(KeyError), Compiler(Path(sys.executable), workers=2) as compiler:
            futures = [compiler.submit("thing.py", b"x = [1, 2, 3]\n" * 50_000) for _ in range(4)]
            raise KeyError
        assert all(future.done() for future in futures)
    gc.collect()


def test_damaged_wheels_become_right_layers_or_are_refused(tmp_path: Path):
    """A few hundred mutants; ``benchmarks/fuzz_wheels.py`` tries as many as one likes."""
    mutator = fuzz_wheels.Mutator(random.Random(20), fuzz_wheels.seeds())  # noqa: S311
    for data in mutator.corpus:
        assert fuzz_wheels.run(data, tmp_path, None) == "layer"
    outcomes = {fuzz_wheels.run(mutator.next(), tmp_path, None) for _ in range(400)}
    assert len(outcomes) > 30
