"""Layers as other tools write them, and as hostile ones might: plain, as one gzip member, or in parts with a table."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from typing import TYPE_CHECKING

from envbuilder.oci.digest import Digest
from envbuilder.oci.model import LAYER_GZIP, LAYER_TAR, Layer
from envbuilder.oci.toc import NAME, footer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from envbuilder.store.store import Store

TEXT = b"some text\n"
TarMember = tuple[tarfile.TarInfo, bytes]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> TarMember:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    data = TEXT if kind == tarfile.REGTYPE else b""
    info.size = len(data)
    return info, data


def tar_of(members: Iterable[TarMember], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
        end = tar.offset
    return buffer.getvalue()[:end] + bytes(1024)


def put_plain(store: Store, tar: bytes) -> Layer:
    return Layer(store.put(tar), len(tar), Digest.of(tar), len(tar), LAYER_TAR)


def put_gzip(store: Store, tar: bytes) -> Layer:
    blob = gzip.compress(tar, 1)
    return Layer(store.put(blob), len(blob), Digest.of(tar), len(tar), LAYER_GZIP)


def members_of(tar: bytes, step: int = 512) -> tuple[bytes, list[int]]:
    """Return the tar as gzip members of ``step`` bytes each, without its end, and where they begin."""
    blob, places = bytearray(), []
    for start in range(0, len(tar) - 1024, step):
        places.append(len(blob))
        blob += gzip.compress(tar[start : min(start + step, len(tar) - 1024)], 1, mtime=0)
    return bytes(blob), places


def put_parts(store: Store, tar: bytes, places: Iterable[object] | None = None, step: int = 512) -> Layer:
    """Put a layer that can be inflated from any block on, with a table that says so, or names other ``places``."""
    blob, own = members_of(tar, step)
    entries = [
        {"name": f"{n}", "type": "reg", "offset": place} for n, place in enumerate(own if places is None else places)
    ]
    return put_with_table(store, tar, blob, json.dumps({"version": 1, "entries": entries}).encode())


def put_with_table(
    store: Store, tar: bytes, blob: bytes, table: bytes, *, stated: bytes | None = None, start: int | None = None
) -> Layer:
    """Put a layer of some gzip members and a table of contents.

    The manifest has the digest of the table ``stated``, the footer says that it begins at ``start``; both true unless given.
    """
    info = tarfile.TarInfo(NAME)
    info.size = len(table)
    tail = info.tobuf() + table + bytes(-len(table) % 512) + bytes(1024)
    place = len(blob) if start is None else start
    blob += gzip.compress(tail, 1, mtime=0) + footer(place)
    whole = tar[:-1024] + tail
    toc = Digest.of(table if stated is None else stated)
    return Layer(store.put(blob), len(blob), Digest.of(whole), len(whole), LAYER_GZIP, toc)
