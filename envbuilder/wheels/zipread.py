"""The members of a ZIP archive, read so that no two readers can see different files in it (PKWARE's APPNOTE 6.3).

Most readers believe the central directory, those that read a stream the local headers. Here both must say the same,
and members, their data descriptors and the directory must fill the file from its first byte to its last: nothing
overlaps, nothing hides in a gap, nothing stands before or behind. ZIP64, data descriptors and comments are fine.
Several disks, encryption, and methods other than stored and deflate are refused, as is what a deflate stream cannot
inflate to. Nothing is inflated here.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from envbuilder.errors import EnvbuilderError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STORED, DEFLATED = 0, 8
#: A deflate stream's two bits stand for 258 bytes at the very most.
BEST_RATIO = 1032
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LONGEST_COMMENT = 0xFFFF
_NEWEST = 63  # APPNOTE 6.3, as tenths
_LONGEST_DESCRIPTOR = 24
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF  # "see the ZIP64 record"
_ZIP64, _UNICODE_PATH = 0x0001, 0x7075  # extra fields
_ENCRYPTED, _DESCRIPTOR, _PATCH, _STRONG, _UTF8, _MASKED = 1 << 0, 1 << 3, 1 << 5, 1 << 6, 1 << 11, 1 << 13


class ZipError(EnvbuilderError):
    """An archive that is refused: ``reason`` follows the archive's or ``member``'s name."""

    def __init__(self, reason: str, *, member: str | None = None) -> None:
        super().__init__(reason if member is None else f"member {member!r} {reason}")
        self.reason = reason
        self.member = member


@dataclass(frozen=True)
class Source:
    """An open file of known size, read at offsets; threads need not take turns."""

    descriptor: int
    size: int

    @classmethod
    def of(cls, file: BinaryIO) -> Source:
        """Return the source that reads from an open file; the caller keeps it open."""
        return cls(file.fileno(), os.fstat(file.fileno()).st_size)

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly ``size`` bytes; raise ZipError when they do not lie inside the file."""
        data = os.pread(self.descriptor, size, offset) if 0 <= offset <= self.size - size else b""
        if len(data) != size:
            raise ZipError("points outside the file")
        return data


@dataclass(frozen=True, slots=True)
class Member:
    """A member: ``packed`` bytes at ``offset`` that give ``size`` bytes. ``mode`` is stat's, 0 when unknown."""

    name: str
    method: int
    crc32: int
    size: int
    packed: int
    offset: int
    mode: int


def read_members(source: Source, *, most: int, largest: int) -> list[Member]:
    """Return the members in the central directory's order. Folders are members whose names end with a slash.

    Args:
        source: the archive.
        most: how many members it may have.
        largest: how many bytes its central directory may have; it is read whole.

    Raises:
        ZipError: it is no ZIP archive, or one that is refused.

    """
    directory = _directory(source)
    if directory.count > most:
        raise ZipError(f"has {directory.count} members, more than the {most} that are accepted")
    if directory.size > largest:
        raise ZipError(f"has a central directory of {directory.size} bytes, more than the {largest} that are accepted")
    headers = list(_headers(source.read(directory.offset, directory.size), directory.count))
    in_place = sorted(range(len(headers)), key=lambda index: headers[index].offset)
    bounds = [*(headers[index].offset for index in in_place), directory.offset]
    if in_place and bounds[-2] >= directory.offset:
        raise ZipError("does not lie before the central directory", member=headers[in_place[-1]].name)
    if bounds[0] != 0:
        raise ZipError(f"has {bounds[0]} bytes before its first member")
    data = [0] * len(headers)
    for index, end in zip(in_place, bounds[1:], strict=True):
        data[index] = _data_offset(source, headers[index], end)
    return [
        Member(header.name, header.method, header.crc32, header.size, header.packed, offset, header.attributes >> 16)
        for header, offset in zip(headers, data, strict=True)
    ]


@dataclass(frozen=True)
class _Directory:
    offset: int
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class _Header:
    """An entry of the central directory."""

    name: str
    raw_name: bytes
    flags: int
    method: int
    crc32: int
    packed: int
    size: int
    offset: int
    attributes: int


