from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import zlib
from typing import Any

import pytest
import zstandard

from envbuilder.oci.blob import Compression
from envbuilder.oci.content import Bytes, CorruptContentError, Deflated
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Hardlink, LayerError, Symlink, write_layer
from envbuilder.oci.tarheader import MTIME
from envbuilder.oci.toc import LANDMARK, NAME


def deflated(data: bytes, *, crc: int | None = None, size: int | None = None, cut: int = 0) -> Deflated:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = packer.compress(data) + packer.flush()
    raw = raw[: len(raw) - cut]
    pieces = [raw[start : start + 1000] for start in range(0, len(raw), 1000)]
    return Deflated(
        "thing", len(data) if size is None else size, zlib.crc32(data) if crc is None else crc, lambda: iter(pieces)
    )


def test_digests_sizes_and_contents_agree_with_gzip_and_tar():
    text = b"some text that repeats " * 10_000
    out = io.BytesIO()
    layer = write_layer(
        [
            Directory("var/tmp", 0o1777),
            File("usr/lib/a.txt", Bytes(text)),
            File("usr/lib/b.txt", deflated(text), 0o755),
            File("usr/lib/empty", deflated(b"")),
            Symlink("usr/lib/c.txt", "a.txt"),
            Hardlink("usr/lib/d.txt", "usr/lib/a.txt"),
        ],
        out,
    )
    blob = out.getvalue()
    plain = gzip.decompress(blob)
    assert layer.digest == Digest.of(blob)
    assert layer.size == len(blob)
    assert layer.diff_id == Digest(hashlib.sha256(plain).hexdigest())
    assert layer.tar_size == len(plain)
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        names = tar.getnames()
        assert names == [
            "var", "var/tmp", "usr", "usr/lib", "usr/lib/a.txt", "usr/lib/b.txt", "usr/lib/empty", "usr/lib/c.txt",
            "usr/lib/d.txt", LANDMARK, NAME,
        ]  # fmt: skip
        assert tar.extractfile("usr/lib/b.txt").read() == text  # type: ignore[union-attr]
        assert tar.getmember("var/tmp").mode == 0o1777
        assert tar.getmember("usr/lib/b.txt").mode == 0o755
        assert tar.getmember("usr/lib/c.txt").linkname == "a.txt"
        assert all((m.mtime, m.uid, m.gid, m.uname) == (MTIME, 0, 0, "") for m in tar)


def test_deflated_content_is_copied_not_compressed_again():
    data = bytes(range(256)) * 5000
    content = deflated(data)
    raw = b"".join(content.raw())
    out = io.BytesIO()
    write_layer([File("x", content)], out)
    assert raw in out.getvalue()


@pytest.mark.parametrize(
    "broken",
    [
        deflated(b"abc" * 1000, crc=1),
        deflated(b"abc" * 1000, size=2999),
        deflated(b"abc" * 1000, size=3001),
        deflated(b"abc" * 100_000, cut=5),
        Deflated("thing", 10, 0, lambda: iter([b"\xff" * 50])),
        Deflated("thing", 10, 0, lambda: iter([])),
    ],
    ids=["crc", "shorter", "longer", "truncated", "garbage", "nothing"],
)
def test_content_that_lies_is_refused(broken: Deflated):
    with pytest.raises(CorruptContentError, match="thing"):
        write_layer([File("x", broken)], io.BytesIO())


def test_inflated_pieces_are_bounded():
    bomb = deflated(bytes(50_000_000))
    assert max(len(piece) for piece in bomb.chunks()) <= 1 << 20


@pytest.mark.parametrize("path", ["", "/etc/x", "../x", "a/../b", "a//b", "a/", ".", "./a", "a\0b"])
def test_paths_that_leave_the_root_are_refused(path: str):
    with pytest.raises(LayerError):
        write_layer([File(path, Bytes(b""))], io.BytesIO())


def test_a_path_stands_once():
    with pytest.raises(LayerError, match="twice"):
        write_layer([File("a", Bytes(b"1")), File("a", Bytes(b"2"))], io.BytesIO())


def test_nothing_lies_below_a_file():
    with pytest.raises(LayerError, match="not a directory"):
        write_layer([File("a", Bytes(b"1")), File("a/b", Bytes(b"2"))], io.BytesIO())


def test_a_hard_link_needs_its_target():
    with pytest.raises(LayerError, match="hard link"):
        write_layer([Hardlink("a", "b")], io.BytesIO())


@pytest.mark.parametrize(
    "path",
    ["x" * 90, "d/" * 60 + "f", "d/" * 200 + "f", "x" * 101, "naïve/имя.txt", "a b'c\"d"],
    ids=["short", "prefix", "long", "longname", "unicode", "quotes"],
)
def test_odd_names_survive(path: str):
    out = io.BytesIO()
    write_layer([File(path, Bytes(b"1"))], out)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(out.getvalue()))) as tar:
        assert tar.getnames()[-3] == path


ENTRIES: tuple[Entry, ...] = (
    Directory("a/tmp", 0o1777, uid=3, gid=4),
    File("a/b", Bytes(b"hello\n" * 1000)),
    File("a/c", Bytes(b"x" * 3_000_000), 0o755),
    File("a/empty", Bytes(b"")),
    File("a/" + "long/" * 40 + "name", Bytes(b"1")),
    Symlink("a/d", "b"),
    Hardlink("a/e", "a/b"),
)


