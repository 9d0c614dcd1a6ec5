"""Every rule for members holds in every way in which a layer can be read."""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.store import inflate
from envbuilder.store.store import Store
from envbuilder.store.unpack import UnpackError, unpack_layer
from tests.store import tars
from tests.store.tars import TEXT, TarMember, member, tar_of

if TYPE_CHECKING:
    from envbuilder.oci.model import Layer

WAYS = {"plain": tars.put_plain, "front to back": tars.put_gzip, "in parts": tars.put_parts}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``foreign`` write layers for one way of reading, in which parts are as small as can be."""
    monkeypatch.setitem(WAYS, "now", WAYS[request.param])
    monkeypatch.setattr(inflate, "_PART", 1)


def foreign(store: Store, *members: TarMember, form: int = tarfile.PAX_FORMAT) -> Layer:
    return WAYS["now"](store, tar_of(members, form))


def unpack(store: Store, layer: Layer) -> Path:
    return unpack_layer(store, layer.descriptor, layer.diff_id)


def refused(store: Store, *members: TarMember) -> str:
    """Unpack a layer that must be refused; return the message, after seeing that nothing is left of it."""
    with pytest.raises(UnpackError) as caught:
        unpack(store, foreign(store, *members))
    assert list((store.root / "trees").iterdir()) == []
    return caught.value.message


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


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
def test_foreign_layers(store: Store, form: int):
    name = "x" * 60 + "/" + "y" * 90
    members = [
        member("./", tarfile.DIRTYPE),
        member("./a/b/file"),
        member(name),
        member("a/link", tarfile.SYMTYPE, "b"),
    ]
    tree = unpack(store, foreign(store, *members, form=form))
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