def _directory(source: Source) -> _Directory:
    """Find the central directory by the one record that ends the archive, and its ZIP64 twin when there is one."""
    end = _end_offset(source)
    _, disk, first_disk, here, count, size, offset, _ = _END.unpack(source.read(end, _END.size))
    stated = (disk, first_disk, here, count, size, offset)
    begin, locator = end - _LOCATOR.size, b""
    if begin >= 0:
        locator = source.read(begin, _LOCATOR.size)
    if locator.startswith(b"PK\6\7"):
        _, locator_disk, end, disks = _LOCATOR.unpack(locator)
        record = _END64.unpack(source.read(end, _END64.size))
        if record[0] != b"PK\6\6" or record[1] < _END64.size - 12 or end + 12 + record[1] != begin:
            raise ZipError("has a damaged ZIP64 end record")
        full = record[4:]
        for short, value, unset in zip(stated, full, (*[_MAX16] * 4, _MAX32, _MAX32), strict=True):
            if short not in {value, unset}:
                raise ZipError("has two end records that disagree")
        disk, first_disk, here, count, size, offset = full
        if locator_disk != 0 or disks > 1:
            raise ZipError("is one of several disks")
    if (disk, first_disk) != (0, 0) or here != count:
        raise ZipError("is one of several disks")
    if offset + size != end:
        raise ZipError(f"has a central directory that is not where it says: {offset} + {size} is not {end}")
    return _Directory(offset, size, count)


def _end_offset(source: Source) -> int:
    begin = max(0, source.size - _END.size - _LONGEST_COMMENT)
    tail = source.read(begin, source.size - begin)
    found, position = [], tail.find(b"PK\5\6")
    while 0 <= position <= len(tail) - _END.size:
        if position + _END.size + _END.unpack_from(tail, position)[-1] == len(tail):
            found.append(begin + position)
        position = tail.find(b"PK\5\6", position + 1)
    if not found:
        raise ZipError("is not a ZIP archive: it does not end with an end record")
    if len(found) > 1:
        raise ZipError("has two end records")
    return found[0]


def _headers(data: bytes, count: int) -> Iterator[_Header]:
    position = 0
    for _ in range(count):
        if len(data) - position < _CENTRAL.size or not data.startswith(b"PK\1\2", position):
            raise ZipError("has a damaged central directory")
        fields = _CENTRAL.unpack_from(data, position)
        ends = [position + _CENTRAL.size]
        for length in fields[10:13]:
            ends.append(ends[-1] + length)
        position = ends[-1]
        if position > len(data):
            raise ZipError("has a damaged central directory")
        yield _header(fields, data[ends[0] : ends[1]], data[ends[1] : ends[2]])
    if position != len(data):
        raise ZipError(f"has more in its central directory than the {count} members it states")


def _header(fields: Sequence[int], raw_name: bytes, raw_extra: bytes) -> _Header:
    flags, method, crc32, packed, size = fields[3], fields[4], *fields[7:10]
    name = _shown(raw_name, flags)
    extra = _extra(raw_extra, name)
    size, packed, offset, disk = _wide(
        extra, [(size, _MAX32), (packed, _MAX32), (fields[16], _MAX32), (fields[13], _MAX16)], name
    )
    name = _name(raw_name, flags, extra, name)
    if flags & (_ENCRYPTED | _STRONG | _MASKED):
        raise ZipError("is encrypted", member=name)
    if flags & _PATCH:
        raise ZipError("is a patch of another file", member=name)
    if method not in {STORED, DEFLATED}:
        raise ZipError(f"is compressed by method {method}; wheels store or deflate", member=name)
    if disk != 0:
        raise ZipError("lies on another disk", member=name)
    if fields[2] & 0xFF > _NEWEST:
        raise ZipError(f"needs version {fields[2] & 0xFF} of ZIP", member=name)
    if (method == STORED and size != packed) or size > packed * BEST_RATIO:
        raise ZipError(f"cannot have {size} bytes in {packed}", member=name)
    return _Header(name, raw_name, flags, method, crc32, packed, size, offset, fields[15])


def _shown(raw: bytes, flags: int) -> str:
    """Decode a name for errors, whatever it is."""
    return raw.decode("ascii") if raw.isascii() else raw.decode("utf-8" if flags & _UTF8 else "cp437", "replace")


