"""What is refused of a ZIP archive, and what is read although it is rare."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

import pytest

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.content import CorruptContentError, Deflated
from envbuilder.wheels.archive import MemberStream, WheelError, open_wheel
from tests.wheelmaker import Member, make_wheel, make_zip
from tests.wheels.damage import GOOD, INFO, number, patched, read, refused
from tests.wheels.fuzz_wheels import ended_by_zip64, rewritten

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# The archive as a whole


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a ZIP"),
        (GOOD.data[:-1], "not a ZIP"),
        (b"#!/bin/sh\n" + GOOD.data, "directory that is not where it says"),
        (GOOD.data + b"\0", "not a ZIP"),
        (GOOD.data + GOOD.data, "directory that is not where it says"),
        (GOOD.data[:-2] + b"\x16\0" + GOOD.data[-22:], "two end records"),
        (GOOD.data[:-18] + b"\1\0" + GOOD.data[-16:], "several disks"),
        (GOOD.data[:-14] + b"\1\0" + GOOD.data[-12:], "several disks"),
        (GOOD.data[:-14] + b"\1\0\1\0" + GOOD.data[-10:], "more in its central directory"),
        (GOOD.data[:-14] + b"\x90\0\x90\0" + GOOD.data[-10:], "damaged central directory"),
        (ended_by_zip64(GOOD.data).replace(b"PK\6\6", b"PK\6\5"), "damaged ZIP64"),
        (ended_by_zip64(GOOD.data)[:-14] + b"\1\0" + ended_by_zip64(GOOD.data)[-12:], "disagree"),
        (make_zip([]), "0 .dist-info folders"),
    ],
    ids=["empty", "cut", "prepended", "trailing", "two archives", "two ends", "disk", "half of it", "fewer", "more", "zip64",
         "zip64 disagrees", "nothing in it"],
)  # fmt: skip
def test_archives_that_readers_could_disagree_about_are_refused(tmp_path: Path, data: bytes, reason: str):
    refused(data, tmp_path, reason)


def test_offsets_of_bytes_put_before_an_archive_do_not_help(tmp_path: Path):
    """As self-extracting archives have them: all offsets are right, and yet a reader of streams sees something else."""
    out = io.BytesIO(b"#!/bin/sh\n")
    out.seek(0, io.SEEK_END)
    with zipfile.ZipFile(io.BytesIO(GOOD.data)) as source, zipfile.ZipFile(out, "a") as target:
        for info in source.infolist():
            target.writestr(info, source.read(info))
    refused(out.getvalue(), tmp_path, "10 bytes before its first member")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("comment", [b"", b"a comment"])
def test_all_that_zipfile_writes_is_read(tmp_path: Path, stream: bool, zip64: bool, comment: bytes):  # noqa: FBT001
    data = rewritten(GOOD.data, stream=stream, zip64=zip64, comment=comment)
    assert read(data, tmp_path) == read(GOOD.data, tmp_path)


def test_zip64_end_records_are_read(tmp_path: Path):
    assert read(ended_by_zip64(GOOD.data), tmp_path) == read(GOOD.data, tmp_path)


def test_more_members_than_sixteen_bits_count(tmp_path: Path):
    names = [f"thing/{index}".encode() for index in range(0x10000)] + [f"{INFO}/RECORD".encode()]
    members, directory = bytearray(), bytearray()
    for name in names:
        fields = (20, 0, 0, 0, 0, 0, 0, 0, len(name), 0)
        directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, *fields, 0, 0, 0, 0, len(members)) + name
        members += struct.pack("<4s5H3L2H", b"PK\3\4", *fields) + name
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(members), 0)
    path = tmp_path / "blob"
    path.write_bytes(ended_by_zip64(bytes(members + directory) + end, more=len(names) - 1))
    with open_wheel(path, GOOD.file) as opened:
        assert sum(1 for _ in opened.get_contents()) == len(names)


@pytest.mark.slow
def test_a_member_of_more_than_four_gigabytes(tmp_path: Path):
    """All zeros, at deflate's best: legitimate, since somebody's checkpoint or test file may be that."""
    mebibytes, packer = 4200, zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    crc = 0
    for _ in range(mebibytes):
        crc = zlib.crc32(bytes(1 << 20), crc)
    member, size = "thing.bin", mebibytes << 20
    marker = b"@" * 64
    wheel = make_wheel(
        "thing", files={"thing.py": ""}, extra_members=[Member(member, marker, compression=zipfile.ZIP_STORED)]
    )
    raw = block * mebibytes + zlib.compressobj(9, zlib.DEFLATED, -15).flush()
    at = wheel.data.rindex(member.encode()) - 46
    entry = bytearray(wheel.data[at : at + 46 + len(member)])
    extra = struct.pack("<HHQ", 1, 8, size)
    struct.pack_into("<H", entry, 10, 8)
    struct.pack_into("<LLLHH", entry, 16, crc, len(raw), 0xFFFFFFFF, len(member), len(extra))
    header = wheel.data.index(marker) - 30 - len(member)
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 8, 0, 0, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(member), 20)
    local += member.encode() + struct.pack("<HHQQ", 1, 16, size, len(raw))
    begin = wheel.data[:header] + local + raw
    directory = wheel.data[header + 30 + len(member) + 64 : at] + entry + extra
    count = wheel.data[-14:-10]
    data = begin + directory + struct.pack("<4s2H4sLLH", b"PK\5\6", 0, 0, count, len(directory), len(begin), 0)
    path = tmp_path / "blob"
    path.write_bytes(data)
    with open_wheel(path, wheel.file) as opened:
        [content] = [s.content for r, s, _ in opened.get_contents() if r[0] == member and isinstance(s, MemberStream)]
        assert sum(len(chunk) for chunk in content.chunks()) == size


# Members


@pytest.mark.parametrize(
    ("local", "central", "reason"),
    [
        ({"method": 0}, {}, "other flags or another method"),
        ({"flags": 0x800}, {}, "other flags or another method"),
        ({"crc32": 1}, {}, "another size or CRC-32 in its local header"),
        ({"size": 1}, {}, "another size or CRC-32 in its local header"),
        ({"packed": 1}, {}, "another size or CRC-32 in its local header"),
        ({}, {"size": 1}, "another size or CRC-32 in its local header"),
        ({}, {"crc32": 1}, "another size or CRC-32 in its local header"),
        ({"packed": 20}, {"packed": 20}, "followed by bytes that belong to no member"),
        ({"packed": 5000}, {"packed": 5000}, "overlaps"),
        ({"packed": 0xFFFFFFFF}, {"packed": 0xFFFFFFFF}, "overlaps"),
        ({"size": 0x7FFFFFFF}, {"size": 0x7FFFFFFF}, "cannot have 2147483647 bytes in"),
        ({"flags": 1}, {"flags": 1}, "encrypted"),
        ({"flags": 0x40}, {"flags": 0x40}, "encrypted"),
        ({"flags": 0x2000}, {"flags": 0x2000}, "encrypted"),
        ({"flags": 0x20}, {"flags": 0x20}, "patch"),
        ({"flags": 8}, {"flags": 8}, "data descriptor"),
        ({"method": 0}, {"method": 0}, "cannot have"),
        ({"method": 9}, {"method": 9}, "compressed by method 9; wheels store or deflate"),
        ({"method": 12}, {"method": 12}, "compressed by method 12"),
        ({"method": 14}, {"method": 14}, "compressed by method 14"),
        ({"method": 93}, {"method": 93}, "compressed by method 93"),
        ({}, {"disk": 1}, "another disk"),
        ({}, {"version": 99}, "needs version 99"),
    ],
)  # fmt: skip
def test_members_that_lie_are_refused(
    tmp_path: Path, local: Mapping[str, int], central: Mapping[str, int], reason: str
):
    refused(patched(GOOD.data, "thing.bin", local=local, central=central), tmp_path, reason, member="thing.bin")


def test_a_name_that_differs_in_the_local_header_is_refused(tmp_path: Path):
    refused(GOOD.data.replace(b"thing.bin", b"evil!.bin", 1), tmp_path, "another name", member="thing.bin")


@pytest.mark.parametrize(
    ("offset", "reason", "member"),
    [
        (0, "overlaps", "thing.bin"),
        (7, "overlaps", "thing.py"),
        (0xFFFFFFF0, "does not lie before the central directory", "thing.bin"),
        (len(GOOD.data) - 22, "does not lie before the central directory", "thing.bin"),
    ],
)
def test_members_that_overlap_or_lie_elsewhere_are_refused(
    tmp_path: Path, offset: int, reason: str, member: str | None
):
    with pytest.raises(WheelError, match=reason) as caught:
        read(patched(GOOD.data, "thing.bin", central={"offset": offset}), tmp_path)
    assert member is None or caught.value.member in {member, "thing.py", "thing.bin"}


def test_the_overlapping_bomb_is_refused(tmp_path: Path):
    """David Fifield's: one kernel of zeros that many entries of the directory point to."""
    names = [f"thing/{index}.bin" for index in range(50)]
    data = make_wheel("thing", files=dict.fromkeys(names, bytes(100_000))).data
    for name in names[1:]:
        data = patched(data, name, central={"offset": 0})
    with pytest.raises(WheelError, match="overlaps"):
        read(data, tmp_path)


