"""Where the bytes of a file in a layer come from: memory, a file, or a raw deflate stream inside an archive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from isal import isal_zlib
from isal.igzip_lib import IsalError

from envbuilder.errors import EnvbuilderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHUNK = 1 << 20


class CorruptContentError(EnvbuilderError):
    """The bytes of a file are not what their archive says they are."""


class Content(Protocol):
    """The bytes of one file."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in pieces of at most about a megabyte. May be called more than once."""


@dataclass(frozen=True)
class Bytes:
    """Content that lies in memory."""

    data: bytes

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.data)

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes."""
        for start in range(0, len(self.data), CHUNK):
            yield self.data[start : start + CHUNK]


@dataclass(frozen=True)
class FileBytes:
    """Content that lies in a file of known size."""

    path: Path
    size: int

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes; raise CorruptContentError when its size has changed."""
        seen = 0
        with self.path.open("rb") as file:
            while data := file.read(CHUNK):
                seen += len(data)
                yield data
        if seen != self.size:
            raise CorruptContentError(f"{self.path}: has {seen} bytes instead of {self.size}")


@dataclass(frozen=True)
class Stored:
    """Content that lies in an archive as it is. ``raw`` yields it and may be called more than once; see ``Deflated``."""

    name: str
    size: int
    crc32: int
    raw: Callable[[], Iterator[bytes]]

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes; raise CorruptContentError when size or CRC-32 are not as stated."""
        seen, crc = 0, 0
        for data in self.raw():
            seen += len(data)
            crc = isal_zlib.crc32(data, crc)
            yield data
        if (seen, crc) != (self.size, self.crc32):
            raise CorruptContentError(f"{self.name}: is not the {self.size} bytes with the CRC-32 stated")


@dataclass(frozen=True)
class Deflated:
    """Content that is a raw deflate stream (RFC 1951), as a ZIP member or a gzip member holds it.

    ``raw`` yields the compressed bytes and may be called more than once. ``name`` is for errors.
    """

    name: str
    size: int
    crc32: int
    raw: Callable[[], Iterator[bytes]]

    def chunks(self) -> Iterator[bytes]:
        """Yield the inflated bytes; raise CorruptContentError when size or CRC-32 are not as stated."""
        for _, inflated in self.pairs():
            yield from inflated

    def loaded(self) -> Loaded:
        """Return the same content, held in memory as it is and inflated; raise as ``pairs`` does."""
        raw: list[bytes] = []
        inflated: list[bytes] = []
        for piece, data in self.pairs():
            raw.append(piece)
            inflated += data
        return Loaded(self.name, self.size, self.crc32, lambda: iter(raw), b"".join(inflated))

    def pairs(self) -> Iterator[tuple[bytes, Iterator[bytes]]]:
        """Yield each raw piece with the bytes it inflates to, so that a caller can copy the one and hash the other.

        Every inflated piece must be consumed before the next pair is asked for. Output is bounded by ``CHUNK`` a
        piece whatever the ratio.

        Raises:
            CorruptContentError: the stream is damaged, or size or CRC-32 differ from what is stated.

        """
        inflater = isal_zlib.decompressobj(-15)
        seen, crc = 0, 0

        def inflate(data: bytes) -> Iterator[bytes]:
            nonlocal seen, crc
            # With all input taken, output may still be pending: only no output means that it wants more.
            while not inflater.eof:
                try:
                    piece = inflater.decompress(data, CHUNK)
                except IsalError as error:  # type: ignore[misc]  # the stub forgot its base class
                    raise CorruptContentError(f"{self.name}: is not a valid deflate stream: {error}") from error
                data = inflater.unconsumed_tail
                seen += len(piece)
                crc = isal_zlib.crc32(piece, crc)
                if seen > self.size:
                    raise CorruptContentError(f"{self.name}: inflates to more than the {self.size} bytes stated")
                if not piece and not data:
                    return
                yield piece

        for raw in self.raw():
            if inflater.eof:
                raise CorruptContentError(f"{self.name}: goes on after its deflate stream has ended")
            yield raw, inflate(raw)
        tail = inflater.flush() if not inflater.eof else b""
        if tail or not inflater.eof or inflater.unused_data or seen != self.size or crc != self.crc32:
            raise CorruptContentError(f"{self.name}: does not inflate to the {self.size} bytes with the CRC-32 stated")


@dataclass(frozen=True)
class Loaded(Deflated):
    """A small file that was inflated before, because someone had to read it first: ``data``."""

    data: bytes

    def loaded(self) -> Loaded:
        """Return this."""
        return self

    def pairs(self) -> Iterator[tuple[bytes, Iterator[bytes]]]:
        """Yield the deflate stream with what it inflates to."""
        yield b"".join(self.raw()), iter((self.data,))
