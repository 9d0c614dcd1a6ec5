from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib

import pytest

from envbuilder.oci.content import Bytes, CorruptContentError, Deflated
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import MTIME, Directory, Entry, File, Hardlink, LayerError, LayerWriter, Symlink, write_layer


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
            "usr/lib/d.txt",
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
        assert tar.getnames()[-1] == path


def test_same_entries_same_bytes_and_a_golden_digest():
    """The digest changes only with a REVISION: whoever changes the packer must see this fail."""
    entries: list[Entry] = [
        File("a/b", Bytes(b"hello\n" * 1000)),
        File("a/c", Bytes(b"x" * 3_000_000)),
        Symlink("a/d", "b"),
    ]
    one, two = io.BytesIO(), io.BytesIO()
    layer = write_layer(entries, one)
    assert write_layer(entries, two) == layer
    assert one.getvalue() == two.getvalue()
    assert str(layer.diff_id) == "sha256:99532a37db63ef483d7d2bb0c7b860396d1dc9adeb6c99b359cd8c4bcc4af1db"
    assert str(layer.digest) == "sha256:4aa72b1432df2fde7316bdf3b512f25a9c9a40edb5550dfbefd31f8346053ac6"


def test_writer_knows_its_paths():
    writer = LayerWriter(io.BytesIO())
    writer.add(File("a/b", Bytes(b"")))
    assert "a" in writer
    assert "a/b" in writer
    assert "a/c" not in writer
