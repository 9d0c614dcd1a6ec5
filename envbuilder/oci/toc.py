"""The table of contents of a layer in eStargz's form, by which snapshotters pull single files lazily.

Written here for them; read here for the places at which inflating can begin (``store.inflate``).

Follows the eStargz specification of the stargz-snapshotter project. The table is the layer's last file,
``stargz.index.json``; a footer of 51 bytes says where it begins; the layer's descriptor carries its digest.
"""

from __future__ import annotations

import datetime as dt
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isal import igzip, igzip_lib

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.tarheader import DIRECTORY, HARDLINK, MTIME, REGULAR, SYMLINK
from envbuilder.oci.untar import TarError, TarStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.oci.digest import Digest

NAME = "stargz.index.json"
#: A file that says: nothing here is worth fetching ahead. One of two landmarks is required; it holds the bits 0xf.
LANDMARK = ".no.prefetch.landmark"
LANDMARK_CONTENT = b"\x0f"
#: Bytes of the footer, the last of the blob.
FOOTER_SIZE = 51
#: A larger table is not read: it would be of a layer with more than a quarter of a million members.
LARGEST = 64 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode
_TYPES = {DIRECTORY: "dir", REGULAR: "reg", SYMLINK: "symlink", HARDLINK: "hardlink"}
_MODTIME = dt.datetime.fromtimestamp(MTIME, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class TocError(EnvbuilderError):
    """A blob has no table of contents, or none that can be read."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a file: where its gzip member begins in the blob, its size and digest uncompressed."""

    offset: int
    size: int
    digest: Digest


class TableOfContents:
    """Collects the entries of one layer, in order."""

    def __init__(self) -> None:
        # As text: there may be a hundred thousand, and that is a quarter of what they take as objects.
        self._rows: list[str] = []
        self._last: dict[str, Any] | None = None

    def add(self, path: str, kind: bytes, *, mode: int, uid: int, gid: int, link: str) -> None:
        """Add an entry; ``path`` as it stands in the tar."""
        entry: dict[str, Any] = {"name": path, "type": _TYPES[kind], "modtime": _MODTIME, "mode": mode}
        entry |= {"uid": uid, "gid": gid}
        if link:
            entry["linkName"] = link
        self._append(entry)

    def describe(self, size: int, digest: Digest, chunks: Sequence[Chunk]) -> None:
        """Say of the file added last how large it is, its digest, and where its pieces lie; an empty one has none."""
        entry = self._last
        if entry is None:
            raise ValueError("no file was added")
        entry["digest"] = str(digest)
        if not size:
            return
        entry["size"] = size
        position = 0
        for number, chunk in enumerate(chunks):
            row = entry if number == 0 else {"name": entry["name"], "type": "chunk", "chunkOffset": position}
            row |= {"offset": chunk.offset, "chunkDigest": str(chunk.digest)}
            # The last piece goes to the end of the file, and says so by not saying its size.
            if number < len(chunks) - 1:
                row["chunkSize"] = chunk.size
            if number:
                self._append(row)
            position += chunk.size

    def to_bytes(self) -> bytes:
        """Return the JSON document."""
        self._append(None)
        return f'{{"version":1,"entries":[{",".join(self._rows)}]}}'.encode()

    def _append(self, entry: dict[str, Any] | None) -> None:
        if self._last is not None:
            self._rows.append(_encode(self._last))
        self._last = entry


def footer(offset: int) -> bytes:
    """Return the footer: an empty gzip member whose extra field says where the table's member begins in the blob."""
    extra = b"SG" + (22).to_bytes(2, "little") + b"%016xSTARGZ" % offset
    head = b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff" + len(extra).to_bytes(2, "little")
    return head + extra + b"\x01\x00\x00\xff\xff" + bytes(8)


def table_start(tail: bytes) -> int | None:
    """Return where the table's member begins in a blob, given the blob's last bytes; None when it has no footer.

    The number is as it stands there: it may lie anywhere.
    """
    foot = tail[-FOOTER_SIZE:]
    try:
        offset = int(foot[16:32], 16)
    except ValueError:
        return None
    return offset if foot == footer(offset) else None


def read_table(members: bytes) -> bytes:
    """Return the JSON document, given the blob's bytes from where the table's member begins to the blob's end.

    Raises:
        TocError: there is none, it is damaged, or larger than ``LARGEST``.

    """
    try:
        data = igzip.IGzipFile(fileobj=io.BytesIO(members), mode="rb").read(LARGEST)  # type: ignore[no-untyped-call]
        stream = TarStream([data])
        for member in stream.members():
            if member.name == NAME:
                return b"".join(stream.content())
    except (igzip.BadGzipFile, igzip_lib.IsalError, EOFError) as error:  # type: ignore[misc]  # as in oci.content
        raise TocError(f"the table of contents is not valid gzip: {error}") from error
    except TarError as error:
        raise TocError(f"the table of contents cannot be read: {error.message}") from error
    raise TocError(f"there is no `{NAME}` where the table of contents should be")


def places(table: bytes) -> list[int]:
    """Return where in the blob files and pieces of files begin, as the JSON document states it, unsorted.

    Raises:
        TocError: it is not JSON.

    """
    found: list[int] = []

    def note(row: dict[str, object]) -> None:
        offset = row.get("offset")
        if type(offset) is int:
            found.append(offset)

    try:
        json.loads(table, object_hook=note)
    except (ValueError, RecursionError) as error:
        raise TocError(f"the table of contents is not JSON: {error}") from error
    return found