@pytest.mark.parametrize(
    ("compression", "diff_id", "digest"),
    [
        (
            Compression.GZIP,
            "sha256:3bb404ddf941de216a65837be46dc76817f63ee77121414d4a2f354993ba4222",
            "sha256:991f79c88999dab0603f3d3f4f4bf039ef051cbd956d1fffe2e875540240852d",
        ),
        (
            Compression.ZSTD,
            "sha256:85b0e1371cb7a85730ce567540936e7ed1752013d0caa3aa025506526dc174a0",
            "sha256:794955f42479f67e89f5c52354ed026257f8e528e1439c972048cff050bce50e",
        ),
        (
            Compression.NONE,
            "sha256:85b0e1371cb7a85730ce567540936e7ed1752013d0caa3aa025506526dc174a0",
            "sha256:85b0e1371cb7a85730ce567540936e7ed1752013d0caa3aa025506526dc174a0",
        ),
    ],
)
def test_golden_digests(compression: Compression, diff_id: str, digest: str):
    """They change only with a revision: whoever changes the packer must see this fail, and change the revision too."""
    layer = write_layer(ENTRIES, io.BytesIO(), compression)
    assert write_layer(ENTRIES, io.BytesIO(), compression) == layer
    assert (str(layer.diff_id), str(layer.digest)) == (diff_id, digest)


def test_compressions_hold_the_same_files():
    plain = io.BytesIO()
    layer = write_layer(ENTRIES, plain, Compression.NONE)
    assert layer.digest == layer.diff_id == Digest.of(plain.getvalue())
    assert layer.descriptor.annotations == {}
    packed = io.BytesIO()
    zstd = write_layer(ENTRIES, packed, Compression.ZSTD)
    assert zstd.diff_id == layer.diff_id
    assert zstd.media_type.endswith("+zstd")
    assert zstandard.ZstdDecompressor().decompressobj().decompress(packed.getvalue()) == plain.getvalue()


def test_the_table_of_contents_finds_every_file_without_the_rest():
    """As a snapshotter reads it: the footer, the table, then single members by their offsets."""
    entries = [*ENTRIES, File("deflated", deflated(b"abc" * 100_000)), File("deflated-empty", deflated(b""))]
    out = io.BytesIO()
    layer = write_layer(entries, out)
    blob = out.getvalue()
    assert len(blob) == layer.size
    found = re.fullmatch(
        rb"\x1f\x8b\x08\x04.{6}\x1a\x00SG\x16\x00([0-9a-f]{16})STARGZ\x01\x00\x00\xff\xff\x00{8}", blob[-51:], re.DOTALL
    )
    assert found is not None
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob[int(found[1], 16) : -51]))) as tar:
        (member,) = tar.getmembers()
        assert member.name == "stargz.index.json"
        table = tar.extractfile(member).read()  # type: ignore[union-attr]
    assert layer.descriptor.annotations == {"containerd.io/snapshot/stargz/toc.digest": str(Digest.of(table))}
    document = json.loads(table)
    assert document["version"] == 1
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob))) as tar:
        members = {m.name: m for m in tar}
        rows = document["entries"]
        files = [row for row in rows if row["type"] != "chunk"]
        assert [row["name"].rstrip("/") for row in files] == [m.name for m in tar][:-1]
        for row in files:
            member = members[row["name"].rstrip("/")]
            assert (row["mode"], row["uid"], row["gid"]) == (member.mode, member.uid, member.gid)
            if row["type"] == "reg" and member.size:
                data = tar.extractfile(member).read()  # type: ignore[union-attr]
                assert (row["size"], row["digest"]) == (len(data), str(Digest.of(data)))
                chunks = [row, *(r for r in rows if r["type"] == "chunk" and r["name"] == row["name"])]
                assert read_chunks(blob, chunks, len(data)) == data
        assert len([row for row in rows if row["type"] == "chunk"]) == 2
    assert members[LANDMARK].size == 1


def test_a_large_table_of_contents_is_one_member():
    """The reference implementation reads one gzip member of it, and takes the rest for missing."""
    out = io.BytesIO()
    layer = write_layer([File(f"folder/{n:05}", Bytes(b"x")) for n in range(6000)], out)
    blob = out.getvalue()
    offset = int(blob[-35:-19], 16)
    plain = zlib.decompressobj(31).decompress(blob[offset:])
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        table = tar.extractfile("stargz.index.json").read()  # type: ignore[union-attr]
    assert len(table) > 1 << 20
    assert Digest.of(table) == layer.toc


def read_chunks(blob: bytes, chunks: list[dict[str, Any]], size: int) -> bytes:
    """Read a file's pieces, each from its own gzip member, and verify them."""
    data = b""
    for chunk in chunks:
        assert chunk.get("chunkOffset", 0) == len(data)
        length = chunk.get("chunkSize") or size - len(data)
        piece = zlib.decompressobj(31).decompress(blob[chunk["offset"] :], length)
        assert chunk["chunkDigest"] == str(Digest.of(piece))
        data += piece
    return data


def test_the_name_of_the_table_is_taken():
    with pytest.raises(LayerError):
        write_layer([File("stargz.index.json", Bytes(b""))], io.BytesIO())
