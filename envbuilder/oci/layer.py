"""Write a layer: a deterministic tar in a blob, with both digests computed while it is written.

Owner, mode, time and order are fixed by the caller's entries and the rules here, never by the machine. Files that are
deflated already are copied into gzip layers, not compressed again: the gzip member around them needs only their size
and CRC-32. Gzip layers end with a table of contents (``oci.toc``).
"""

from __future__ import annotations

import hashlib
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from envbuilder import parallel
from envbuilder.errors import EnvbuilderError
from envbuilder.oci.blob import MEMBER, Compression, Sum, new_blob
from envbuilder.oci.content import Bytes, Deflated
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import Layer
from envbuilder.oci.tarheader import BLOCK, DIRECTORY, HARDLINK, REGULAR, SYMLINK, header
from envbuilder.oci.toc import LANDMARK, LANDMARK_CONTENT, NAME, Chunk, TableOfContents, footer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from envbuilder.oci.content import Content

_REVISION = "tar 2"


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


def revision(compression: Compression) -> str:
    """Return what enters the keys of layers: whatever changes the bytes changes this."""
    return f"{_REVISION}, {compression.revision}"


#: That of gzip layers.
REVISION = revision(Compression.GZIP)


class LayerWriter:
    """Writes entries to ``out`` in the order given. Paths are relative to the root, ``usr/bin/env``."""

    def __init__(self, out: BinaryIO, compression: Compression = Compression.GZIP) -> None:
        self._blob = new_blob(out, compression)
        self._tar = Sum()
        self._paths: dict[str, bool] = {}  # path -> is a directory
        self._toc = TableOfContents() if compression is Compression.GZIP else None

    def add(self, entry: Entry) -> Digest | None:
        """Write one entry, and before it the parents that are missing; return the digest of a regular file's bytes.

        A directory that is there already is passed over.

        Raises:
            LayerError: the path is absolute, leaves the root, is taken, or lies below something that is no directory.
            CorruptContentError: the content is not what it states.

        """
        parallel.checkpoint()
        path = _checked(entry.path)
        if path in self._paths:
            if isinstance(entry, Directory) and self._paths[path]:
                return None
            raise LayerError(f"`{path}` would be in the layer twice")
        self._add_parents(path)
        self._paths[path] = isinstance(entry, Directory)
        match entry:
            case File():
                return self._put_file(path, entry)
            case Directory(mode=mode, uid=uid, gid=gid):
                self._put_header(f"{path}/", DIRECTORY, mode=mode, uid=uid, gid=gid)
            case Symlink(target=target):
                self._put_header(path, SYMLINK, mode=0o777, link=target)
            case Hardlink(target=target):
                if self._paths.get(_checked(target)) is not False:
                    raise LayerError(f"`{path}` is a hard link to `{target}`, which did not come before it")
                self._put_header(path, HARDLINK, mode=0o644, link=target)
        return None

    def finish(self) -> Layer:
        """Write the end of the tar and return what the layer is. The caller closes and keeps ``out``."""
        toc_digest, tail = None, bytes(2 * BLOCK)
        if self._toc is not None:
            self.add(File(LANDMARK, Bytes(LANDMARK_CONTENT)))
            table = self._toc.to_bytes()
            toc_digest = Digest.of(table)
            tail = header(NAME, REGULAR, mode=0o644, size=len(table)) + table + bytes(-len(table) % BLOCK) + tail
        self._tar.put(tail)
        offset = self._blob.whole(tail)
        digest, size = self._blob.finish(footer(offset) if toc_digest is not None else b"")
        media_type = self._blob.media_type
        return Layer(digest, size, self._tar.digest(), self._tar.size, media_type, toc_digest)

    def _add_parents(self, path: str) -> None:
        folder = path.rpartition("/")[0]
        if not folder or self._paths.get(folder):
            return
        if folder in self._paths:
            raise LayerError(f"`{path}` lies below `{folder}`, which is not a directory")
        self._add_parents(folder)
        self._paths[folder] = True
        self._put_header(f"{folder}/", DIRECTORY, mode=0o755)

    def _put_file(self, path: str, entry: File) -> Digest:
        content = entry.content
        self._put_header(path, REGULAR, mode=entry.mode, uid=entry.uid, gid=entry.gid, size=content.size)
        if isinstance(content, Deflated) and content.size:
            chunks = [self._put_deflated(content)]
            digest = chunks[0].digest
        else:
            digest, chunks = self._put_literal(content)
        if padding := -content.size % BLOCK:
            self._put(bytes(padding))
        if self._toc is not None:
            self._toc.describe(content.size, digest, chunks)
        return digest

    def _put_deflated(self, content: Deflated) -> Chunk:
        """Write a file whose deflate stream is copied: one piece, however large."""
        offset, own = self._blob.begin(), hashlib.sha256()
        for piece in self._blob.copy(content):
            parallel.checkpoint()
            own.update(piece)
            self._tar.put(piece)
        return Chunk(offset, content.size, Digest(own.hexdigest()))

    def _put_literal(self, content: Content) -> tuple[Digest, list[Chunk]]:
        """Write a file that the blob compresses, in pieces that can be read alone."""
        own, chunks = hashlib.sha256(), []
        for block in _blocks(content):
            parallel.checkpoint()
            offset = self._blob.begin()
            self._blob.write(block)
            self._tar.put(block)
            own.update(block)
            chunks.append(
                Chunk(offset, len(block), Digest.of(block) if content.size > MEMBER else Digest(own.hexdigest()))
            )
        return Digest(own.hexdigest()), chunks

    def _put_header(
        self, path: str, kind: bytes, *, mode: int, uid: int = 0, gid: int = 0, size: int = 0, link: str = ""
    ) -> None:
        self._put(header(path, kind, mode=mode, uid=uid, gid=gid, size=size, link=link))
        if self._toc is not None:
            self._toc.add(path, kind, mode=mode, uid=uid, gid=gid, link=link)

    def _put(self, data: bytes) -> None:
        self._tar.put(data)
        self._blob.write(data)


def write_layer(entries: Iterable[Entry], out: BinaryIO, compression: Compression = Compression.GZIP) -> Layer:
    """Write all entries as one layer to ``out``; see ``LayerWriter``."""
    writer = LayerWriter(out, compression)
    for entry in entries:
        writer.add(entry)
    return writer.finish()


def _blocks(content: Content) -> Iterator[bytes]:
    """Yield a content's bytes in blocks whose sizes depend on its own size alone, not on how they arrive."""
    if 0 < content.size <= MEMBER:
        yield b"".join(content.chunks())
        return
    gathered = bytearray()
    for piece in content.chunks():
        gathered += piece
        while len(gathered) >= MEMBER:
            yield bytes(gathered[:MEMBER])
            del gathered[:MEMBER]
    if gathered:
        yield bytes(gathered)


def _checked(path: str) -> str:
    if not path or path == "." or path.startswith("/") or posixpath.normpath(path) != path:
        raise LayerError(f"`{path}` is not a plain path below the root")
    if path.partition("/")[0] == ".." or "\0" in path or path == NAME:
        raise LayerError(f"{path!r} is not a plain path below the root")
    return path
