"""Read a layer: the members of a tar, one after the other, from a stream that is hashed on the way.

Follows POSIX.1-2001 (ustar, pax) and the GNU long names. Written by hand because a base image has 100,000 members and
``tarfile`` spends more time on each than unpacking it takes. What a member may do to a folder is not decided here.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BLOCK = 512
#: name, mode, uid, gid, size, mtime, checksum, kind, link, magic, (version, owner, group, device), prefix
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s6s82x155s12x")
_CHUNK = 1 << 20
_EXTENSION = 1 << 20  # an extended header larger than this is an attack, not a name

FILE, HARDLINK, SYMLINK, DIRECTORY = b"0", b"1", b"2", b"5"
#: What a member may be besides: named in messages.
SPECIAL = {b"3": "character device", b"4": "block device", b"6": "FIFO"}
_OTHER_NAMES = {b"\0": FILE, b"7": FILE}
_LONG_LINK, _LONG_NAME, _PAX, _PAX_GLOBAL = b"K", b"L", b"x", b"g"


class TarError(EnvbuilderError):
    """A stream is not a tar that can be read: damaged, cut short, or of an unsupported kind."""


class Source(Protocol):
    """What is read: an open file, or a decompressor."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; none at the end."""


def blocks(source: Source) -> Iterator[bytes]:
    """Yield what a source holds, to its end."""
    while data := source.read(_CHUNK):
        yield data


class Member(NamedTuple):  # made for every file: a frozen dataclass takes four times as long
    """One member. ``name`` and ``link`` are as they stand in the tar, ``mtime`` is in nanoseconds."""

    name: str
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    link: str


class TarStream:
    """Reads the bytes of a tar once, front to back. They come in blocks of any size but 0.

    A block need not stay valid when the next one is asked for. Unless ``hashed``, they are not hashed, and there is no digest in the end.
    """

    def __init__(self, source: Iterable[bytes | memoryview], *, hashed: bool = True) -> None:
        self._source = iter(source)
        self._hash = hashlib.sha256() if hashed else None
        self._buffer = memoryview(b"")
        self._start = self._end = 0
        self._unread = 0  # bytes of the current member, with its padding, that nobody has asked for yet
        self._content = 0

    def members(self) -> Iterator[Member]:
        """Yield the members; ``content`` gives the bytes of the one yielded last.

        Raises:
            TarError: see the class.

        """
        shared: dict[str, str] = {}
        own: dict[str, str] = {}
        while True:
            self._skip()
            header = self._exactly(_BLOCK)
            if not any(header):
                return
            member = _parse(header)
            if member.kind in {_PAX, _PAX_GLOBAL, _LONG_LINK, _LONG_NAME}:
                if not 0 <= member.size <= _EXTENSION:
                    raise TarError(f"an extended header of {member.size} bytes is none that can be read")
                data = self._exactly(member.size)
                self._exactly(-member.size % _BLOCK)
                (shared if member.kind == _PAX_GLOBAL else own).update(_extension(member.kind, data))
                continue
            if shared or own:
                member = _extended(member, shared | own)
                own = {}
            _check_numbers(member)
            if member.kind == FILE:
                self._content, self._unread = member.size, member.size + -member.size % _BLOCK
            yield member

    def content(self) -> Iterator[memoryview]:
        """Yield the bytes of the current member in pieces, each valid until the next is asked for."""
        while self._content:
            piece = self._piece(self._content)
            self._content -= len(piece)
            self._unread -= len(piece)
            yield piece

    def finish(self) -> Digest | None:
        """Read to the end of the source and return the digest of everything it held: a layer's diff id."""
        self._start = self._end
        while self._fill():
            pass
        return Digest(self._hash.hexdigest()) if self._hash is not None else None

    def _skip(self) -> None:
        while self._unread:
            self._unread -= len(self._piece(self._unread))
        self._content = 0

    def _piece(self, limit: int) -> memoryview:
        if self._start == self._end and not self._fill():
            raise TarError("the tar is cut short")
        start = self._start
        self._start = min(self._end, start + limit)
        return self._buffer[start : self._start]

    def _exactly(self, size: int) -> bytes:
        if self._end - self._start >= size:  # nearly always
            return bytes(self._piece(size)) if size else b""
        data = bytearray()
        while len(data) < size:
            data += self._piece(size - len(data))
        return bytes(data)

    def _fill(self) -> bool:
        self._buffer = memoryview(next(self._source, b""))
        self._start, self._end = 0, len(self._buffer)
        if self._hash is not None:
            self._hash.update(self._buffer)
        return self._end > 0


