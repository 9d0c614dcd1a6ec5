from __future__ import annotations

import gzip
import io
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envbuilder.oci.blob import Compression
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Hardlink, Symlink, write_layer
from envbuilder.oci.model import LAYER_GZIP, Descriptor, Layer
from envbuilder.store.store import NotInStoreError, Store
from envbuilder.store.unpack import UnpackError, unpack_layer
from tests.smallimage import put_layer
from tests.store.tars import TEXT, member, put_gzip, tar_of


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def unpack(store: Store, layer: Layer) -> Path:
    return unpack_layer(store, layer.descriptor, layer.diff_id)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_all_kinds_of_entries(store: Store):
    layer = put_layer(
        store,
        [
            Directory("closed", 0o500),
            File("closed/inside", Bytes(TEXT), mode=0o600),
            File("usr/bin/program", Bytes(b"x" * 3_000_000), mode=0o755),
            File("empty", Bytes(b"")),
            Hardlink("usr/bin/again", "usr/bin/program"),
            Symlink("dangling", "/nowhere/at/all"),
            File("\u00fcber/" + "long/" * 40 + "name", Bytes(TEXT)),
        ],
    )
    tree = unpack(store, layer)
    assert tree == store.root / "trees" / layer.digest.hex
    assert (tree / "usr/bin/program").read_bytes() == b"x" * 3_000_000
    assert mode(tree / "usr/bin/program") == 0o755
    assert (tree / "usr/bin/program").stat().st_mtime == 315532800
    assert (tree / "usr/bin/again").stat().st_ino == (tree / "usr/bin/program").stat().st_ino
    assert (tree / "empty").read_bytes() == b""
    assert (tree / "dangling").readlink() == Path("/nowhere/at/all")
    assert (tree / ("\u00fcber/" + "long/" * 40 + "name")).read_bytes() == TEXT
    assert (tree / "closed/inside").read_bytes() == TEXT
    assert mode(tree / "closed") == (0o500 if os.geteuid() == 0 else 0o700)
    assert mode(store.root / "trees") == 0o700


def test_unpacked_once(store: Store):
    layer = put_layer(store, [File("file", Bytes(TEXT))])
    first = unpack(store, layer)
    inode = (first / "file").stat().st_ino
    store.blob(layer.digest).unlink()
    assert (unpack(store, layer) / "file").stat().st_ino == inode


def test_at_once_by_many(store: Store):
    layer = put_layer(store, [File(f"d/{number}", Bytes(TEXT)) for number in range(300)])
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(lambda _: unpack(store, layer), range(8)))
    assert set(trees) == {store.root / "trees" / layer.digest.hex}
    assert [path.name for path in (store.root / "trees").iterdir()] == [layer.digest.hex]


def test_a_wrong_diff_id_keeps_nothing(store: Store):
    layer = put_gzip(store, tar_of([member("file")]))
    with pytest.raises(UnpackError, match=f"unpacks to {layer.diff_id}, not to sha256:0000"):
        unpack_layer(store, layer.descriptor, Digest("0" * 64))
    assert list((store.root / "trees").iterdir()) == []


def test_a_lie_about_a_diff_id_reaches_no_other_image(store: Store):
    """With a table of contents the diff id is not verified: so nothing may be found by it."""
    wanted = put_layer(store, [File("file", Bytes(b"wanted"))])
    evil = put_layer(store, [File("file", Bytes(b"evil"))])
    unpack_layer(store, evil.descriptor, wanted.diff_id)
    assert (unpack(store, wanted) / "file").read_bytes() == b"wanted"


def test_bytes_after_the_end_count(store: Store):
    layer = put_gzip(store, tar_of([member("file")]))
    blob = store.read(layer.digest) + gzip.compress(b"more")
    longer = Descriptor(LAYER_GZIP, store.put(blob), len(blob))
    with pytest.raises(UnpackError, match="unpacks to"):
        unpack_layer(store, longer, layer.diff_id)


@pytest.mark.parametrize("damage", ["cut", "flip", "no gzip", "no tar"])
def test_damaged_layers(store: Store, damage: str):
    layer = put_layer(store, [File("file", Bytes(os.urandom(100_000)))])
    data = bytearray(store.read(layer.digest))
    if damage == "cut":
        del data[-2000:]
    elif damage == "flip":
        data[50_000] ^= 0x55
    elif damage == "no gzip":
        data[2:4] = b"\xff\xff"
    else:
        data = bytearray(gzip.compress(b"\x01" * 4096))
    blob = Descriptor(LAYER_GZIP, store.put(bytes(data)), len(data))
    with pytest.raises(UnpackError, match=str(blob.digest)):
        unpack_layer(store, blob, layer.diff_id)
    assert list((store.root / "trees").iterdir()) == []


@pytest.mark.parametrize("compression", [Compression.ZSTD, Compression.NONE])
def test_other_compressions_unpack_to_the_same_files(store: Store, compression: Compression):
    entries: list[Entry] = [File("a/b", Bytes(b"hello")), Symlink("a/c", "b")]
    out = io.BytesIO()
    layer = write_layer(entries, out, compression)
    store.put(out.getvalue())
    tree = unpack_layer(store, layer.descriptor, layer.diff_id)
    assert (tree / "a" / "c").read_bytes() == b"hello"


def test_the_table_of_contents_is_not_unpacked(store: Store):
    out = io.BytesIO()
    layer = write_layer([File("a", Bytes(b"hello"))], out)
    store.put(out.getvalue())
    tree = unpack_layer(store, layer.descriptor, layer.diff_id)
    assert [path.name for path in tree.iterdir()] == ["a"]


def test_damaged_zstd_is_refused(store: Store):
    blob = store.put(b"\x28\xb5\x2f\xfd" + bytes(100))
    with pytest.raises(UnpackError, match=r"zstd|cut short"):
        unpack_layer(store, Descriptor("application/vnd.oci.image.layer.v1.tar+zstd", blob, 104), Digest("0" * 64))


def test_absent_blob(store: Store):
    with pytest.raises(NotInStoreError):
        unpack_layer(store, Descriptor(LAYER_GZIP, Digest("1" * 64), 5), Digest("0" * 64))
