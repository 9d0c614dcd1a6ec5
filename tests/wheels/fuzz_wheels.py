"""Damage wheels in every way there is, and tell whether what becomes of them is right.

A mutant either becomes a layer that Python's own gzip, tarfile and zipfile agree with, or is refused by an
EnvbuilderError that names the wheel. ``benchmarks/fuzz_wheels.py`` runs this for as long as one likes.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import struct
import tarfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.digest import Digest
from envbuilder.wheels.bytecode import CompilerError
from envbuilder.wheels.key import InstallPrefix, WheelFile
from envbuilder.wheels.layer import write_wheels
from tests.wheelmaker import Member, make_wheel, make_zip

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from envbuilder.wheels.layer import BytecodeOf

NAME = "thing-1.0-py3-none-any.whl"
PREFIX = InstallPrefix("/opt/env", "3.12")
_SITE = "opt/env/lib/python3.12/site-packages"
_PARENTS = {"opt", "opt/env"}
_OUR_OWN = {"stargz.index.json", ".no.prefetch.landmark"}
_DIST_INFO = "thing-1.0.dist-info"


class WrongError(AssertionError):
    """What became of a mutant is wrong."""


# Making mutants


class _Unseekable(io.BytesIO):
    """A file as a pipe is one: zipfile writes data descriptors into it."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: int) -> int:
        raise io.UnsupportedOperation

    def tell(self) -> int:
        raise io.UnsupportedOperation


def rewritten(data: bytes, *, stream: bool = False, zip64: bool = False, comment: bytes = b"") -> bytes:
    """Return a ZIP written anew: with data descriptors, with ZIP64 local headers, with a comment."""
    out = _Unseekable() if stream else io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        target.comment = comment
        for info in source.infolist():
            copy = zipfile.ZipInfo(info.filename, info.date_time)
            copy.external_attr, copy.compress_type, copy.create_system = info.external_attr, info.compress_type, 3
            with target.open(copy, "w", force_zip64=zip64) as file:
                file.write(source.read(info))
    return out.getvalue()


def ended_by_zip64(data: bytes, *, more: int = 0) -> bytes:
    """Return a ZIP without a comment ended as those of more than 65535 members are, with ZIP64's two records.

    ``more`` is how many members it has more than its own end record can say.
    """
    _, _, _, _, count, size, offset, _ = struct.unpack("<4s4H2LH", data[-22:])
    count += more
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(data) - 22, 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data[:-22] + record + locator + end


def seeds() -> list[bytes]:
    """Return good wheels that use everything a wheel may use, small ones first."""
    small = make_wheel("thing", files={"thing.py": "x = 1\n"}).data
    full = make_wheel(
        "thing",
        files={
            "thing/__init__.py": "def main():\n    return 1\n",
            "thing/ü.txt": "ü" * 300,
            "thing/zeros.bin": bytes(200_000),
            "thing/noise.bin": hashlib.shake_128(b"noise").digest(5_000),
            "thing/empty": b"",
        },
        scripts={"tool": "#!python\nprint(1)\n", "shell": "#!/bin/sh\n"},
        data={"data/share/x": "x", "headers/thing.h": "int x;\n", "purelib/extra.py": "y = 2\n"},
        entry_points={"thing": "thing:main", "other": "thing:main.x"},
        executable=["thing/noise.bin"],
    ).data
    stored = make_wheel("thing", files={"thing.py": "x = 1\n", "a/b/c": "c" * 50}, compression=zipfile.ZIP_STORED).data
    folders = make_wheel("thing", extra_members=[Member("thing/", b""), Member(f"{_DIST_INFO}/", b"")]).data
    return [
        small, stored, folders, rewritten(small, stream=True), rewritten(small, zip64=True),
        rewritten(small, stream=True, zip64=True), rewritten(small, comment=b"a comment"),
        ended_by_zip64(small), full,
        rewritten(full, stream=True), rewritten(full, zip64=True),
    ]  # fmt: skip


