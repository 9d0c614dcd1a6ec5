"""By its table of contents a layer unpacks to what it unpacks to front to back, or not at all, whatever the table says."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import stat
import tarfile
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from isal import igzip, igzip_lib

from envbuilder.oci import toc
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Hardlink, Symlink
from envbuilder.oci.model import TOC_DIGEST, Descriptor, Layer
from envbuilder.report import Kind, using
from envbuilder.store import inflate, unpack
from envbuilder.store.arriving import Arriving
from envbuilder.store.inflate import cut, inflated
from envbuilder.store.store import Store
from envbuilder.store.unpack import IMPLIED, UnpackError, unpack_layer
from tests.smallimage import put_layer
from tests.store.tars import TarMember, member, members_of, put_gzip, put_parts, put_with_table, tar_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from envbuilder.report import Task


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(autouse=True)
def tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "_PART", 1)


class Listener:
    """Gathers what is reported."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str, kind: Kind) -> None:
        self.said.append(f"{kind.value}: {text}")

    def begin(self, label: str, total: int | None) -> Task:
        raise AssertionError(f"no task was to be reported: {label}, {total}")

    def end(self, task: Task) -> None:
        raise AssertionError(f"no task was to be reported: {task}")


def unpacked(store: Store, layer: Layer) -> dict[str, object]:
    """Return everything about the files that a layer unpacks to."""
    return files(unpack_layer(store, layer.descriptor, layer.diff_id))


