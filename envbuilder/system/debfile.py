"""Read Debian's binary packages (deb(5)): an ar archive of ``debian-binary``, ``control.tar.*`` and ``data.tar.*``."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import subprocess
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

from envbuilder.errors import EnvbuilderError
from envbuilder.run import find

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_MAGIC = b"!<arch>\n"
_HEADER = 60
_BUFFER = 1 << 20


class DebError(EnvbuilderError):
    """A file that should be a Debian package is not one, or holds what a layer cannot."""


@dataclass(frozen=True)
class Control:
    """What ``control.tar`` holds: the fields of the control file in their order, verbatim, and the other files."""

    fields: Mapping[str, str]
    files: Mapping[str, bytes]


def read_control(deb: Path) -> Control:
    """Return the control information of a package; raise DebError when it is no package."""
    files: dict[str, bytes] = {}
    with _open_tar(deb, "control.tar") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                files[member.name.removeprefix("./")] = file.read()
    if "control" not in files:
        raise DebError(f"{deb}: has no control file")
    return Control(parse_fields(files.pop("control").decode(errors="surrogateescape")), files)


@contextmanager
def open_data(deb: Path) -> Iterator[tarfile.TarFile]:
    """Open the package's files as a tar that can be read once, from its beginning to its end.

    Raises:
        DebError: it is no package, or is damaged; reading inside the block may raise it too.

    """
    with _open_tar(deb, "data.tar") as archive:
        yield archive


def parse_fields(text: str) -> dict[str, str]:
    """Return the fields of one paragraph of a control file (deb822(5)); continuation lines keep their indentation."""
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line[:1] in {" ", "\t"} and name:
            fields[name] += "\n" + line.rstrip()
        elif ":" in line:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


class _Range(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__()
        self._file = file
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


@contextmanager
def _open_tar(deb: Path, stem: str) -> Iterator[tarfile.TarFile]:
    with deb.open("rb") as file:
        name, size = _seek(file, deb, stem)
        member = io.BufferedReader(_Range(file, size), _BUFFER)
        try:
            with (
                _decompressed(deb, member, name) as plain,
                tarfile.open(fileobj=plain, mode="r|", bufsize=_BUFFER) as archive,
            ):
                yield archive
        except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DebError(f"{deb}: `{name}` is damaged: {error}") from error


def _seek(file: IO[bytes], deb: Path, stem: str) -> tuple[str, int]:
    """Move to the member that is ``stem`` plus a compression's suffix; return its name and size."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise DebError(f"{deb}: is not a Debian package")
    while len(header := file.read(_HEADER)) == _HEADER:
        name = header[:16].decode("ascii", "replace").strip().removesuffix("/")
        try:
            size = int(header[48:58])
        except ValueError as error:
            raise DebError(f"{deb}: has a damaged ar header") from error
        if name == stem or name.startswith(stem + "."):
            return name, size
        file.seek(size + size % 2, os.SEEK_CUR)
    raise DebError(f"{deb}: has no {stem}")


@contextmanager
def _decompressed(deb: Path, member: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    match name.rpartition(".")[2]:
        case "tar":
            yield member
        case "gz":
            yield cast("IO[bytes]", gzip.GzipFile(fileobj=member))
        case "xz" | "lzma":
            with lzma.LZMAFile(member) as file:
                yield file
        case "bz2":
            with bz2.BZ2File(member) as file:
                yield file
        case "zst":
            with _from_dpkg(deb, name) as pipe:
                yield pipe
        case other:
            raise DebError(f"{deb}: is compressed with {other}, which is not known")


@contextmanager
def _from_dpkg(deb: Path, name: str) -> Iterator[IO[bytes]]:
    """Let dpkg-deb decompress: Python reads no zstd yet, and where zstd packages come from, dpkg reads it."""
    flag = "--fsys-tarfile" if name.startswith("data") else "--ctrl-tarfile"
    argv = [str(find("dpkg-deb", hint="it comes with the package dpkg")), flag, str(deb)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        output, errors = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stderr)
        try:
            yield output
            output.read()  # the padding after the end of the tar: dpkg-deb must not die of a closed pipe
        finally:
            output.close()
            message = errors.read().decode(errors="replace").strip()
        if process.wait() != 0:
            raise DebError(f"{deb}: dpkg-deb cannot read it: {message}")
