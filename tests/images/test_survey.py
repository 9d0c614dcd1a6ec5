from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from envbuilder.images.survey import Survey, Tree, overlay, survey
from envbuilder.oci.blob import Compression
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Hardlink, Symlink, write_layer
from envbuilder.oci.model import LAYER_TAR, Descriptor
from envbuilder.store.store import Store
from envbuilder.store.unpack import UnpackError

if TYPE_CHECKING:
    from pathlib import Path

ELF = b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little")
LIBC = ELF + b"\0GNU C Library (Debian GLIBC 2.36-9+deb12u10) stable release version 2.36.\n"
STATUS = """Package: libc6
Status: install ok installed
Version: 2.36-9
Architecture: amd64
Source: glibc
Description: GNU C Library
 shared libraries: many

Package: gone
Status: deinstall ok config-files
Version: 1
"""


def put(store: Store, *entries: Entry, compression: Compression = Compression.GZIP) -> tuple[Descriptor, Digest]:
    buffer = io.BytesIO()
    layer = write_layer(entries, buffer, compression)
    store.put(buffer.getvalue())
    return layer.descriptor, layer.diff_id


def file(path: str, data: bytes = b"") -> File:
    return File(path, Bytes(data))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize("compression", list(Compression))
def test_what_is_looked_for_is_found_however_it_is_compressed(store: Store, compression: Compression):
    layer = put(
        store,
        file("usr/lib/x86_64-linux-gnu/libc.so.6", LIBC),
        Symlink("lib", "usr/lib"),
        Symlink("etc/os-release", "../usr/lib/os-release"),
        file("usr/lib/os-release", b'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian GNU/Linux 12"\n'),
        file("var/lib/dpkg/status", STATUS.encode()),
        file("opt/venv/lib/python3.12/site-packages/pip-25.0.dist-info/METADATA"),
        file("usr/share/doc/libc.so.6", b"no library"),
        compression=compression,
    )
    tree = overlay(survey(store, [layer]))
    assert tree.read("lib/x86_64-linux-gnu/libc.so.6") == "x86_64 2.36"
    assert tree.release == {"ID": "debian", "VERSION_ID": "12", "PRETTY_NAME": "Debian GNU/Linux 12"}
    assert tree.read("var/lib/dpkg/status") == "libc6\t2.36-9\tamd64\tglibc"
    assert set(tree.found) == {
        "usr/lib/x86_64-linux-gnu/libc.so.6", "usr/lib/os-release", "var/lib/dpkg/status",
        "opt/venv/lib/python3.12/site-packages/pip-25.0.dist-info/METADATA",
    }  # fmt: skip
    assert tree.has("/opt/venv")
    assert not tree.has("/opt/env")


def test_a_survey_is_remembered_for_these_bytes_and_this_diff_id(store: Store):
    layer, diff_id = put(store, file("usr/bin/gcc"))
    (first,) = survey(store, [(layer, diff_id)])
    store.blob(layer.digest).unlink()
    assert survey(store, [(layer, diff_id)]) == [first]
    assert Survey.from_json(first.to_json()) == first
    other, _ = put(store, file("usr/bin/cc"))
    with pytest.raises(UnpackError, match=f"layer {other.digest} unpacks to sha256:.*, not to {diff_id}"):
        survey(store, [(other, diff_id)])


def test_a_damaged_layer_is_named(store: Store):
    layer = Descriptor(LAYER_TAR, store.put(b"no tar at all" * 99), 99)
    with pytest.raises(UnpackError, match=str(layer.digest)):
        survey(store, [(layer, Digest.of(b""))])


def merged(store: Store, *layers: list[Entry]) -> Tree:
    return overlay(survey(store, [put(store, *entries) for entries in layers]))


def test_whiteouts_remove_what_lies_below(store: Store):
    tree = merged(
        store,
        [file("usr/bin/gcc"), file("usr/local/bin/python3.12"), file("opt/a/bin/gcc"), file("opt/b/bin/gcc")],
        [file("usr/bin/.wh.gcc"), file("usr/local/.wh.bin"), file("opt/a/.wh..wh..opq"), file("opt/a/bin/cc")],
        [file("usr/local/bin/python3.13"), file("usr/.wh..wh.plnk")],
    )
    assert set(tree.found) == {"opt/a/bin/cc", "opt/b/bin/gcc", "usr/local/bin/python3.13"}


def test_links_and_folders_take_each_others_place(store: Store):
    tree = merged(
        store,
        [file("lib/python3.12/os.py"), Symlink("opt/old", "/usr")],
        [Symlink("lib", "usr/lib"), Directory("opt/old")],
    )
    assert not tree.has("lib/python3.12/os.py")
    assert tree.real("opt/old") == "opt/old"


def test_links_are_followed_inside_the_image_alone(store: Store):
    tree = merged(
        store,
        [
            file("usr/bin/python3.12"),
            Symlink("usr/local/bin/python3.12", "../../../../../usr/bin/python3.12"),
            Symlink("usr/local/bin/gcc", "gcc"),
            Symlink("usr/bin/cc", "/etc/alternatives/cc"),
            Hardlink("usr/bin/python3", "usr/bin/python3.12"),
        ],
    )
    assert tree.real("/usr/local/bin/python3.12") == "usr/bin/python3.12"
    assert tree.real("usr/local/bin/gcc") is None
    assert tree.has("/usr/bin/cc")
    assert tree.real("usr/bin/cc") is None
    assert tree.read("usr/bin/python3") == ""


def test_a_folder_that_no_member_states_is_no_reason_to_drop_a_link(store: Store):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("lib/python3.12/os.py"))
    data = buffer.getvalue()
    bare = (Descriptor(LAYER_TAR, store.put(data), len(data)), Digest.of(data))
    tree = overlay(survey(store, [put(store, Symlink("lib", "usr/lib")), bare]))
    assert tree.links["lib"] == "usr/lib"