def files(tree: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(tree.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = (path.read_bytes(), status.st_mtime_ns if path.name != IMPLIED else 0, status.st_nlink)
        found[str(path.relative_to(tree))] = (oct(status.st_mode), status.st_uid, content)
    return found


def without_table(layer: Layer) -> Layer:
    """Return the same layer as a manifest without the annotation names it."""
    return Layer(layer.digest, layer.size, layer.diff_id, layer.tar_size, layer.media_type)


def archive(seed: int) -> list[TarMember]:
    """Return members of every kind, some twice, some below others, some refused; all by chance."""
    choose = random.Random(seed)  # noqa: S311
    names = ["a", "b", "a/c", "a/c/d", "b/e", "b/.wh.x", "b/.wh..wh..opq", "f" * 120, "a/c/" + "g/" * 60 + "h"]
    kinds = [tarfile.REGTYPE] * 5 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE]
    members = []
    for _ in range(choose.randrange(1, 12)):
        info, _ = member(
            choose.choice(names), choose.choice(kinds), choose.choice(names), choose.choice([0o644, 0o4755])
        )
        data = choose.randbytes(choose.choice([0, 1, 511, 512, 513, 5000])) if info.type == tarfile.REGTYPE else b""
        info.size, info.mtime = len(data), choose.randrange(1 << 31)
        members.append((info, data))
    return members


def test_both_ways_agree_whatever_the_members(store: Store):
    """24 layers: the same tree, or the same refusal."""
    refused = 0
    for seed in range(24):
        layer = put_parts(store, tar_of(archive(seed)), step=random.Random(seed).choice([512, 512, 100, 1024, 5000]))  # noqa: S311
        results: list[object] = []
        for one in (layer, put_gzip(store, tar_of(archive(seed)))):
            try:
                results.append(unpacked(store, one))
            except UnpackError as error:
                results.append(error.message)
                refused += 1
        assert results[0] == results[1], seed
    assert 5 < refused < 43


def test_our_own_layers(store: Store):
    entries: list[Entry] = [
        Directory("d", 0o1777),
        *(File(f"d/{number}", Bytes(os.urandom(number * 777))) for number in range(40)),
        File("large", Bytes(random.Random(1).randbytes(5 << 20)), mode=0o755),  # noqa: S311
        Symlink("d/s", "../large"),
        Hardlink("d/h", "d/7"),
    ]
    layer = put_layer(store, entries)
    with Arriving.whole(store.blob(layer.digest)) as blob:
        starts = unpack._starts(blob, layer.descriptor)
        assert len(starts) > 40
        with inflated(blob, starts) as data:
            in_parts = b"".join(bytes(block) for block in data)
    assert in_parts == gzip.decompress(store.read(layer.digest))
    by_table = unpacked(store, layer)
    assert len(by_table) == 44
    other = Store(store.root / "other")
    other.put(store.read(layer.digest))
    front_to_back = unpacked(other, without_table(layer))
    assert by_table == {path: what for path, what in front_to_back.items() if path not in {toc.NAME, toc.LANDMARK}}


# -- tables that lie ------------------------------------------------------------------------------------------------

TAR = tar_of([member(f"d/{number}") for number in range(20)])
OWN = members_of(TAR)[1]
EXPECTED = {f"d/{number}" for number in range(20)} | {"d", "d/.wh..wh.implied"}


@pytest.mark.parametrize(
    "places",
    [
        [],
        [0],
        [-1, -(2**70), 2**70, 10**30],
        [OWN[3]] * 1000,
        [*reversed(OWN)],
        [1.5, "7", None, True, [5], {"offset": "x"}, OWN[5]],
        [OWN[1], 10**9],
    ],
)
def test_places_that_are_none_are_passed_over(store: Store, places: list[object]):
    assert set(unpacked(store, put_parts(store, TAR, places))) == EXPECTED


@pytest.mark.parametrize("place", [1, OWN[3] + 1, OWN[3] - 1, OWN[-1] + 20])
def test_a_place_where_no_member_begins(store: Store, place: int):
    layer = put_parts(store, TAR, [OWN[1], place, OWN[-1]])
    with pytest.raises(UnpackError, match="is not valid gzip in the parts that its table of contents says"):
        unpacked(store, layer)
    assert list((store.root / "trees").iterdir()) == []


def test_any_places_at_all(store: Store):
    """Every byte of a layer as the only place: what comes out is right, or nothing does."""
    layer = put_parts(store, TAR[: 7 * 512] + bytes(1024))
    whole, right = gzip.decompress(store.read(layer.digest)), []
    with Arriving.whole(store.blob(layer.digest)) as blob:
        for place in range(1, layer.size):
            try:
                with inflated(blob, [0, place]) as data:
                    assert read(data) == whole
                    right.append(place)
            except (igzip.BadGzipFile, igzip_lib.IsalError, EOFError):  # type: ignore[misc]  # as in oci.content
                pass
    table, foot = toc.table_start(store.read(layer.digest)), layer.size - toc.FOOTER_SIZE
    assert right == [*OWN[1:7], table, foot]


def test_names_and_sizes_in_a_table_mean_nothing(store: Store):
    blob, places = members_of(TAR)
    names = ["../../etc/passwd", "/etc/shadow", "d", ".wh..wh..opq", "\0", "d/1"]
    rows = [
        {
            "name": names[n % len(names)],
            "type": "symlink",
            "linkName": "/",
            "size": -5,
            "chunkSize": 1 << 62,
            "offset": at,
        }
        for n, at in enumerate(places)
    ]
    layer = put_with_table(store, TAR, blob, json.dumps({"version": 7, "entries": rows}).encode())
    assert set(unpacked(store, layer)) == EXPECTED


def test_a_footer_inside_a_string_is_no_place(store: Store):
    """Only keys of the JSON count, not what looks like one in a name."""
    blob, places = members_of(TAR)
    row = {"name": '","offset":1,"x":"', "offset": places[2]}
    layer = put_with_table(store, TAR, blob, json.dumps({"entries": [row]}).encode())
    assert set(unpacked(store, layer)) == EXPECTED


def test_flipped_bytes_never_make_another_tree(store: Store):
    layer = put_parts(store, TAR)
    sound, choose = store.read(layer.digest), random.Random(4)  # noqa: S311
    for _ in range(50):
        data = bytearray(sound)
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        changed = Descriptor(layer.media_type, store.put(bytes(data)), len(data), layer.descriptor.annotations)
        try:
            tree = unpack_layer(store, changed, layer.diff_id)
        except UnpackError:
            continue
        assert set(files(tree)) == EXPECTED  # the flip was in a header of gzip that means nothing
        assert all((tree / f"d/{number}").read_bytes() == b"some text\n" for number in range(20))


# -- tables that cannot be had: then the layer is read front to back, and has to have its diff id -------------------


def fallen_back(store: Store, layer: Layer, reason: str) -> None:
    """Assert that a layer is unpacked, front to back, for a reason; and only because it has its diff id."""
    listener = Listener()
    with pytest.raises(UnpackError, match=f"unpacks to {layer.diff_id}, not to"):
        unpack_layer(store, layer.descriptor, Digest("0" * 64))
    with using(listener):
        assert set(unpacked(store, layer)) == EXPECTED
    assert any("is unpacked front to back" in said and reason in said for said in listener.said), listener.said


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"entries": [\xff]}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"offset":' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_bad_json(store: Store, table: bytes, reason: str):
    fallen_back(store, put_with_table(store, TAR, members_of(TAR)[0], table), reason)


