"""Write ``/etc/ld.so.cache`` as ldconfig would: glibc's format ``glibc-ld.so.cache1.1`` (glibc, sysdeps/generic/dl-cache.h).

The loader searches it by halving, so the order is part of the format: names descending, runs of digits compared as
numbers (``_dl_cache_libcmp``).
"""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("<20sII B3x I 12x")  # magic, entries, bytes of strings, endianness, extensions' offset
_ENTRY = struct.Struct("<iIIIQ")  # flags, name, path, (unused) OS version, hardware capabilities
_LITTLE_ENDIAN = 2
#: FLAG_ELF_LIBC6 with the architecture's own flag, by Debian's architecture.
FLAGS = {"amd64": 0x0303, "arm64": 0x0A03}


@dataclass(frozen=True)
class Library:
    """A library the loader can find: the name that programs ask for, and its absolute path."""

    name: str
    path: str


def write_cache(libraries: Iterable[Library], architecture: str) -> bytes:
    """Return the cache's bytes for libraries given in the order of the search path (the first of a name counts)."""
    first: dict[str, str] = {}
    for library in libraries:
        first.setdefault(library.name, library.path)
    names = sorted(first, key=functools.cmp_to_key(_compare), reverse=True)
    start = _HEADER.size + _ENTRY.size * len(names)
    entries, strings = b"", bytearray()

    def place(text: str) -> int:
        offset = start + len(strings)
        strings.extend(text.encode() + b"\0")
        return offset

    for name in names:
        entries += _ENTRY.pack(FLAGS[architecture], place(name), place(first[name]), 0, 0)
    return _HEADER.pack(_MAGIC, len(names), len(strings), _LITTLE_ENDIAN, 0) + entries + bytes(strings)


def _compare(first: str, second: str) -> int:
    """Compare as ``_dl_cache_libcmp``: digits against digits as numbers, digits after everything else."""
    left, right = _words(first), _words(second)
    for a, b in zip(left, right, strict=False):
        if a != b:
            return 1 if a > b else -1
    return (len(left) > len(right)) - (len(left) < len(right))


def _words(name: str) -> list[tuple[int, int]]:
    """Split into characters and whole numbers; the first of each pair ranks numbers above characters."""
    return [(1, int(word)) if word.isdigit() else (0, ord(word)) for word in re.findall(r"\d+|\D", name, re.ASCII)]
