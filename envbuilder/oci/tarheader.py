"""Tar headers (POSIX ustar, pax where ustar has no room), written so that they depend on the entry alone."""

from __future__ import annotations

import struct
import tarfile

BLOCK = tarfile.BLOCKSIZE
#: 1980-01-01T00:00:00Z: ZIP, which Python users pack site-packages into, knows no earlier time.
MTIME = 315532800
REGULAR, HARDLINK, SYMLINK, DIRECTORY = b"0", b"1", b"2", b"5"

_USTAR = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")
_CHECKSUM = slice(148, 156)
_MTIME = b"%011o\0" % MTIME
_DEVICE = b"0000000\0"
_LARGEST = 0o77777777777  # what eleven octal digits hold


def header(path: str, kind: bytes, *, mode: int, uid: int = 0, gid: int = 0, size: int = 0, link: str = "") -> bytes:
    """Return the header blocks of one entry; ``path`` of a directory ends with a slash.

    Names without owner, no clock: the same arguments give the same bytes. Raises ValueError when a number is negative.
    """
    if path.isascii() and link.isascii() and len(link) <= 100 and size <= _LARGEST and max(uid, gid) < 1 << 21:
        split = _split(path)
        if split is not None:
            numbers = (b"%07o\0" % mode, b"%07o\0" % uid, b"%07o\0" % gid, b"%011o\0" % size)
            return _ustar(split, kind, numbers, link)
    info = tarfile.TarInfo(path)
    info.type, info.mode, info.uid, info.gid = kind, mode, uid, gid
    info.size, info.linkname, info.mtime = size, link, MTIME
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _ustar(split: tuple[str, str], kind: bytes, numbers: tuple[bytes, ...], link: str) -> bytes:
    # Written by hand because it is written for every file: tarfile's way costs five times as much.
    prefix, name = split
    fields = [
        name.encode(), *numbers, _MTIME, b" " * 8, kind,
        link.encode(), b"ustar\x0000", b"", b"", _DEVICE, _DEVICE, prefix.encode(),
    ]  # fmt: skip
    block = bytearray(_USTAR.pack(*fields))
    block[_CHECKSUM] = b"%06o\0 " % sum(block)
    return bytes(block)


def _split(path: str) -> tuple[str, str] | None:
    """Split a path into ustar's prefix (155) and name (100); None when it does not fit."""
    if len(path) <= 100:
        return "", path
    slash = path.find("/", len(path) - 101)
    if slash <= 0 or slash > 155 or slash == len(path) - 1:
        return None
    return path[:slash], path[slash + 1 :]
