"""A wheel as a source for pypa/installer whose members can be copied as the deflate streams they are.

Follows the binary distribution format specification (PEP 427). What could leave the prefix, mislead, or fill memory is
refused by name before a byte is installed, as far as the archive's directory tells; see ``zipread`` for what is refused
of the ZIP itself.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import posixpath
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from installer.records import InvalidRecordEntry, parse_record_file
from installer.sources import WheelSource
from packaging.utils import InvalidWheelFilename, canonicalize_name, canonicalize_version, parse_wheel_filename

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.content import CHUNK, Content, CorruptContentError, Deflated, Stored
from envbuilder.wheels import entrypoints, places, zipread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from envbuilder.oci.digest import Digest
    from envbuilder.wheels.zipread import Member, Source

_HASHES: Final = {"sha256": 32, "sha384": 48, "sha512": 64}  # what PEP 427 lets RECORD use -> bytes
_READ_WHOLE = {"RECORD", "METADATA"}  # of the .dist-info folder; others that are read are a page of text


@dataclass(frozen=True)
class Limits:
    """How large a wheel may be. All sizes are in bytes.

    ``total`` and ``ratio`` are about bombs. Members cannot overlap and deflate cannot exceed 1032:1, so what a wheel
    inflates to is bounded by its own size, which the lock states, and inflating goes in pieces. A file of zeros reaches
    1032:1 honestly, so members have no ratio of their own. What remains to be refused is a wheel that fills a disk: more
    than ``total``, or more than ``ratio`` times its size once that is over ``floor``. Of 1303 wheels from an index that
    were looked at, the extremes were 18 times and 1.6 GB; the largest wheels of all have 2 to 3 GB.
    """

    total: int = 64 << 30
    ratio: int = 100
    floor: int = 16 << 30
    #: Of members, and of folders' names that they imply.
    members: int = 1 << 18
    #: Of one thing that is read whole: the directory, RECORD, METADATA, a script, a Python source.
    whole: int = 64 << 20
    #: Of WHEEL, entry_points.txt and other pages of text.
    page: int = 1 << 20
    #: Of all Python sources, which wait in memory to be compiled.
    sources: int = 1 << 30


DEFAULT_LIMITS: Final = Limits()


class WheelError(EnvbuilderError):
    """A wheel that cannot be installed as it is: ``wheel`` is its file name, ``member`` the offending name."""

    def __init__(self, wheel: str, reason: str, *, member: str | None = None) -> None:
        where = f"{wheel}: member {member!r}" if member is not None else wheel
        super().__init__(f"{where} {reason}", hint="the wheel is refused; report it to the package's maintainers")
        self.wheel = wheel
        self.member = member


class MemberStream(io.RawIOBase):
    """A member's bytes as a stream, as installer wants it, with the content for those who know.

    ``record`` is its row of RECORD: path, hash, size; both of these may be empty.
    """

    def __init__(self, content: Content, record: tuple[str, str, str], wheel: str, member: Member, most: int) -> None:
        self.content = content
        self.record = record
        self._wheel = wheel
        self._member = member
        self._most = most
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
        """Fill a buffer. Only scripts whose first line changes are read this way; ``Limits.whole`` bounds them."""
        return self._buffer().readinto(buffer)

    def check(self, digest: Digest) -> None:
        """Raise CorruptContentError when RECORD names another hash than that of the bytes, whose sha256 is given."""
        algorithm, _, stated = self.record[1].partition("=")
        if not algorithm:
            return
        found = bytes.fromhex(digest.hex)
        if algorithm != "sha256":
            other = hashlib.new(algorithm)
            for chunk in self.content.chunks():
                other.update(chunk)
            found = other.digest()
        if _digest(algorithm, stated) != found:
            raise CorruptContentError(
                f"{self._wheel}: {self._member.name}: does not have the {algorithm} that RECORD names"
            )

    def _buffer(self) -> io.BytesIO:
        if self._whole is None:
            _refuse_large(self._wheel, self._member, self._most)
            self._whole = io.BytesIO(b"".join(self.content.chunks()))
        return self._whole


class WheelArchive(WheelSource):
    """A wheel whose file name is ``name`` (in the store, blobs have no names). See ``open_wheel``."""

    def __init__(self, source: Source, name: str, limits: Limits = DEFAULT_LIMITS) -> None:
        try:
            distribution, version, _, _ = parse_wheel_filename(name)
        except InvalidWheelFilename as error:
            raise WheelError(name, "does not have a wheel's name") from error
        super().__init__(distribution=str(distribution), version=str(version))
        self.name = name
        self._source = source
        self._limits = limits
        members = zipread.read_members(source, most=limits.members, largest=limits.whole)
        self._refuse_names(members)
        self._members = {member.name: member for member in members if not member.name.endswith("/")}
        self._refuse_sizes()
        #: Files that are not installed.
        self._hidden = self._refuse_places(members) | {f"{self.dist_info_dir}/INSTALLER"}

    @cached_property
    def dist_info_dir(self) -> str:
        """Name of the one .dist-info folder."""
        found = sorted({n.split("/")[0] for n in self._members if n.split("/")[0].endswith(".dist-info")})
        if len(found) != 1:
            raise WheelError(self.name, f"has {len(found)} .dist-info folders instead of one")
        name, _, version = found[0].removesuffix(".dist-info").rpartition("-")
        if canonicalize_name(name) != self.distribution:
            raise WheelError(self.name, f"holds {found[0]}, which is another package")
        if canonicalize_version(version) != canonicalize_version(self.version):
            raise WheelError(self.name, f"holds {found[0]}, which is another version")
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
        most = self._limits.whole if filename in _READ_WHOLE else self._limits.page
        _refuse_large(self.name, self._members[path], most)
        try:
            return b"".join(self._content(self._members[path]).chunks()).decode()
        except UnicodeDecodeError as error:
            raise WheelError(self.name, "is not UTF-8", member=path) from error

    def validate_record(self) -> None:
        """Do nothing: rows are checked as files are given out, and ``MemberStream.check`` compares the hash."""

    def get_contents(self) -> Iterator[tuple[tuple[str, str, str], BinaryIO, bool]]:
        """Yield each file's RECORD row, stream and executable bit, in the archive's order.

        Bytecode that a wheel brings along is passed over, as installer does: it may not be that of its source. So are
        INSTALLER, which who installs writes, and scripts of the names of entry points. Files that RECORD does not name
        are installed, as pip does, and named in the RECORD that is written.
        """
        rows = self._rows()
        for name, member in self._members.items():
            if "__pycache__" in name.split("/")[:-1] or name in self._hidden:
                continue
            record = rows.get(name, (name, "", ""))
            stream = cast(
                "BinaryIO", MemberStream(self._content(member), record, self.name, member, self._limits.whole)
            )
            yield record, stream, bool(stat.S_ISREG(member.mode) and member.mode & 0o111)

    def _rows(self) -> dict[str, tuple[str, str, str]]:
        """Return RECORD's rows (PEP 376) of the members there are, by name."""
        text = self.read_dist_info("RECORD")
        rows = {}
        try:
            for row in parse_record_file(io.StringIO(text, newline="")):
                if member := self._members.get(row[0]):
                    self._refuse_row(member, row)
                    rows[row[0]] = row
        except (csv.Error, InvalidRecordEntry) as error:
            raise WheelError(self.name, f"is malformed: {error}", member=f"{self.dist_info_dir}/RECORD") from error
        return rows

    def _refuse_row(self, member: Member, row: tuple[str, str, str]) -> None:
        _, stated, size = row
        if member.name == f"{self.dist_info_dir}/RECORD":
            return
        algorithm, _, value = stated.partition("=")
        if stated and _digest(algorithm, value) is None:
            raise WheelError(self.name, f"has no hash in RECORD that is accepted: {stated[:80]!r}", member=member.name)
        if size and size != str(member.size):
            reason = f"has {member.size} bytes, not the {size[:20]!r} that RECORD states"
            raise WheelError(self.name, reason, member=member.name)

    def _refuse_names(self, members: Iterable[Member]) -> None:
        seen: set[str] = set()
        for member in members:
            name = member.name
            reason = places.name_refusal(name.removesuffix("/")) or places.type_refusal(name, member.mode)
            if reason is None and name in seen:
                reason = "is there twice"
            if reason is None and name.endswith("/") and (member.size or member.crc32):
                reason = "is a folder that holds bytes"
            if reason is not None:
                raise WheelError(self.name, reason, member=name)
            seen.add(name)

    def _refuse_places(self, members: Iterable[Member]) -> frozenset[str]:
        """Refuse what does not say where it goes, or goes where another member goes or needs a folder.

        Return the names of files that the scripts of entry points take the place of, as pip lets them.
        """
        files = {places.script(name): f"{self.dist_info_dir}/entry_points.txt" for name in self._entry_points()}
        scripts, hidden = frozenset(files), set()
        folders = set(places.FOLDERS)
        room = self._limits.whole
        for member in members:
            place = places.place(member.name, self.data_dir, self.distribution)
            if place is None:
                raise WheelError(self.name, f"does not lie in a known folder of {self.data_dir}", member=member.name)
            if place in scripts:
                hidden.add(member.name)
            elif place in files:
                raise WheelError(self.name, f"lands where {files[place]!r} does", member=member.name)
            elif not place.endswith("/"):
                files[place] = member.name
            while (place := posixpath.dirname(place)) not in folders:
                folders.add(place)
                room -= len(place)
            if room < 0:
                raise WheelError(self.name, "has more folders than are accepted")
        for place in sorted(files.keys() & folders):
            raise WheelError(self.name, "is both a file and a folder", member=files[place])
        return frozenset(hidden)

    def _entry_points(self) -> list[str]:
        """Return the names of the scripts that installer writes for entry points."""
        if "entry_points.txt" not in self.dist_info_filenames:
            return []
        try:
            return entrypoints.script_names(self.read_dist_info("entry_points.txt"))
        except entrypoints.EntryPointError as error:
            raise WheelError(self.name, error.message, member=f"{self.dist_info_dir}/entry_points.txt") from error

    def _refuse_sizes(self) -> None:
        total = sources = 0
        for member in self._members.values():
            total += member.size
            if member.name.endswith(".py"):
                sources += member.size
                _refuse_large(self.name, member, self._limits.whole)
        if total > self._limits.total or total > max(self._limits.floor, self._limits.ratio * self._source.size):
            raise WheelError(self.name, f"inflates from {self._source.size} to {total} bytes, more than is accepted")
        if sources > self._limits.sources:
            raise WheelError(self.name, f"has {sources} bytes of Python sources, more than is accepted")

    def _content(self, member: Member) -> Content:
        kind = Deflated if member.method == zipread.DEFLATED else Stored
        return kind(f"{self.name}: {member.name}", member.size, member.crc32, lambda: self._raw(member))

    def _raw(self, member: Member) -> Iterator[bytes]:
        """Yield a member's bytes as they lie in the archive."""
        end = member.offset + member.packed
        for position in range(member.offset, end, CHUNK):
            yield self._source.read(position, min(CHUNK, end - position))


def _digest(algorithm: str, text: str) -> bytes | None:
    """Return the hash that RECORD states: base64 for URLs, or hexadecimal as some builders write; None when it is none."""
    length = _HASHES.get(algorithm)
    plain = text.rstrip("=")
    try:
        if len(plain) == 2 * (length or 0):
            return bytes.fromhex(plain)
        decoded = base64.b64decode(plain + "=" * (-len(plain) % 4), b"-_", validate=True)
    except ValueError:
        return None
    return decoded if len(decoded) == length else None


@contextmanager
def open_wheel(path: Path, name: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[WheelArchive]:
    """Open the wheel ``name`` that lies at ``path``.

    Raises:
        WheelError: it is no ZIP archive, or one that is refused, or holds a member that is.

    """
    with path.open("rb") as file:
        try:
            archive = WheelArchive(zipread.Source.of(file), name, limits)
        except zipread.ZipError as error:
            raise WheelError(name, error.reason, member=error.member) from error
        yield archive


def _refuse_large(wheel: str, member: Member, most: int) -> None:
    if member.size > most:
        reason = f"has {member.size} bytes, more than the {most} that are accepted of its kind"
        raise WheelError(wheel, reason, member=member.name)