@pytest.mark.parametrize(
    ("field", "change"), [("crc32", 1), ("size", 1), ("size", -1)], ids=["another CRC-32", "more", "fewer"]
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_headers_that_agree_on_a_lie_are_found_out(tmp_path: Path, field: str, change: int, compression: int):
    made = make_wheel(
        "thing", files={"thing.bin": bytes(range(256)) * 9}, compression=compression, record=f"{INFO}/RECORD,,\n"
    )
    value = {field: number(made.data, "thing.bin", field) + change}
    with pytest.raises(EnvbuilderError, match=r"thing\.bin") as caught:
        read(patched(made.data, "thing.bin", local=value, central=value), tmp_path)
    assert GOOD.file in caught.value.message


def test_what_comes_after_a_deflate_stream_is_found_out():
    """More than a piece behind the end of the stream: it would have been copied into the layer."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = packer.compress(b"x") + packer.flush()
    content = Deflated("thing.bin", 1, zlib.crc32(b"x"), lambda: iter([raw, b"more"]))
    with pytest.raises(CorruptContentError, match="goes on after its deflate stream has ended"):
        list(content.chunks())


def descriptor(data: bytes, form: bytes, *, signature: bool = True) -> bytes:
    """Replace the descriptor of the one member of an archive written to a pipe."""
    at = data.index(b"PK\7\10")
    end = data.index(b"PK\1\2")
    crc, packed, size = struct.unpack("<LLL", data[at + 4 : at + 16])
    values = {"<LLL": (crc, packed, size), "<LQQ": (crc, packed, size), "lie": (crc, packed, size + 1)}[form.decode()]
    packed_form = struct.pack("<LQQ" if form == b"<LQQ" else "<LLL", *values)
    new = data[:at] + (b"PK\7\10" if signature else b"") + packed_form
    tail = bytearray(data[end:])
    struct.pack_into("<L", tail, len(tail) - 6, len(new))
    return new + bytes(tail)


@pytest.mark.parametrize("form", [b"<LLL", b"<LQQ"])
@pytest.mark.parametrize("signature", [True, False])
def test_data_descriptors_come_in_four_forms(tmp_path: Path, form: bytes, signature: bool):  # noqa: FBT001
    data = rewritten(make_zip([Member(f"{INFO}/RECORD", b"a,,\n")]), stream=True)
    assert list(read(descriptor(data, form, signature=signature), tmp_path)) == [f"{INFO}/RECORD"]


def test_a_data_descriptor_that_lies_is_refused(tmp_path: Path):
    data = rewritten(make_zip([Member(f"{INFO}/RECORD", b"a,,\n")]), stream=True)
    refused(descriptor(data, b"lie"), tmp_path, "data descriptor", member=f"{INFO}/RECORD")
