"""A wheel as a source for pypa/installer whose members can be copied as the deflate streams they are.

Follows the binary distribution format specification (PEP 427) and APPNOTE for ZIP. What could leave the prefix or
mislead is refused by name: absolute paths, ``..``, symbolic links, duplicates, encrypted members.
"""

from __future__ import annotations

import io
import posixpath
import stat
import struct
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, BinaryIO, cast

from installer.records import parse_record_file
from installer.sources import WheelSource
from packaging.utils import canonicalize_name, parse_wheel_filename

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.content import CHUNK, Content, CorruptContentError, Deflated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LOCAL_HEADER = struct.Struct("<4s22xHH")


class WheelError(EnvbuilderError):
    """A wheel that cannot be installed as it is: ``wheel`` is its file name, ``member`` the offending name."""

    def __init__(self, wheel: str, reason: str, *, member: str | None = None) -> None:
        where = f"{wheel}: member {member!r}" if member is not None else wheel
        super().__init__(f"{where} {reason}", hint="the wheel is refused; report it to the package's maintainers")
        self.wheel = wheel
        self.member = member


class MemberStream(io.RawIOBase):
    """A member's bytes as a stream, as installer wants it, with the content and RECORD row for those who know."""

    def __init__(self, content: Content, record: tuple[str, str, str]) -> None:
        self.content = content
        self.record = record
        self._whole: io.BytesIO | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move as files do."""
        return self._buffer().seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any writable buffer
        """Fill a buffer. Only small members are read this way: scripts whose first line changes."""
        return self._buffer().readinto(buffer)

    def _buffer(self) -> io.BytesIO:
        if self._whole is None:
            self._whole = io.BytesIO(b"".join(self.content.chunks()))
        return self._whole


class WheelArchive(WheelSource):
    """A wheel file at ``path`` whose name is ``name`` (in the store, blobs have no names). See ``open_wheel``."""

    def __init__(self, archive: zipfile.ZipFile, file: BinaryIO, name: str) -> None:
        distribution, version, _, _ = parse_wheel_filename(name)
        super().__init__(distribution=str(distribution), version=str(version))
        self.name = name
        self._zip = archive
        self._file = file
        self._members = {info.filename: info for info in self._checked_members()}

    @cached_property
    def dist_info_dir(self) -> str:
        """Name of the one .dist-info folder."""
        found = sorted({n.split("/")[0] for n in self._members if n.split("/")[0].endswith(".dist-info")})
        if len(found) != 1:
            raise WheelError(self.name, f"has {len(found)} .dist-info folders instead of one")
        if canonicalize_name(found[0].removesuffix(".dist-info").rsplit("-", 1)[0]) != self.distribution:
            raise WheelError(self.name, f"holds {found[0]}, which is another package")
        return found[0]

    @property
    def data_dir(self) -> str:
        """Name of the .data folder, spelled as the .dist-info folder is."""
        return self.dist_info_dir.removesuffix(".dist-info") + ".data"

    @property
    def dist_info_filenames(self) -> list[str]:
        """Names of the files in the .dist-info folder, relative to it."""
        start = self.dist_info_dir + "/"
        return [name.removeprefix(start) for name in self._members if name.startswith(start)]

    def read_dist_info(self, filename: str) -> str:
        """Return a text file of the .dist-info folder."""
        path = posixpath.join(self.dist_info_dir, filename)
        if path not in self._members:
            raise WheelError(self.name, f"has no {path}")
        try:
            return b"".join(self._content(self._members[path]).chunks()).decode()
        except UnicodeDecodeError as error:
            raise WheelError(self.name, "is not UTF-8", member=path) from error

    def validate_record(self) -> None:
        """Do nothing: the whole file was verified against the lock's hash when it came into the store."""

    def get_contents(self) -> Iterator[tuple[tuple[str, str, str], BinaryIO, bool]]:
        """Yield each file's RECORD row, stream and executable bit, in the archive's order.

        Bytecode that a wheel brings along is passed over, as installer does: it may not be that of its source.
        """
        rows = {row[0]: row for row in parse_record_file(self.read_dist_info("RECORD").splitlines())}
        for name, info in self._members.items():
            if "__pycache__" in name.split("/")[:-1]:
                continue
            record = rows.get(name, (name, "", ""))
            mode = info.external_attr >> 16
            stream = cast("BinaryIO", MemberStream(self._content(info), record))
            yield record, stream, bool(stat.S_ISREG(mode) and mode & 0o111)

    def _checked_members(self) -> Iterator[zipfile.ZipInfo]:
        seen: set[str] = set()
        for info in self._zip.infolist():
            name = info.filename
            if name.endswith("/"):
                continue
            if name.startswith(("/", "..")) or posixpath.normpath(name) != name or "\\" in name:
                raise WheelError(self.name, "leaves the installation prefix", member=name)
            if any(ord(character) < 32 for character in name):
                raise WheelError(self.name, "has a control character in its name", member=name)
            if stat.S_ISLNK(info.external_attr >> 16):
                raise WheelError(self.name, "is a symbolic link", member=name)
            if info.flag_bits & 0x1:
                raise WheelError(self.name, "is encrypted", member=name)
            if name in seen:
                raise WheelError(self.name, "is there twice", member=name)
            seen.add(name)
            yield info

    def _content(self, info: zipfile.ZipInfo) -> Content:
        if info.compress_type == zipfile.ZIP_DEFLATED:
            where = f"{self.name}: {info.filename}"
            return Deflated(where, info.file_size, info.CRC, lambda: self._raw(info))
        return _ZipContent(self._zip, info, self.name)

    def _raw(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        """Yield a member's compressed bytes. Its data begins after the local header, whose name and extra may differ."""
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) != _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
            raise CorruptContentError(f"{self.name}: {info.filename}: has no local header")
        _, name_size, extra_size = _LOCAL_HEADER.unpack(header)
        position = info.header_offset + _LOCAL_HEADER.size + name_size + extra_size
        left = info.compress_size
        while left:
            # Positioned anew each time: another member may be read between two pieces.
            self._file.seek(position)
            data = self._file.read(min(left, CHUNK))
            if not data:
                raise CorruptContentError(f"{self.name}: {info.filename}: the archive ends too early")
            position += len(data)
            left -= len(data)
            yield data


@dataclass(frozen=True)
class _ZipContent:
    """A member that is not deflated: stored, or compressed in a way gzip does not know."""

    archive: zipfile.ZipFile
    info: zipfile.ZipInfo
    wheel: str

    @property
    def size(self) -> int:
        return self.info.file_size

    def chunks(self) -> Iterator[bytes]:
        seen = 0
        try:
            with self.archive.open(self.info) as stream:
                while data := stream.read(CHUNK):
                    seen += len(data)
                    yield data
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise CorruptContentError(f"{self.wheel}: {self.info.filename}: {error}") from error
        if seen != self.size:
            raise CorruptContentError(f"{self.wheel}: {self.info.filename}: has {seen} bytes instead of {self.size}")


@contextmanager
def open_wheel(path: Path, name: str) -> Iterator[WheelArchive]:
    """Open the wheel ``name`` that lies at ``path``.

    Raises:
        WheelError: it is no ZIP archive, or holds a member that is refused.

    """
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile as error:
            raise WheelError(name, f"is not a ZIP archive: {error}") from error
        with archive, path.open("rb") as raw:
            yield WheelArchive(archive, raw, name)
