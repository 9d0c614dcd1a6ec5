"""Gzip members (RFC 1952) written so that the bytes depend on the data alone.

A layer is a run of concatenated members, which every gzip reader takes as one stream. Data of our own is compressed
by libdeflate through the exactly pinned ``deflate`` package: its output is the same on every machine, where zlib's
depends on the build of Python and isal's on the processor. Deflate streams that exist already are wrapped as they
are.
"""

from __future__ import annotations

import struct

import deflate

# ID1 ID2 CM=deflate FLG=0 MTIME=0 XFL=0 OS=255 (unknown): nothing of the machine or the clock.
HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
LEVEL = 6
#: Enters layer keys: whatever changes the bytes must change this.
REVISION = f"libdeflate {deflate.__version__} level {LEVEL}"


def trailer(crc32: int, size: int) -> bytes:
    """Return the eight bytes that end a member: CRC-32 and size modulo 2**32 of the uncompressed data."""
    return struct.pack("<LL", crc32, size & 0xFFFFFFFF)


def member(data: bytes | bytearray) -> bytes:
    """Return one whole gzip member that holds ``data``."""
    return HEADER + bytes(deflate.deflate_compress(data, LEVEL)) + trailer(deflate.crc32(data), len(data))