_NUMBERS = (0, 1, 2, 7, 8, 9, 12, 14, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_PIECES = (
    b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\10", b"../", b"/", b"\\", b"\0", b"\r", b"\n", b",", b'"',
    b"%", b"%(a)s", b"=", b"[", b"]", b"[console_scripts]\n", b"\xff", b"\xed\xa0\x80", b"sha256=", b"\xe2\x80\xa8", b"-1",
    b"\xef\xbb\xbf", b"#!python", b":", b" ", b"." * 3, b"a" * 300, b"A", b"\x85", b"\xc2\x85", b".dist-info", b".data/",
)  # fmt: skip
_NAMES = (
    "../evil", "a/../../evil", "/evil", "C:evil", "a\\b", ".", "..", "a//b", "./a", "a/.", "", "/", "x" * 256, "d/" * 120 + "f",
    "thing.py", "THING.py", "thing.py/x", "thing", "a\x7fb", "a\x85b", "a\u2028b", "a\nb", "con", "a ", "a.", "thing-1.0.data",
    "thing-1.0.data/scripts", "thing-1.0.data/bogus/x", "thing-1.0.data/scripts/../x", "thing-1.0.data/purelib/thing.py",
    "thing-1.0.data/data/bin/thing", "thing-1.0.data/scripts/thing", "thing-1.0.data/data/lib/python3.12/site-packages/thing.py",
    f"thing-1.0.data/purelib/{_DIST_INFO}/RECORD", f"thing-1.0.data/data/lib/python3.12/site-packages/{_DIST_INFO}/RECORD",
    f"{_DIST_INFO}/INSTALLER", f"{_DIST_INFO}/RECORD", f"{_DIST_INFO}/RECORD/x", "other-1.0.dist-info/METADATA", "__pycache__",
    "__pycache__/thing.cpython-312.pyc", "a/__pycache__/x", "thing-1.0.data/data/lib", "thing-1.0.data/data/lib/python3.12",
    "stargz.index.json", "x" * 250 + ".py", "é" * 127, "é" * 128, "thing-1.0.data/data/bin", "thing-1.0.data/headers/x",
    "a,b", 'a"b', " a", "#", "thing-1.0.data/data/include/site/python3.12/thing/x",
)  # fmt: skip
#: Header's signature -> offset and width of each number in it.
_FIELDS = {
    b"PK\3\4": ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\1\2": (
        (4, 2), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (34, 2), (38, 4), (42, 4),
    ),
    b"PK\5\6": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    b"PK\6\6": ((4, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\6\7": ((4, 4), (8, 8), (16, 4)),
    b"PK\7\10": ((4, 4), (8, 4), (12, 4)),
}  # fmt: skip


@dataclass(frozen=True)
class Mutator:
    """Makes mutants of ``corpus``, the same ones for the same ``rng``."""

    rng: random.Random
    corpus: list[bytes]

    def next(self) -> bytes:
        """Return the next mutant."""
        if self.rng.random() < 0.25:
            return self.composed()
        data = self.rng.choice(self.corpus)
        ways: Sequence[Callable[[bytes], bytes]] = (self.bytes_changed, self.field_changed, self.twins_changed,
                                                    self.renamed, self.stream_changed, self.spliced)  # fmt: skip
        for _ in range(self.rng.choice((1, 1, 1, 2, 3, 6))):
            data = self.rng.choice(ways)(data)
        return _repaired(data) if self.rng.random() < 0.5 else data

    def bytes_changed(self, data: bytes) -> bytes:
        """Flip, overwrite, cut, double or insert."""
        rng, at = self.rng, self.rng.randrange(len(data) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 30, 46, rng.randrange(len(data) + 1)))
        begin, end = data[:at], data[at:]
        piece = rng.choice((rng.choice(_PIECES), rng.randbytes(length % 64), bytes([rng.randrange(256)])))
        changed = (
            begin + piece + end[len(piece) :],
            begin + piece + end,
            begin + end[length:],
            data[: at + length] + end,
            begin,
        )
        return rng.choice(changed)

    def field_changed(self, data: bytes) -> bytes:
        """Put another number into one header."""
        signature = self.rng.choice(list(_FIELDS))
        if (places := _places(data, signature)) == []:
            return data
        return self._put(data, [self.rng.choice(places)], [self.rng.choice(_FIELDS[signature])])

    def twins_changed(self, data: bytes) -> bytes:
        """Put another number into a local header and the entry of the directory that belongs to it."""
        local, central = _places(data, b"PK\3\4"), _places(data, b"PK\1\2")
        if not local or len(local) != len(central):
            return data
        index = self.rng.randrange(len(local))
        fields = self.rng.choice(
            [((6, 2), (8, 2)), ((8, 2), (10, 2)), ((14, 4), (16, 4)), ((18, 4), (20, 4)), ((22, 4), (24, 4))]
        )
        return self._put(data, [local[index], central[index]], list(fields))

    def renamed(self, data: bytes) -> bytes:
        """Give a member another name of the same length, here and there."""
        if not (places := _places(data, b"PK\1\2")):
            return data
        at = self.rng.choice(places)
        size = int.from_bytes(data[at + 28 : at + 30], "little")
        old = data[at + 46 : at + 46 + size]
        if new := [name for name in (name.encode() for name in _NAMES) if len(name) == size != 0]:
            return data.replace(old, self.rng.choice(new))
        at = self.rng.randrange(max(1, len(old)))
        piece = self.rng.choice(_PIECES)[:1]
        return data.replace(old, old[:at] + piece + old[at + 1 :]) if old else data

    def stream_changed(self, data: bytes) -> bytes:
        """Change a compressed stream and make size and CRC-32 right again, as far as zlib inflates it."""
        local, central = _places(data, b"PK\3\4"), _places(data, b"PK\1\2")
        if not local or len(local) != len(central):
            return data
        index = self.rng.randrange(len(local))
        at, entry = local[index], central[index]
        packed = int.from_bytes(data[entry + 20 : entry + 24], "little")
        begin = at + 30 + sum(struct.unpack_from("<HH", data, at + 26))
        raw = bytearray(data[begin : begin + packed])
        for _ in range(self.rng.choice((1, 1, 2, 8)) if raw else 0):
            raw[self.rng.randrange(len(raw))] = self.rng.randrange(256)
        plain = _inflated(bytes(raw)) if data[at + 8 : at + 10] == b"\10\0" else bytes(raw)
        changed = bytearray(data)
        changed[begin : begin + packed] = raw
        for offset in (at + 14, entry + 16):
            struct.pack_into("<LLL", changed, offset, zlib.crc32(plain), packed, len(plain))
        return bytes(changed)

    def spliced(self, data: bytes) -> bytes:
        """Join the beginning of one and the end of another."""
        other = self.rng.choice(self.corpus)
        return data[: self.rng.randrange(len(data) + 1)] + other[self.rng.randrange(len(other) + 1) :]

    def composed(self) -> bytes:
        """Return a ZIP that is right as such, with text or names that are not."""
        rng = self.rng
        extra = [Member(rng.choice(_NAMES), rng.choice(_PIECES), rng.choice((0o100644,) * 9 + (0o100755, 0, 0o120777, 0o040755)),
                        rng.choice((0,) * 9 + (8,) * 9 + (14,))) for _ in range(rng.choice((0, 0, 1, 1, 2)))]  # fmt: skip
        scripts = rng.choice(
            ("", "[console_scripts]\na = b:c\nd=e:f.g [x]\n", "[gui_scripts]\na/b = c:d\n", "[DEFAULT]\nx=%(y)s\n")
        )
        made = make_wheel(
            "thing",
            files={"thing/m.py": self._text("def f():\n    return [1, 'x']\n"), "thing/data": self._text("data")},
            scripts={rng.choice(("tool", "a/b", "thing")): self._text("#!python\nx\n")} if rng.random() < 0.3 else None,
            entry_points=self._text(scripts).decode(errors="replace") if scripts else None,
            metadata=self._text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"),
            extra_members=extra,
        )  # fmt: skip
        with zipfile.ZipFile(io.BytesIO(made.data)) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            members = [
                Member(i.filename, archive.read(i), i.external_attr >> 16, i.compress_type) for i in archive.infolist()
            ]
        which = rng.randrange(len(members) + 3)
        if which < len(members):
            old = members[which]
            members[which] = Member(old.name, self._bytes(old.data), old.mode, old.compression)
        rng.shuffle(members)
        return make_zip(members)

    def _put(self, data: bytes, places: list[int], fields: list[tuple[int, int]]) -> bytes:
        changed = bytearray(data)
        offset, width = fields[0]
        old = int.from_bytes(data[places[0] + offset : places[0] + offset + width], "little")
        new = self.rng.choice(
            (*_NUMBERS, old + 1, old - 1, old * 2, old ^ (1 << self.rng.randrange(8 * width)), len(data))
        )
        for place, (offset, width) in zip(places, fields, strict=True):
            if place + offset + width <= len(data):
                changed[place + offset : place + offset + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
        return bytes(changed)

    def _text(self, text: str) -> bytes:
        return self._bytes(text.encode()) if self.rng.random() < 0.4 else text.encode()

    def _bytes(self, data: bytes) -> bytes:
        for _ in range(self.rng.choice((1, 1, 2, 5))):
            at = self.rng.randrange(len(data) + 1)
            data = data[:at] + self.rng.choice(_PIECES) + data[at + self.rng.choice((0, 0, 1, 20)) :]
        return data


def _repaired(data: bytes) -> bytes:
    """Make the offsets right again after bytes were put in or taken out, so that what lies deeper is reached."""
    local, central, end = (_places(data, signature) for signature in (b"PK\3\4", b"PK\1\2", b"PK\5\6"))
    changed = bytearray(data)
    if central and end and central[0] <= end[-1] <= len(data) - 22:
        struct.pack_into(
            "<HHLL",
            changed,
            end[-1] + 8,
            len(central) & 0xFFFF,
            len(central) & 0xFFFF,
            end[-1] - central[0],
            central[0],
        )
    if len(local) == len(central):
        for here, there in zip(local, central, strict=True):
            struct.pack_into("<L", changed, there + 42, here)
    return bytes(changed)


def _places(data: bytes, signature: bytes) -> list[int]:
    found, at = [], data.find(signature)
    while at >= 0:
        found.append(at)
        at = data.find(signature, at + 1)
    return [at for at in found if at + 46 <= len(data) or signature not in {b"PK\1\2", b"PK\3\4"}]


def _inflated(raw: bytes) -> bytes:
    try:
        return zlib.decompressobj(-15).decompress(raw, 50_000_000)
    except zlib.error:
        return b""


# Telling whether what became of them is right


def run(data: bytes, folder: Path, bytecode_of: BytecodeOf | None) -> str:
    """Convert a mutant and return what became of it, in words without its details.

    Raises:
        WrongError: a layer that is not right, or an error that does not say which wheel.
        Exception: whatever escaped.

    """
    path = folder / NAME
    path.write_bytes(data)
    out = io.BytesIO()
    try:
        write_wheels([WheelFile(NAME, Digest.of(data), path)], PREFIX, bytecode_of, out)
    except CompilerError as error:
        raise WrongError(f"the compiler did not survive: {error}") from error
    except EnvbuilderError as error:
        if NAME not in error.message or "\n" in error.message:
            raise WrongError(f"{type(error).__name__} does not name the wheel in one line: {error}") from error
        return f"{type(error).__name__}: {_reason(error.message)}"
    _check(data, out.getvalue())
    return "layer"


def _reason(message: str) -> str:
    words = message.rsplit(f"{NAME}: ", maxsplit=1)[-1].split(": ", maxsplit=1)[0].split("'")
    return " ".join("".join(c for c in words[-1] if not c.isdigit()).split())[:60]


def _check(data: bytes, blob: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob))) as tar:
        infos = tar.getmembers()
        files = {info.name: tar.extractfile(info).read() for info in infos if info.isreg()}  # type: ignore[union-attr]
    names = [info.name for info in infos]
    if len(set(names)) != len(names):
        raise WrongError("a path is in the layer twice")
    for info in infos:
        parts = info.name.split("/")
        if not (info.name.startswith("opt/env/") or info.name in _PARENTS | _OUR_OWN) or ".." in parts or "" in parts:
            raise WrongError(f"{info.name!r} is outside the prefix")
        if not (info.isreg() or info.isdir()) or info.mode not in {0o644, 0o755}:
            raise WrongError(f"{info.name!r} has a type or mode that no wheel may have")
        if max(len(part.encode()) for part in parts) > 255:
            raise WrongError(f"{info.name!r} cannot be unpacked")
    _check_contents(data, files)
    _check_record(files)


def _check_contents(data: bytes, files: dict[str, bytes]) -> None:
    """What lies in site-packages is what zipfile reads."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            found = files.get(f"{_SITE}/{info.filename}")
            ours = info.filename.endswith((".dist-info/RECORD", ".dist-info/INSTALLER"))
            if found is not None and not ours and found != archive.read(info):
                raise WrongError(f"{info.filename!r} has other bytes than zipfile finds")


def _check_record(files: dict[str, bytes]) -> None:
    """RECORD names every file once, with its hash and size, and nothing else."""
    own = next(name for name in files if name.endswith(".dist-info/RECORD") and name.count("/") == _SITE.count("/") + 2)
    seen = set()
    for path, stated, size in csv.reader(io.StringIO(files[own].decode(), newline="")):
        name = _normal(f"{_SITE}/{path}")
        if name in seen or name not in files:
            raise WrongError(f"RECORD has {path!r} twice or in vain")
        seen.add(name)
        content = files[name]
        true = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        if name != own and (stated, size) != (true, str(len(content))):
            raise WrongError(f"RECORD does not tell the truth about {path!r}")
    if missing := files.keys() - seen - _OUR_OWN:
        raise WrongError(f"RECORD does not name {sorted(missing)}")


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