def test_another_table_than_the_manifest_says(store: Store):
    layer = put_with_table(store, TAR, members_of(TAR)[0], b'{"entries": []}', stated=b"another")
    fallen_back(store, layer, "its table of contents is not sha256:")


@pytest.mark.parametrize("start", [-5, 1 << 62, OWN[2] + 3, OWN[3]])
def test_a_footer_that_leads_elsewhere(store: Store, start: int):
    layer = put_with_table(store, TAR, members_of(TAR)[0], b'{"entries": []}', start=start)
    fallen_back(store, layer, "table of contents" if start != OWN[3] else "")


def test_no_footer(store: Store):
    layer = put_gzip(store, TAR)
    annotated = Layer(layer.digest, layer.size, layer.diff_id, layer.tar_size, layer.media_type, Digest.of(b"x"))
    fallen_back(store, annotated, "there is no footer")


def test_layers_smaller_than_a_footer(store: Store):
    for data in (b"", b"x", gzip.compress(b"")):
        layer = Descriptor("x", store.put(data), len(data), {TOC_DIGEST: "sha256:" + "0" * 64})
        with pytest.raises(UnpackError):
            unpack_layer(store, layer, Digest("0" * 64))


def test_a_table_that_would_fill_memory(store: Store, monkeypatch: pytest.MonkeyPatch):
    """100 MB of zeros in 100 kB: no more of it is inflated than a table may have."""
    monkeypatch.setattr(toc, "LARGEST", 1 << 20)
    layer = put_with_table(store, TAR, members_of(TAR)[0], b'{"entries": []}' + bytes(100 << 20))
    tracemalloc.start()
    fallen_back(store, layer, "table of contents cannot be read")
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


# -- how parts are cut and read -------------------------------------------------------------------------------------


def test_no_part_is_tiny(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inflate, "_PART", 100)
    assert cut([5, 99, 100, 150, 199, 201, 890, 901, 950, -7, 5000, 500, 500], 1000) == [0, 100, 201, 500, 890]
    assert cut([], 1000) == [0]
    assert cut([10], 0) == [0]


def test_memory_is_bounded_whatever_the_ratio(store: Store):
    """A part of 1 MB that inflates to 1 GB, and a reader that stops after a while."""
    block = gzip.compress(bytes(64 << 20), 1)
    digest = store.put(block * 16)
    tracemalloc.start()
    with Arriving.whole(store.blob(digest)) as blob, inflated(blob, [n * len(block) for n in range(16)]) as data:
        for _, piece in zip(range(300), data, strict=False):
            assert len(piece) <= 1 << 19
    assert tracemalloc.get_traced_memory()[1] < 80 << 20
    tracemalloc.stop()


def test_progress_adds_up(store: Store):
    for layer in (put_parts(store, TAR), put_gzip(store, TAR)):
        seen: list[int] = []
        unpack_layer(store, layer.descriptor, layer.diff_id, progress=seen.append)
        assert sum(seen) == layer.size


def read(data: Iterable[bytes | memoryview]) -> bytes:
    out = io.BytesIO()
    for block in data:
        out.write(block)
    return out.getvalue()


@pytest.mark.parametrize("cores", [1, 2, 7])
def test_any_number_of_threads(store: Store, cores: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("envbuilder.parallel.cores", lambda: cores)
    monkeypatch.setattr(inflate, "_AHEAD", 1)
    plain = [random.Random(n).randbytes(300_000) for n in range(9)]  # noqa: S311
    packed = [gzip.compress(data, 1) for data in plain]
    starts = [sum(map(len, packed[:n])) for n in range(9)]
    digest = store.put(b"".join(packed))
    with Arriving.whole(store.blob(digest)) as blob, inflated(blob, starts) as data:
        assert read(data) == b"".join(plain)


def test_modes_of_the_folder(store: Store):
    layer = put_parts(store, TAR)
    tree = unpack_layer(store, layer.descriptor, layer.diff_id)
    assert stat.S_IMODE(tree.stat().st_mode) == 0o755
