"""The table of contents of a layer in eStargz's form, by which snapshotters pull single files lazily.

Follows the eStargz specification of the stargz-snapshotter project. The table is the layer's last file,
``stargz.index.json``; a footer of 51 bytes says where it begins; the layer's descriptor carries its digest.
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envbuilder.oci.tarheader import DIRECTORY, HARDLINK, MTIME, REGULAR, SYMLINK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.oci.digest import Digest

NAME = "stargz.index.json"
#: A file that says: nothing here is worth fetching ahead. One of two landmarks is required; it holds the bits 0xf.
LANDMARK = ".no.prefetch.landmark"
LANDMARK_CONTENT = b"\x0f"
_TYPES = {DIRECTORY: "dir", REGULAR: "reg", SYMLINK: "symlink", HARDLINK: "hardlink"}
_MODTIME = dt.datetime.fromtimestamp(MTIME, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Chunk:
    """A piece of a file: where its gzip member begins in the blob, its size and digest uncompressed."""

    offset: int
    size: int
    digest: Digest


class TableOfContents:
    """Collects the entries of one layer, in order."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []

    def add(self, path: str, kind: bytes, *, mode: int, uid: int, gid: int, link: str) -> None:
        """Add an entry; ``path`` as it stands in the tar."""
        entry: dict[str, Any] = {"name": path, "type": _TYPES[kind], "modtime": _MODTIME, "mode": mode}
        entry |= {"uid": uid, "gid": gid}
        if link:
            entry["linkName"] = link
        self._entries.append(entry)

    def describe(self, size: int, digest: Digest, chunks: Sequence[Chunk]) -> None:
        """Say of the file added last how large it is, its digest, and where its pieces lie; an empty one has none."""
        entry = self._entries[-1]
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
                self._entries.append(row)
            position += chunk.size

    def to_bytes(self) -> bytes:
        """Return the JSON document."""
        return json.dumps({"version": 1, "entries": self._entries}, separators=(",", ":")).encode()


def footer(offset: int) -> bytes:
    """Return the footer: an empty gzip member whose extra field says where the table's member begins in the blob."""
    extra = b"SG" + (22).to_bytes(2, "little") + b"%016xSTARGZ" % offset
    head = b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff" + len(extra).to_bytes(2, "little")
    return head + extra + b"\x01\x00\x00\xff\xff" + bytes(8)
