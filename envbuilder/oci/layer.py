"""Write a layer: a deterministic tar in gzip members, with both digests computed while it is written.

Owner, mode, time and order are fixed by the caller's entries and the rules here, never by the machine. Files that are
deflated already are copied, not compressed again: the gzip member around them needs only their size and CRC-32.
"""

from __future__ import annotations

import hashlib
import posixpath
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from envbuilder import parallel
from envbuilder.errors import EnvbuilderError
from envbuilder.oci import gzip
from envbuilder.oci.content import Deflated
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import Layer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from envbuilder.oci.content import Content

#: 1980-01-01T00:00:00Z: ZIP, which Python users pack site-packages into, knows no earlier time.
MTIME = 315532800
#: Enters layer keys: whatever changes the bytes must change this.
REVISION = f"tar 1, {gzip.REVISION}"
_BLOCK = tarfile.BLOCKSIZE
_LITERAL = 1 << 20  # our own data is cut into gzip members of this many bytes


class LayerError(EnvbuilderError):
    """An entry cannot stand in a layer: a bad path, or a path that is there already."""


@dataclass(frozen=True)
class Directory:
    """A directory; parents that were not given are made with mode 0755, owned by root."""

    path: str
    mode: int = 0o755
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class File:
    """A regular file."""

    path: str
    content: Content
    mode: int = 0o644
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class Symlink:
    """A symbolic link; ``target`` is stored as it is."""

    path: str
    target: str


@dataclass(frozen=True)
class Hardlink:
    """A hard link to the regular file ``target``, a path of the same layer that came before."""

    path: str
    target: str


Entry: TypeAlias = Directory | File | Symlink | Hardlink


class LayerWriter:
    """Writes entries to ``out`` in the order given. Paths are relative to the root, ``usr/bin/env``."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._compressed = hashlib.sha256()
        self._tar = hashlib.sha256()
        self._size = 0
        self._tar_size = 0
        self._literal = bytearray()
        self._paths: dict[str, bool] = {}  # path -> is a directory

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def add(self, entry: Entry) -> None:
        """Write one entry, and before it the parents that are missing.

        A directory that is there already is passed over.

        Raises:
            LayerError: the path is absolute, leaves the root, is taken, or lies below something that is no directory.
            CorruptContentError: the content is not what it states.

        """
        parallel.checkpoint()
        path = _checked(entry.path)
        if isinstance(entry, Directory) and self._paths.get(path):
            return
        if path in self._paths:
            raise LayerError(f"`{path}` would be in the layer twice")
        self._add_parents(path)
        self._paths[path] = isinstance(entry, Directory)
        match entry:
            case File(content=content):
                self._put_literal(_header(path, tarfile.REGTYPE, entry, size=content.size))
                self._put_content(content)
            case Directory():
                self._put_literal(_header(path + "/", tarfile.DIRTYPE, entry))
            case Symlink(target=target):
                self._put_literal(_header(path, tarfile.SYMTYPE, entry, link=target))
            case Hardlink(target=target):
                if self._paths.get(_checked(target)) is not False:
                    raise LayerError(f"`{path}` is a hard link to `{target}`, which did not come before it")
                self._put_literal(_header(path, tarfile.LNKTYPE, entry, link=_checked(target)))

    def finish(self) -> Layer:
        """Write the end of the tar and return what the layer is. The caller closes and keeps ``out``."""
        self._put_literal(bytes(2 * _BLOCK))
        self._flush_literal()
        return Layer(
            Digest(self._compressed.hexdigest()), self._size, Digest(self._tar.hexdigest()), self._tar_size,
        )  # fmt: skip

    def _add_parents(self, path: str) -> None:
        parts = path.split("/")[:-1]
        for count in range(1, len(parts) + 1):
            parent = "/".join(parts[:count])
            if parent not in self._paths:
                self._paths[parent] = True
                self._put_literal(_header(parent + "/", tarfile.DIRTYPE, Directory(parent)))
            elif not self._paths[parent]:
                raise LayerError(f"`{path}` lies below `{parent}`, which is not a directory")

    def _put_content(self, content: Content) -> None:
        if isinstance(content, Deflated) and content.size > 0:
            self._flush_literal()
            self._write(gzip.HEADER)
            for raw, inflated in content.pairs():
                parallel.checkpoint()
                self._write(raw)
                for piece in inflated:
                    self._tar.update(piece)
            self._write(gzip.trailer(content.crc32, content.size))
            self._tar_size += content.size
        else:
            for piece in content.chunks():
                parallel.checkpoint()
                self._put_literal(piece)
        self._put_literal(bytes(-content.size % _BLOCK))

    def _put_literal(self, data: bytes) -> None:
        self._tar.update(data)
        self._tar_size += len(data)
        self._literal += data
        while len(self._literal) >= _LITERAL:
            self._write(gzip.member(bytes(self._literal[:_LITERAL])))
            del self._literal[:_LITERAL]

    def _flush_literal(self) -> None:
        if self._literal:
            self._write(gzip.member(bytes(self._literal)))
            self._literal.clear()

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._compressed.update(data)
        self._size += len(data)


def write_layer(entries: Iterable[Entry], out: BinaryIO) -> Layer:
    """Write all entries as one layer to ``out``; see ``LayerWriter``."""
    writer = LayerWriter(out)
    for entry in entries:
        writer.add(entry)
    return writer.finish()


def _checked(path: str) -> str:
    if not path or path.startswith("/") or posixpath.normpath(path) != path or path.partition("/")[0] == "..":
        raise LayerError(f"`{path}` is not a plain path below the root")
    if "\0" in path or path == ".":
        raise LayerError(f"{path!r} is not a plain path below the root")
    return path


def _header(path: str, kind: bytes, entry: Entry, *, size: int = 0, link: str = "") -> bytes:
    info = tarfile.TarInfo(path)
    info.type, info.size, info.linkname, info.mtime = kind, size, link, MTIME
    info.mode = 0o777 if isinstance(entry, Symlink) else 0o644
    if isinstance(entry, (File, Directory)):
        info.mode, info.uid, info.gid = entry.mode, entry.uid, entry.gid
    try:
        # The plain form of POSIX 1988 where it fits: a third of the size of an extended header.
        return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    except (ValueError, UnicodeEncodeError):
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
