"""Our reader against the standard library's, over everything that headers may hold."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile

import pytest

from envbuilder.oci.untar import TarError, TarStream, blocks

FORMS = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]


class Dribble:
    """Gives the bytes in pieces of odd sizes, as a decompressor may."""

    def __init__(self, data: bytes, seed: int) -> None:
        self._data = io.BytesIO(data)
        self._random = random.Random(seed)  # noqa: S311  (no secret)

    def read(self, size: int, /) -> bytes:
        return self._data.read(min(size, self._random.choice([1, 7, 511, 512, 513, 100_000])))


def archive(form: int, seed: int) -> bytes:
    choose = random.Random(seed)  # noqa: S311
    kinds = [tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for number in range(60):
            length = (
                choose.choice([3, 90, 140]) if form == tarfile.USTAR_FORMAT else choose.choice([3, 99, 100, 256, 700])
            )
            name = f"{number}/" + "/".join(["\u00fc" * 10] * (length // 30)) + "x" * min(60, length)
            info = tarfile.TarInfo(name)
            info.type, info.mode = choose.choice(kinds), choose.choice([0o644, 0o4755, 0o1777, 0])
            large = form != tarfile.USTAR_FORMAT
            info.uid, info.gid = choose.choice([0, 1000, 0o7777777]), choose.choice([0, 0o7777777 + 5 * large])
            info.mtime = choose.choice([0, 315532800, 2**33 - 1, -5 if large else 5])
            if info.type in {tarfile.SYMTYPE, tarfile.LNKTYPE}:
                info.linkname = "t" * choose.choice([1, 100, 101 if large else 99, 300 if large else 9])
            info.size = choose.choice([0, 1, 511, 512, 513, 70_000]) if info.type == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(choose.randbytes(info.size)))
    return buffer.getvalue()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read", ["all", "some", "none"])
def test_agrees_with_tarfile(form: int, read: str):
    data = archive(form, seed=form)
    stream = TarStream(blocks(Dribble(data, seed=form)))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = tar.getmembers()
        for number, member in enumerate(stream.members()):
            info = expected[number]
            name = info.name + "/" * info.isdir()
            assert (member.name, member.kind, member.mode) == (name, info.type, info.mode)
            assert (member.uid, member.gid, member.link) == (info.uid, info.gid, info.linkname)
            assert (member.size, member.mtime) == (info.size, int(info.mtime) * 10**9)
            if info.isfile() and (read == "all" or (read == "some" and number % 3)):
                extracted = tar.extractfile(info)
                assert extracted is not None
                assert b"".join(bytes(piece) for piece in stream.content()) == extracted.read()
    assert number + 1 == len(expected) == 60
    assert str(stream.finish()) == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_fractions_of_a_second():
    info = tarfile.TarInfo("x")
    info.pax_headers = {"mtime": "1000000000.123456789012"}
    (member,) = TarStream([info.tobuf(tarfile.PAX_FORMAT) + bytes(1024)]).members()
    assert member.mtime == 1000000000_123456789


def test_global_headers_hold_for_all_that_follow():
    head = tarfile.TarInfo.create_pax_global_header({"uid": "77", "comment": "of git archive"})
    data = head + tarfile.TarInfo("a").tobuf() + tarfile.TarInfo("b").tobuf() + bytes(1024)
    assert [(m.name, m.uid) for m in TarStream([data]).members()] == [("a", 77), ("b", 77)]


@pytest.mark.parametrize("size", [100, 512, 700, 1500])
def test_cut_short(size: int):
    info = tarfile.TarInfo("x")
    info.size = 1000
    data = (info.tobuf() + bytes(1024) + bytes(1024))[:size]
    stream = TarStream([data])
    with pytest.raises(TarError, match="cut short"):
        [list(stream.content()) for _ in stream.members()]


@pytest.mark.parametrize(
    "records", [b"9 path=x\n", b"abc", b"0 a=b\n", b"-5 a=b\n", b"5 =\n", b"99 path=x\n", b"10 uid=abc\n"]
)
def test_damaged_extended_headers(records: bytes):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    data = info.tobuf() + records.ljust(512, b"\0") + tarfile.TarInfo("y").tobuf() + bytes(1024)
    try:
        members = list(TarStream([data]).members())
    except TarError:
        return
    assert [member.name for member in members] == ["x"]  # "9 path=x\n" is sound


def test_an_extended_header_of_a_gigabyte():
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    with pytest.raises(TarError, match="1073741824 bytes"):
        list(TarStream([info.tobuf()]).members())


@pytest.mark.parametrize("field", ["size=-00005", "uid=-00005", "gid=4294967296", "mtime=9999999999999999999"])
def test_impossible_numbers(field: str):
    length = len(f"10 {field}\n")
    record = f"{length} {field}\n".encode()
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    data = info.tobuf() + record.ljust(512, b"\0") + tarfile.TarInfo("y").tobuf() + bytes(1024)
    with pytest.raises(TarError, match="`y` has an impossible size, owner or time"):
        list(TarStream([data]).members())
