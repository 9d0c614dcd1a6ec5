"""Reading packages, as dpkg-deb and as others make them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from envbuilder.oci.layer import Directory, File, Hardlink, Symlink
from envbuilder.system.debfile import DebError, open_data, parse_fields, read_control
from envbuilder.system.spool import ALONE, unpack
from tests.system.debs import Deb, Thing

THINGS = (
    Thing("usr"),
    Thing("usr/bin", mode=0o2755, owner=(0, 50)),
    Thing("usr/bin/a", "text", 0o4755),
    Thing("usr/bin/b", link="a"),
    Thing("usr/bin/c", link="./usr/bin/a", hard=True),
)


@pytest.mark.parametrize("compression", ["xz", "gz", "none"])
def test_all_kinds_of_entries(tmp_path, compression):
    deb = Deb("a", things=THINGS, compression=compression, control={"md5sums": "x"}).write(tmp_path)
    part = unpack(deb, tmp_path / "spool", lambda _: True)
    assert part.control.files == {"md5sums": b"x"}
    root, folder, file, link, hard = part.entries
    assert root == Directory("usr")
    assert folder == Directory("usr/bin", 0o2755, 0, 50)
    assert isinstance(file, File)
    assert (file.path, file.mode, b"".join(file.content.chunks())) == ("usr/bin/a", 0o4755, b"text")
    assert (link, hard) == (Symlink("usr/bin/b", "a"), Hardlink("usr/bin/c", "usr/bin/a"))


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
@pytest.mark.parametrize("compression", ["zstd", "xz", "gzip", "none"])
def test_what_dpkg_deb_makes(tmp_path, compression):
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True, mode=0o755)
    (tree / "DEBIAN" / "control").write_text(Deb("made").paragraph)
    (tree / "file").write_bytes(bytes(range(256)) * 1000)
    argv = ["dpkg-deb", "--root-owner-group", f"-Z{compression}", "-b", tree, tmp_path / "made.deb"]
    if subprocess.run(argv, check=False, capture_output=True).returncode != 0:
        pytest.skip(f"this dpkg-deb knows no {compression}")
    part = unpack(tmp_path / "made.deb", tmp_path / "spool", lambda _: True)
    assert part.name == "made"
    (file,) = part.entries
    assert isinstance(file, File)
    assert b"".join(file.content.chunks()) == bytes(range(256)) * 1000


@pytest.mark.parametrize("size", [0, 1, ALONE[0] - 1, ALONE[0], (1 << 20) + 1])
def test_contents_of_every_size_come_back(tmp_path, size):
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    deb = Deb("a", things=[Thing("before", "x" * 10), Thing("file", data), Thing("after", "y" * 10)]).write(tmp_path)
    files = unpack(deb, tmp_path / "spool", lambda _: True).entries
    contents = [b"".join(file.content.chunks()) for file in files if isinstance(file, File)]
    assert contents == [b"x" * 10, data, b"y" * 10]


def test_only_what_is_kept_is_read(tmp_path):
    part = unpack(Deb("a", things=THINGS).write(tmp_path), tmp_path / "spool", lambda path: path.endswith("/b"))
    assert [entry.path for entry in part.entries] == ["usr/bin/b"]
    assert (tmp_path / "spool").stat().st_size == 0


def test_damage_is_named(tmp_path):
    whole = Deb("a", things=[Thing("f", "x" * 5000)])
    cut = tmp_path / "cut.deb"
    cut.write_bytes(whole.data[:-60])
    with pytest.raises(DebError, match=r"cut.deb: `data.tar.xz` is damaged"):
        unpack(cut, tmp_path / "spool", lambda _: True)
    text = tmp_path / "text.deb"
    text.write_text("no package")
    with pytest.raises(DebError, match="is not a Debian package"):
        read_control(text)
    empty = tmp_path / "empty.deb"
    empty.write_bytes(whole.data[:68])
    with pytest.raises(DebError, match=r"has no data.tar"), open_data(empty):
        pass
    odd = Deb("odd", compression="lzo").write(tmp_path)
    with pytest.raises(DebError, match="lzo"), open_data(odd):
        pass


def test_fields_keep_their_continuation_lines():
    text = "Package: a\nDescription: short\n long\n .\n more\nEmpty:\n"
    assert parse_fields(text) == {"Package": "a", "Description": "short\n long\n .\n more", "Empty": ""}