def _name(raw: bytes, flags: int, extra: dict[int, bytes], shown: str) -> str:
    """Decode a name: UTF-8 where the archive says so, else code page 437, as zipfile, pip and installer do.

    Info-ZIP writes UTF-8 without saying so and repeats the name in an extra field (APPNOTE 4.6.9), which newer readers
    follow: it must be the same bytes.
    """
    unicode_path = extra.get(_UNICODE_PATH)
    if unicode_path is None and raw.isascii():
        return shown
    if unicode_path is not None and unicode_path != b"\1" + struct.pack("<L", zlib.crc32(raw)) + raw:
        raise ZipError("has two names", member=shown)
    try:
        return raw.decode("utf-8" if flags & _UTF8 or unicode_path is not None else "cp437")
    except UnicodeDecodeError as error:
        raise ZipError("has a name that is not UTF-8", member=shown) from error


def _extra(data: bytes, name: str) -> dict[int, bytes]:
    """Return the extra fields that matter here. Fewer than four bytes at the end are padding, as zipfile has it."""
    found: dict[int, bytes] = {}
    position = 0
    while len(data) - position >= 4:
        tag, size = struct.unpack_from("<HH", data, position)
        position += 4 + size
        if position > len(data) or (tag in found):
            raise ZipError("has damaged extra fields", member=name)
        if tag in {_ZIP64, _UNICODE_PATH}:
            found[tag] = data[position - size : position]
    return found


def _wide(extra: dict[int, bytes], fields: list[tuple[int, int]], name: str) -> list[int]:
    """Return header fields with those that hold their ``unset`` value taken, in order, from the ZIP64 extra field."""
    block = extra.get(_ZIP64)
    if block is None:
        return [value for value, _ in fields]
    values, position = [], 0
    for value, unset in fields:
        width = 0 if value != unset else 4 if unset == _MAX16 else 8
        if position + width > len(block):
            raise ZipError("has a damaged ZIP64 field", member=name)
        values.append(int.from_bytes(block[position : position + width], "little") if width else value)
        position += width
    return values


def _data_offset(source: Source, header: _Header, end: int) -> int:
    """Return where a member's data begins, its local header and whatever else lies before ``end`` agreeing with it."""
    begin = header.offset + _LOCAL.size
    if begin > end:
        raise ZipError("overlaps what comes after it", member=header.name)
    fields = _LOCAL.unpack(source.read(header.offset, _LOCAL.size))
    data: int = begin + sum(fields[-2:])
    if fields[0] != b"PK\3\4":
        raise ZipError("has no local header", member=header.name)
    if data + header.packed > end:
        raise ZipError("overlaps what comes after it", member=header.name)
    found = _compared(header, fields, source.read(begin, data - begin))
    stated = (header.crc32, header.packed, header.size)
    gap = source.read(data + header.packed, min(end - data - header.packed, _LONGEST_DESCRIPTOR + 1))
    if header.flags & _DESCRIPTOR:
        honest = all(value in {0, true} for value, true in zip(found, stated, strict=True))
        if not honest or gap not in _descriptors(stated):
            raise ZipError("has another size or CRC-32 in its local header or data descriptor", member=header.name)
    elif found != stated:
        raise ZipError("has another size or CRC-32 in its local header", member=header.name)
    elif gap:
        raise ZipError("is followed by bytes that belong to no member", member=header.name)
    return data


def _compared(header: _Header, fields: Sequence[int], rest: bytes) -> tuple[int, int, int]:
    """Return CRC-32 and both sizes of a local header that agrees with ``header`` in all else."""
    _, _, flags, method, _, _, crc32, packed, size, name_size, _ = fields
    if (flags, method) != (header.flags, header.method):
        raise ZipError("has other flags or another method in its local header", member=header.name)
    if rest[:name_size] != header.raw_name:
        raise ZipError("has another name in its local header", member=header.name)
    if len(rest) > name_size:
        extra = _extra(rest[name_size:], header.name)
        size, packed = _wide(extra, [(size, _MAX32), (packed, _MAX32)], header.name)
        if _name(header.raw_name, flags, extra, _shown(header.raw_name, flags)) != header.name:
            raise ZipError("has another name in its local header", member=header.name)
    return crc32, packed, size


def _descriptors(stated: tuple[int, int, int]) -> set[bytes]:
    """Return the forms that a data descriptor may have: with or without signature, with 32 or 64 bits a size."""
    crc32, packed, size = stated
    forms = [struct.pack("<LQQ", crc32, packed, size)]
    if max(packed, size) <= _MAX32:
        forms.append(struct.pack("<LLL", crc32, packed, size))
    return {*forms, *(b"PK\7\10" + form for form in forms)}
