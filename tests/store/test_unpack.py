from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envbuilder.oci.blob import Compression
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Hardlink, Symlink, write_layer
from envbuilder.oci.model import LAYER_GZIP, Descriptor, Layer
from envbuilder.store.roots import MOUNT_FOLDERS, root_tree
from envbuilder.store.store import NotInStoreError, Store
from envbuilder.store.unpack import IMPLIED, UnpackError, unpack_layer
from tests.smallimage import put_image, put_layer

TEXT = b"some text\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    data = TEXT if kind == tarfile.REGTYPE else b""
    info.size = len(data)
    return info, data


def foreign(
    store: Store, *members: tuple[tarfile.TarInfo, bytes], plain: bool = False, form: int = tarfile.PAX_FORMAT
) -> Layer:
    """Put a layer into the store as another tool may have written it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    tar_bytes = buffer.getvalue()
    blob = tar_bytes if plain else gzip.compress(tar_bytes)
    return Layer(store.put(blob), len(blob), Digest.of(tar_bytes), len(tar_bytes))


def unpack(store: Store, layer: Layer) -> Path:
    return unpack_layer(store, layer.descriptor, layer.diff_id)


def refused(store: Store, *members: tuple[tarfile.TarInfo, bytes]) -> str:
    """Unpack a layer that must be refused; return the message, after seeing that nothing is left of it."""
    with pytest.raises(UnpackError) as caught:
        unpack(store, foreign(store, *members))
    assert list((store.root / "trees").iterdir()) == []
    return caught.value.message


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
    assert tree == store.root / "trees" / layer.diff_id.hex
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


def test_setuid_is_kept_only_for_root(store: Store):
    tree = unpack(store, foreign(store, member("su", mode=0o4755)))
    assert mode(tree / "su") == (0o4755 if os.geteuid() == 0 else 0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="owners take root")
def test_owners_are_kept_for_root(store: Store):
    info, data = member("file", mode=0o4750)
    info.uid, info.gid = 12, 34
    status = (unpack(store, foreign(store, (info, data))) / "file").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (12, 34, 0o4750)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("plain", [False, True])
def test_foreign_layers(store: Store, form: int, *, plain: bool):
    name = "x" * 60 + "/" + "y" * 90
    members = [
        member("./", tarfile.DIRTYPE),
        member("./a/b/file"),
        member(name),
        member("a/link", tarfile.SYMTYPE, "b"),
    ]
    tree = unpack(store, foreign(store, *members, plain=plain, form=form))
    assert (tree / "a/b/file").read_bytes() == TEXT
    assert (tree / name).read_bytes() == TEXT
    assert (tree / "a/link").readlink() == Path("b")


def test_very_long_names(store: Store):
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        name = "/".join(["d" * 100] * 5)
        members = [member(f"{form}/{name}"), member(f"{form}/link", tarfile.SYMTYPE, name)]
        tree = unpack(store, foreign(store, *members, form=form))
        assert (tree / str(form) / name).read_bytes() == TEXT
        assert (tree / str(form) / "link").readlink() == Path(name)


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
    assert set(trees) == {store.root / "trees" / layer.diff_id.hex}
    assert [path.name for path in (store.root / "trees").iterdir()] == [layer.diff_id.hex]


def test_a_wrong_diff_id_keeps_nothing(store: Store):
    layer = put_layer(store, [File("file", Bytes(TEXT))])
    with pytest.raises(UnpackError, match=f"unpacks to {layer.diff_id}, not to sha256:0000"):
        unpack_layer(store, layer.descriptor, Digest("0" * 64))
    assert list((store.root / "trees").iterdir()) == []


def test_bytes_after_the_end_count(store: Store):
    layer = put_layer(store, [File("file", Bytes(TEXT))])
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


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/../../outside", "a/..", "//etc/passwd"])
def test_names_that_lead_outside(store: Store, name: str):
    assert f"`{name}` leads out of the image" in refused(store, member(name))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_nothing_is_written_through_a_symlink(store: Store, tmp_path: Path, kind: bytes):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = member("door", tarfile.SYMTYPE, str(outside))
    message = refused(store, link, member("door/file", kind, "target"))
    assert message.startswith("`door/file")
    assert message.endswith("lies below `door`, which is not a directory")
    refused(store, link, member("door/deeper/file", kind, "target"))
    assert list(outside.iterdir()) == []


def test_a_file_replaces_a_symlink_instead_of_following_it(store: Store, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"untouched")
    tree = unpack(store, foreign(store, member("file", tarfile.SYMTYPE, str(outside)), member("file")))
    assert outside.read_bytes() == b"untouched"
    assert not (tree / "file").is_symlink()
    assert (tree / "file").read_bytes() == TEXT


def test_directory_after_symlink_does_not_reopen_it(store: Store, tmp_path: Path):
    members = [member("d", tarfile.SYMTYPE, str(tmp_path)), member("d", tarfile.DIRTYPE, mode=0o755), member("d/file")]
    tree = unpack(store, foreign(store, *members))
    assert (tree / "d/file").read_bytes() == TEXT
    assert not (tree / "d").is_symlink()
    assert not (tmp_path / "file").exists()


def test_symlink_after_directory_closes_it(store: Store, tmp_path: Path):
    members = [member("d/e/file"), member("d", tarfile.SYMTYPE, str(tmp_path)), member("d/e/file")]
    assert "lies below `d`" in refused(store, *members)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/etc/passwd", "leads out"),
        ("../../etc/passwd", "leads out"),
        ("door/passwd", "no file of this layer"),
        ("d", "no file of this layer"),
        ("name", "no file of this layer"),
        ("d/later", "did not come before it"),
    ],
)
def test_hard_links_that_lead_elsewhere(store: Store, target: str, message: str):
    members = [member("door", tarfile.SYMTYPE, "/etc"), member("d", tarfile.DIRTYPE, mode=0o755)]
    assert message in refused(store, *members, member("name", tarfile.LNKTYPE, target))


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "d/.wh..."])
def test_whiteouts_that_climb(store: Store, name: str):
    assert "would remove a directory from inside" in refused(store, member(name))


def test_nul_in_a_name(store: Store):
    info, data = member("x")
    info.pax_headers = {"path": "a\0b"}
    assert "NUL" in refused(store, (info, data))


def test_names_that_no_file_system_takes(store: Store):
    assert "too long a name" in refused(store, member("d/" + "x" * 300))
    assert "too long a name" in refused(store, member("x" * 300 + "/file"))
    assert "symbolic link to nothing" in refused(store, member("link", tarfile.SYMTYPE, ""))


def test_sparse_files_are_refused(store: Store):
    info, data = member("holes")
    info.pax_headers = {"GNU.sparse.major": "1"}
    assert "`holes` is a sparse file" in refused(store, (info, data))


def test_devices_are_left_out(store: Store):
    tree = unpack(store, foreign(store, member("null", tarfile.CHRTYPE), member("pipe", tarfile.FIFOTYPE), member("x")))
    assert [path.name for path in tree.iterdir()] == ["x"]


# -- roots ----------------------------------------------------------------------------------------------------------


def content(root: Path) -> dict[str, bytes | str]:
    """Return what a root holds besides its mount points: bytes of files, targets of links."""
    result: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            result[name] = f"-> {path.readlink()}"
        elif path.is_file() and name not in {"etc/hosts", "etc/resolv.conf"}:
            result[name] = path.read_bytes()
    return result


def test_upper_wins(store: Store):
    lower = put_layer(
        store,
        [
            File("same", Bytes(b"lower")),
            File("kept", Bytes(b"lower")),
            File("becomes-directory", Bytes(b"lower")),
            File("becomes-file/x", Bytes(b"lower")),
            Symlink("becomes-real", "kept"),
            File("becomes-link", Bytes(b"lower")),
            Directory("shared", 0o700),
            File("shared/lower", Bytes(b"lower")),
        ],
    )
    upper = put_layer(
        store,
        [
            File("same", Bytes(b"upper")),
            File("becomes-directory/x", Bytes(b"upper")),
            File("becomes-file", Bytes(b"upper")),
            File("becomes-real", Bytes(b"upper")),
            Symlink("becomes-link", "kept"),
            Directory("shared", 0o755),
            File("shared/upper", Bytes(b"upper")),
        ],
    )
    root = root_tree(store, put_image(store, "image", [lower, upper]))
    assert content(root) == {
        "same": b"upper",
        "kept": b"lower",
        "becomes-directory/x": b"upper",
        "becomes-file": b"upper",
        "becomes-real": b"upper",
        "becomes-link": "-> kept",
        "shared/lower": b"lower",
        "shared/upper": b"upper",
    }
    assert mode(root / "shared") == 0o755
    assert mode(root) == 0o755
    assert all((root / folder).is_dir() for folder in MOUNT_FOLDERS)
    tree = store.root / "trees" / lower.diff_id.hex
    assert (tree / "same").read_bytes() == b"lower"
    assert (tree / "kept").stat().st_ino == (root / "kept").stat().st_ino


def test_whiteouts(store: Store):
    names = ["a/gone", "a/kept", "b/gone/deep", "b/also-gone", "c/replaced/old", "top"]
    lower = put_layer(store, [File(name, Bytes(b"lower")) for name in names])
    upper = foreign(
        store,
        member("a/.wh.gone"),
        member("b/new"),
        member("b/.wh..wh..opq"),
        member("c/.wh.replaced"),
        member("c/replaced/new"),
        member(".wh.top"),
        member(".wh.never-there"),
        member(".wh..wh.aufs"),
    )
    root = root_tree(store, put_image(store, "image", [lower, upper]))
    assert content(root) == {"a/kept": b"lower", "b/new": TEXT, "c/replaced/new": TEXT}
    assert (store.root / "trees" / lower.diff_id.hex / "top").exists()


def test_whiteout_of_a_link_leaves_its_target(store: Store, tmp_path: Path):
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    lower = put_layer(store, [Symlink("door", str(outside)), File("x", Bytes(TEXT))])
    upper = foreign(store, member(".wh.door"))
    assert content(root_tree(store, put_image(store, "image", [lower, upper]))) == {"x": TEXT}
    assert (outside / "inner").exists()


def test_a_link_of_a_lower_layer_is_never_followed(store: Store, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    lower = put_layer(store, [Symlink("door", str(outside))])
    stated = put_layer(store, [File("door/file", Bytes(TEXT))])
    assert content(root_tree(store, put_image(store, "stated", [lower, stated]))) == {"door/file": TEXT}
    implied = foreign(store, member("door/file"))
    with pytest.raises(UnpackError, match="below `door`, which is not a directory"):
        root_tree(store, put_image(store, "implied", [lower, implied]))
    assert list(outside.iterdir()) == []


def test_a_parent_that_is_not_stated_keeps_the_lower_mode(store: Store):
    lower = put_layer(store, [Directory("tmp", 0o1777)])
    upper = foreign(store, member("tmp/file"), member("new/file"))
    root = root_tree(store, put_image(store, "image", [lower, upper]))
    assert mode(root / "tmp") == 0o1777
    assert not list(root.rglob(IMPLIED))


def test_mount_points_replace_links(store: Store, tmp_path: Path):
    outside = tmp_path / "resolv.conf"
    layer = put_layer(store, [Symlink("etc/resolv.conf", str(outside)), Symlink("run", str(tmp_path))])
    root = root_tree(store, put_image(store, "image", [layer]))
    assert (root / "etc/resolv.conf").read_bytes() == b""
    assert not (root / "run").is_symlink()
    assert not outside.exists()


def test_a_second_call_and_a_second_root_cost_little(store: Store):
    layers = [put_layer(store, [File(f"{number}", Bytes(TEXT))]) for number in range(3)]
    image = put_image(store, "image", layers)
    root = root_tree(store, image)
    for layer in layers:
        store.blob(layer.digest).unlink()
    assert root_tree(store, image) == root
    (root / "mark").touch()
    assert (root_tree(store, image) / "mark").exists()


def test_tree_and_layer_agree(store: Store):
    """What was unpacked, read back, is what the writer was given: the digest is that of the tar."""
    layer = put_layer(store, [File("a", Bytes(TEXT))])
    data = gzip.decompress(store.read(layer.digest))
    assert hashlib.sha256(data).hexdigest() == unpack(store, layer).name
