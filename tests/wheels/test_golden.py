"""Golden layers, one for each kind of wheel. When one moves, the listing says what moved.

``ENVBUILDER_WRITE_GOLDEN=1 pytest tests/wheels/test_golden.py`` writes them anew, for those who changed the packer and
its revision on purpose.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envbuilder.oci.blob import Compression
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Symlink, write_layer
from envbuilder.oci.listing import listing
from envbuilder.oci.untar import TarStream, blocks
from envbuilder.store.store import Store
from envbuilder.store.unpack import open_layer
from envbuilder.wheels.key import InstallPrefix, WheelFile
from envbuilder.wheels.layer import write_wheels
from tests.wheelmaker import Made, make_wheel

if TYPE_CHECKING:
    from envbuilder.oci.model import Layer

GOLDEN = Path(__file__).parent / "golden"
PREFIX = InstallPrefix("/opt/env", "3.12")
BINARY = "cp312-cp312-manylinux_2_17_x86_64"


def stored(name: str, **how: object) -> Made:
    """Make a wheel without compression: what zlib makes of it would depend on the build of Python."""
    return make_wheel(name, compression=zipfile.ZIP_STORED, **how)  # type: ignore[arg-type]


KINDS: dict[str, list[Made]] = {
    "pure": [stored("pure", files={"pure/__init__.py": "x = 1\n", "pure/sub/data.json": "{}\n"})],
    "binary": [stored("binary", tag=BINARY, files={"binary/core.so": b"\x7fELF" + bytes(range(256)) * 8000})],
    "data-schemes": [
        stored(
            "Data.Schemes",
            files={"a.py": ""},
            data={"data/etc/a.conf": "a\n", "headers/a.h": "\n", "platlib/p.py": "\n", "purelib/q.py": "\n"},
        )
    ],
    "scripts": [
        stored(
            "scripts",
            files={"s/__init__.py": "def main(): ...\n", "s/run.sh": "#!/bin/sh\n"},
            executable=["s/run.sh"],
            entry_points={"s-run": "s:main", "s-other": "s:main"},
            scripts={"s-old": "#!python\nprint(1)\n", "s-shell": "#!/bin/sh\ntrue\n"},
        )
    ],
    "namespace": [
        stored("space-a", files={"space/a/__init__.py": "a\n"}),
        stored("space-b", files={"space/b/__init__.py": "b\n"}),
    ],
    "odd-names": [
        stored("odd", files={"odd/a b'c.txt": "1", "odd/naïve-имя.txt": "2", f"odd/{'long/' * 30}name.txt": "3", "odd/-x": ""})
    ],
    "empty": [stored("empty", files={"empty/__init__.py": "", "empty/none.bin": b""})],
}  # fmt: skip


def write(wheels: list[Made], folder: Path) -> tuple[Layer, str]:
    """Write a layer; return it and its listing."""
    store = Store(folder / "store")
    files = [WheelFile(made.file, made.digest, made.write(folder)) for made in wheels]
    with store.writer() as blob:
        layer = write_wheels(files, PREFIX, None, blob.file)
        blob.commit(layer.digest)
    with open_layer(store, layer.descriptor) as stream:
        lines = list(listing(stream))
    return layer, "".join(f"{line}\n" for line in (f"digest {layer.digest}", f"diff id {layer.diff_id}", *lines))


@pytest.mark.parametrize("kind", KINDS)
def test_golden(kind: str, tmp_path: Path):
    _, text = write(KINDS[kind], tmp_path)
    file = GOLDEN / f"{kind}.txt"
    if os.environ.get("ENVBUILDER_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_deflated_wheels_hold_the_same_files(tmp_path: Path):
    """However a wheel is compressed, what is unpacked is the same; the table of contents knows other offsets."""
    texts = []
    for name, compression in (("one", zipfile.ZIP_DEFLATED), ("two", zipfile.ZIP_STORED)):
        made = make_wheel("pure", files={"pure/__init__.py": "x = 1\n" * 500}, compression=compression)
        texts.append(write([made], tmp_path / name)[1].splitlines())
    assert texts[0][2:-1] == texts[1][2:-1]
    assert texts[0][0] != texts[1][0]


@pytest.mark.slow
def test_a_file_over_four_gigabytes(tmp_path: Path):
    """ZIP64 in, a tar member over 4 GiB out: gzip's size field wraps, tar's does not."""
    size = (1 << 32) + 12345
    path = tmp_path / "big-1.0-py3-none-any.whl"
    small = make_wheel("big", files={})
    write_sparse_wheel(path, small, size)
    wheel = WheelFile(path.name, Digest.of_file(path), path)
    blob = tmp_path / "blob"
    with blob.open("wb") as out:
        layer = write_wheels([wheel], PREFIX, None, out)
    assert layer.size < 64 << 20
    assert layer.tar_size > size
    store = Store(tmp_path / "store")
    store.adopt(blob, layer.digest)
    with open_layer(store, layer.descriptor) as stream:
        sizes = {member.name: member.size for member in stream.members()}
        assert stream.finish() == layer.diff_id
    assert sizes["opt/env/lib/python3.12/site-packages/big/zeros.bin"] == size


def write_sparse_wheel(path: Path, small: Made, size: int) -> None:
    """Write ``small`` with a member of ``size`` zero bytes in front, compressed as it is written."""
    path.write_bytes(b"")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("big/zeros.bin", "w", force_zip64=True) as member:
            block = bytes(1 << 24)
            for start in range(0, size, len(block)):
                member.write(block[: min(len(block), size - start)])
        with zipfile.ZipFile(io.BytesIO(small.data)) as other:
            for name in other.namelist():
                archive.writestr(name, other.read(name))


def test_listing_escapes_what_would_break_a_line():
    out = io.BytesIO()
    entries: list[Entry] = [Directory("d", 0o1777, 1, 2), File("d/a\nb\\", Bytes(b"x"), 0o755), Symlink("d/l", "a\tb")]
    write_layer(entries, out, Compression.NONE)
    out.seek(0)
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert list(listing(TarStream(blocks(out)))) == [
        "d1777 1:2 0 - d/",
        f"-0755 0:0 1 {digest} d/a\\nb\\\\",
        "l0777 0:0 0 - d/l -> a\\tb",
    ]
