"""Turn one Debian package into layer entries whose bytes lie in a spool: one file, compressed ahead where it pays.

Packages are unpacked side by side in threads (decompressing and compressing release the interpreter lock). What the
writer of the layer is left with is copying.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import deflate

from envbuilder import parallel
from envbuilder.oci import gzip, layer
from envbuilder.oci.content import CHUNK, Bytes, Content, CorruptContentError, Deflated
from envbuilder.system.debfile import Control, DebError, open_data, read_control

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Smaller files compress better together with their neighbours, larger ones must not be held in memory whole.
#: Both bounds decide what the bytes of a layer are: changing them calls for a new revision.
ALONE = (64 << 10, 32 << 20)


@dataclass(frozen=True)
class Slice:
    """Content that lies somewhere in a file."""

    path: Path
    offset: int
    size: int

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes; raise CorruptContentError when the file has become too short."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            left = self.size
            while left:
                data = file.read(min(CHUNK, left))
                if not data:
                    raise CorruptContentError(f"{self.path}: ends before byte {self.offset + self.size}")
                left -= len(data)
                yield data


@dataclass(frozen=True)
class Part:
    """One package: its control information and its entries, with the paths that its archive gives them."""

    name: str
    control: Control
    entries: tuple[layer.Entry, ...]


def unpack(deb: Path, spool: Path, keep: Callable[[str], bool], *, ahead: bool = True) -> Part:
    """Read a package once and return the part of it whose paths ``keep`` accepts; bytes go to the new file ``spool``.

    Owners, modes and links are those of the archive. Bytes are compressed ``ahead`` for gzip layers, which copy them.

    Raises:
        DebError: it is no package, or holds a device or a fifo.

    """
    control = read_control(deb)
    entries: list[layer.Entry] = []
    with spool.open("xb") as out, open_data(deb) as archive:
        for info in archive:
            path = info.name.removeprefix("./").rstrip("/")
            if path not in {"", "."} and keep(path):
                entries.append(_entry(deb, path, info, archive, _Spool(spool, out, ahead)))
    return Part(control.fields.get("Package", deb.stem), control, tuple(entries))


@dataclass(frozen=True)
class _Spool:
    """A spool being written."""

    path: Path
    out: IO[bytes]
    ahead: bool

    def add(self, name: str, size: int, file: IO[bytes]) -> Content:
        """Append a file's bytes and return them as content to read back."""
        parallel.checkpoint()
        offset = self.out.tell()
        if not size:
            return Bytes(b"")
        if not self.ahead or not ALONE[0] <= size <= ALONE[1]:
            while data := file.read(CHUNK):
                parallel.checkpoint()
                self.out.write(data)
            return Slice(self.path, offset, size)
        data = file.read()
        packed = deflate.deflate_compress(data, gzip.LEVEL)
        self.out.write(packed)
        return Deflated(name, size, deflate.crc32(data), Slice(self.path, offset, len(packed)).chunks)


def _entry(deb: Path, path: str, info: tarfile.TarInfo, archive: tarfile.TarFile, spool: _Spool) -> layer.Entry:
    if info.isdir():
        return layer.Directory(path, info.mode, info.uid, info.gid)
    if info.issym():
        return layer.Symlink(path, info.linkname)
    if info.islnk():
        return layer.Hardlink(path, info.linkname.removeprefix("./").lstrip("/"))
    file = archive.extractfile(info) if info.isreg() else None
    if file is None:
        raise DebError(f"{deb}: `{path}` is a device or a fifo, which a layer made without root cannot hold")
    return layer.File(path, spool.add(path, info.size, file), info.mode, info.uid, info.gid)
