"""Read what the loader reads of an ELF file (System V ABI, 64 bit, little endian): names needed, where, which versions."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.errors import EnvbuilderError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"\x7fELF"
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_NEEDED, _STRTAB, _SONAME, _RPATH, _RUNPATH, _VERNEED, _VERNEEDNUM = 1, 5, 14, 15, 29, 0x6FFFFFFE, 0x6FFFFFFF
_PROGRAM = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_VERSION = struct.Struct("<HHIII")  # vn_version, vn_cnt, vn_file, vn_aux, vn_next
_AUXILIARY = struct.Struct("<IHHII")  # vna_hash, vna_flags, vna_other, vna_name, vna_next
_GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)")


class ElfError(EnvbuilderError):
    """A file that begins as an ELF file cannot be read as one of this kind of machine."""


@dataclass(frozen=True)
class Elf:
    """The dynamic part of a file. ``versions`` are the symbol versions needed of others (``GLIBC_2.34``)."""

    soname: str | None
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    versions: frozenset[str]
    dynamic: bool

    @property
    def glibc(self) -> tuple[int, int]:
        """The least glibc that has every version needed; (0, 0) when none is."""
        found = [(int(m[1]), int(m[2])) for version in self.versions if (m := _GLIBC.fullmatch(version))]
        return max(found, default=(0, 0))


def read_elf(data: bytes, name: str) -> Elf:
    """Read a whole file's bytes; ``name`` is for errors. Files that are not dynamic need nothing.

    Raises:
        ElfError: it is no 64 bit little endian ELF file, or damaged.

    """
    if data[:4] != MAGIC or data[4:6] != b"\x02\x01":
        raise ElfError(f"{name}: is not a 64 bit little endian ELF file")
    try:
        return _read(data)
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise ElfError(f"{name}: is damaged: {error}") from error


def _read(data: bytes) -> Elf:
    (start,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    programs = [_PROGRAM.unpack_from(data, start + size * number) for number in range(count)]
    loads = [(address, offset, length) for kind, _, offset, address, _, length, _, _ in programs if kind == _PT_LOAD]
    dynamic = next(((offset, length) for kind, _, offset, _, _, length, _, _ in programs if kind == _PT_DYNAMIC), None)
    if dynamic is None:
        return Elf(None, (), (), frozenset(), dynamic=False)
    tags = _tags(data, *dynamic)
    strings = _offset(loads, tags[_STRTAB][0])

    def text(position: int) -> str:
        begin = strings + position
        return data[begin : data.index(b"\0", begin)].decode()

    def texts(tag: int) -> tuple[str, ...]:
        return tuple(text(value) for value in tags.get(tag, ()))

    paths = texts(_RUNPATH) or texts(_RPATH)
    versions: frozenset[str] = frozenset()
    if _VERNEED in tags:
        positions = _versions(data, _offset(loads, tags[_VERNEED][0]), tags[_VERNEEDNUM][0])
        versions = frozenset(text(position) for position in positions)
    return Elf(
        soname=next(iter(texts(_SONAME)), None),
        needed=texts(_NEEDED),
        runpath=tuple(path for paths_ in paths for path in paths_.split(":") if path),
        versions=versions,
        dynamic=True,
    )


def _tags(data: bytes, offset: int, length: int) -> dict[int, list[int]]:
    tags: dict[int, list[int]] = {}
    for position in range(offset, offset + length, _DYNAMIC.size):
        tag, value = _DYNAMIC.unpack_from(data, position)
        if tag == 0:
            break
        tags.setdefault(tag, []).append(value)
    if _STRTAB not in tags:
        message = "its dynamic section names no string table"
        raise ValueError(message)
    return tags


def _versions(data: bytes, offset: int, count: int) -> Iterator[int]:
    """Yield where in the string table the names of all versions needed lie."""
    for _ in range(count):
        _, entries, _, auxiliary, following = _VERSION.unpack_from(data, offset)
        position = offset + auxiliary
        for _ in range(entries):
            _, _, _, name, step = _AUXILIARY.unpack_from(data, position)
            yield name
            position += step
        offset += following


def _offset(loads: list[tuple[int, int, int]], address: int) -> int:
    for begin, offset, length in loads:
        if begin <= address < begin + length:
            return offset + address - begin
    message = f"address {address:#x} is in no segment"
    raise ValueError(message)