def _parse(header: bytes) -> Member:
    field, mode, uid, gid, size, mtime, checksum, kind, link, magic, prefix = _HEADER.unpack(header)
    try:
        stated = int(checksum.rstrip(b"\0 ") or b"0", 8)
    except ValueError as error:
        raise TarError("a header of the tar is damaged") from error
    if sum(header) - sum(checksum) + 8 * 0x20 != stated:
        raise TarError("a header of the tar is damaged, or this is no tar")
    name = _text(field)
    if kind == b"\0" and name.endswith("/") and magic[:5] != b"ustar":  # how a directory stood before 1988
        kind = DIRECTORY
    if magic == b"ustar\0" and prefix[0]:
        name = f"{_text(prefix)}/{name}"
    return Member(
        name,
        _OTHER_NAMES.get(kind, kind),
        _number(mode) & 0o7777,
        _number(uid),
        _number(gid),
        _number(size),
        _number(mtime) * 1_000_000_000,
        _text(link) if link[0] else "",
    )


def _check_numbers(member: Member) -> None:
    """Raise TarError for numbers that the kernel would not take, or that would lead the reader astray."""
    ids = 0 <= member.uid < 1 << 32 and 0 <= member.gid < 1 << 32
    if not ids or member.size < 0 or not -(1 << 63) <= member.mtime < 1 << 63:
        raise TarError(f"`{member.name}` has an impossible size, owner or time")


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """Read a number in octal digits, or in GNU's base 256 (first bit set), as large and negative ones are written."""
    try:
        if field[0] >= 0x80:
            return int.from_bytes(field[1:], "big", signed=field[0] == 0xFF)
        if field[-1] == 0 and field[:-1].isdigit():  # nearly always
            return int(field[:-1], 8)
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError as error:
        raise TarError("a number in a header of the tar is damaged") from error


def _extension(kind: bytes, data: bytes) -> dict[str, str]:
    if kind == _LONG_NAME:
        return {"path": _text(data)}
    if kind == _LONG_LINK:
        return {"linkpath": _text(data)}
    records: dict[str, str] = {}
    while data:  # "<length of the record> <keyword>=<value>\n"
        digits, _, _ = data.partition(b" ")
        if not digits.isdigit() or not len(digits) + 3 <= int(digits) <= len(data):
            raise TarError("an extended header of the tar is damaged")
        keyword, _, value = data[len(digits) + 1 : int(digits) - 1].partition(b"=")
        records[keyword.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        data = data[int(digits) :]
    return records


def _extended(member: Member, records: dict[str, str]) -> Member:
    """Return the member with what its extended headers say instead. Extended attributes are passed over."""
    name = records.get("path", member.name)
    if member.kind == b"S" or any(keyword.startswith("GNU.sparse.") for keyword in records):
        raise TarError(f"`{name}` is a sparse file, which cannot be read")
    try:
        whole, _, fraction = records.get("mtime", "").partition(".")
        return Member(
            name=name,
            kind=member.kind,
            mode=member.mode,
            uid=int(records.get("uid", member.uid)),
            gid=int(records.get("gid", member.gid)),
            size=int(records.get("size", member.size)),
            mtime=int(whole) * 1_000_000_000 + int(fraction[:9].ljust(9, "0")) if whole else member.mtime,
            link=records.get("linkpath", member.link),
        )
    except ValueError as error:
        raise TarError(f"an extended header of `{name}` holds a number that is none") from error
