"""How a tar becomes a layer's blob: in gzip members (the default), as zstd, or as it is."""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import TYPE_CHECKING, BinaryIO, Protocol

import zstandard

from envbuilder.oci import gzip
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import LAYER_GZIP, LAYER_TAR, LAYER_ZSTD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envbuilder.oci.content import Content, Deflated

#: Our own data is cut into gzip members of this many bytes.
MEMBER = 1 << 20
_GATHER = 1 << 17
_ZSTD_LEVEL = 3


class Compression(Enum):
    """How layers are compressed. The value is the recipe's word for it."""

    #: What wheels have deflated is copied, the rest is deflated; lazily pullable; every engine reads it.
    GZIP = "gzip"
    #: Everything is inflated and compressed anew: smaller, slower to make, not read by Docker before 23.
    ZSTD = "zstd"
    #: Nothing is compressed: for registries on fast networks, and for measuring.
    NONE = "none"

    @property
    def revision(self) -> str:
        """Enters layer keys: whatever changes the bytes must change this."""
        zstd = f"zstandard {zstandard.__version__} level {_ZSTD_LEVEL}"
        return {"gzip": f"estargz 2, {gzip.REVISION}", "zstd": zstd, "none": "none"}[self.value]


class Blob(Protocol):
    """Takes the bytes of a tar in order and writes the blob."""

    media_type: str

    def write(self, data: bytes) -> None:
        """Take tar bytes that are not compressed yet."""

    def begin(self) -> int:
        """Let what comes next begin where a reader can start, and return its offset in the blob."""

    def whole(self, data: bytes) -> int:
        """Take tar bytes that a reader can read alone and at once, and return their offset in the blob."""

    def copy(self, content: Deflated) -> Iterator[bytes]:
        """Take the bytes of a deflated file, and yield them inflated, in pieces; consume all of it."""

    def finish(self, footer: bytes = b"") -> tuple[Digest, int]:
        """End the blob, with ``footer`` as it is behind it; return digest and size."""


class Sum:
    """A SHA-256 and the size of bytes that come in many small pieces; they also go to ``out`` when there is one.

    Small pieces are gathered: hashing and writing give up the interpreter lock, and getting it back costs more than
    they do.
    """

    def __init__(self, out: BinaryIO | None = None) -> None:
        self._out = out
        self._sha256 = hashlib.sha256()
        self._gathered = bytearray()
        self.size = 0

    def put(self, data: bytes) -> None:
        """Take some bytes."""
        self.size += len(data)
        if len(data) < _GATHER:
            self._gathered += data
            if len(self._gathered) < _GATHER:
                return
            data = b""
        self._flush()
        if data:
            self._take(data)

    def digest(self) -> Digest:
        """Return the digest of all that came; with this, all is written."""
        self._flush()
        return Digest(self._sha256.hexdigest())

    def _flush(self) -> None:
        if self._gathered:
            self._take(self._gathered)
            self._gathered = bytearray()

    def _take(self, data: bytes | bytearray) -> None:
        self._sha256.update(data)
        if self._out is not None:
            self._out.write(data)


class GzipBlob:
    """Concatenated gzip members: deflate streams that exist are wrapped, everything else is deflated by us."""

    media_type = LAYER_GZIP

    def __init__(self, out: BinaryIO) -> None:
        self._sink = Sum(out)
        self._literal = bytearray()

    def write(self, data: bytes) -> None:
        """Gather the bytes for a member of our own."""
        self._literal += data
        while len(self._literal) >= MEMBER:
            self._sink.put(gzip.member(bytes(self._literal[:MEMBER])))
            del self._literal[:MEMBER]

    def begin(self) -> int:
        """End the member of our own, so that another begins."""
        if self._literal:
            self._sink.put(gzip.member(self._literal))
            self._literal.clear()
        return self._sink.size

    def whole(self, data: bytes) -> int:
        """Write the bytes as one member, however many they are: readers of a table of contents do not go on."""
        offset = self.begin()
        self._sink.put(gzip.member(data))
        return offset

    def copy(self, content: Deflated) -> Iterator[bytes]:
        """Wrap the deflate stream as it is."""
        self.begin()
        self._sink.put(gzip.HEADER)
        for raw, inflated in content.pairs():
            self._sink.put(raw)
            yield from inflated
        self._sink.put(gzip.trailer(content.crc32, content.size))

    def finish(self, footer: bytes = b"") -> tuple[Digest, int]:
        """End the last member."""
        self.begin()
        self._sink.put(footer)
        return self._sink.digest(), self._sink.size


class TarBlob:
    """The tar as it is."""

    media_type = LAYER_TAR

    def __init__(self, out: BinaryIO) -> None:
        self._sink = Sum(out)

    def write(self, data: bytes) -> None:
        """Write the bytes."""
        self._sink.put(data)

    def begin(self) -> int:
        """Return the offset, and end nothing."""
        return self._sink.size

    def whole(self, data: bytes) -> int:
        """Write the bytes."""
        offset = self.begin()
        self.write(data)
        return offset

    def copy(self, content: Content) -> Iterator[bytes]:
        """Inflate."""
        for data in content.chunks():
            self.write(data)
            yield data

    def finish(self, footer: bytes = b"") -> tuple[Digest, int]:
        """End the blob."""
        self._sink.put(footer)
        return self._sink.digest(), self._sink.size


class ZstdBlob(TarBlob):
    """One zstd frame (RFC 8878), by one thread: more would make the bytes depend on their number.

    It is read from its beginning: where something begins in it, no reader can start.
    """

    media_type = LAYER_ZSTD

    def __init__(self, out: BinaryIO) -> None:
        super().__init__(out)
        self._compressor = zstandard.ZstdCompressor(
            level=_ZSTD_LEVEL, threads=0, write_content_size=False
        ).compressobj()

    def write(self, data: bytes) -> None:
        """Compress the bytes."""
        self._sink.put(self._compressor.compress(data))

    def finish(self, footer: bytes = b"") -> tuple[Digest, int]:
        """End the frame."""
        self._sink.put(self._compressor.flush())
        return super().finish(footer)


def new_blob(out: BinaryIO, compression: Compression) -> Blob:
    """Return a blob of this compression that is written to ``out``."""
    blobs: dict[Compression, type[GzipBlob | TarBlob]] = {
        Compression.GZIP: GzipBlob,
        Compression.ZSTD: ZstdBlob,
        Compression.NONE: TarBlob,
    }
    return blobs[compression](out)
