"""Wheels -> layer: the layout of pypa/installer, written straight into a layer, never onto a file system."""

from __future__ import annotations

import base64
import hashlib
import posixpath
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import installer
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError
from installer.records import Hash, InvalidRecordEntry, RecordEntry
from installer.scripts import Script
from installer.utils import Scheme, construct_record_file, fix_shebang

from envbuilder import report
from envbuilder.oci.blob import Compression
from envbuilder.oci.content import Bytes, Deflated
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import File, LayerError, LayerWriter
from envbuilder.wheels.archive import MemberStream, WheelArchive, WheelError, open_wheel
from envbuilder.wheels.bytecode import SourceCompiler

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from installer.scripts import ScriptSection

    from envbuilder.oci.content import Content
    from envbuilder.oci.model import Layer
    from envbuilder.wheels.key import InstallPrefix, WheelFile

#: Gives a compiler for the sources of the wheel with this digest (``bytecode.BytecodeCache.of``).
BytecodeOf: TypeAlias = Callable[[Digest], AbstractContextManager[SourceCompiler]]


#: A compiler takes hundreds of bytes of memory for each byte of source. The largest real one known is below this.
_LARGEST_SOURCE = 4 << 20


def write_wheels(
    wheels: Sequence[WheelFile],
    prefix: InstallPrefix,
    bytecode_of: BytecodeOf | None,
    out: BinaryIO,
    compression: Compression = Compression.GZIP,
) -> Layer:
    """Install wheels, in the order given, into one layer written to ``out``.

    Where several hold one path, the file of the last stays, as when they are installed one after another, and as an
    image's upper layers cover lower ones. A layer cannot take back what was written, so the last is written first.

    ``bytecode_of`` gives a compiler for the sources of a wheel; without it the layer holds no bytecode.

    Raises:
        WheelError: a wheel is malformed, or holds a path that is refused.
        CorruptContentError: a member is damaged.

    """
    writer = LayerWriter(out, compression)
    owners: dict[str, tuple[str, Digest]] = {}
    for wheel in reversed(wheels):
        compiling = bytecode_of(wheel.digest) if bytecode_of is not None else nullcontext()
        with open_wheel(wheel.path, wheel.name) as source, compiling as compiler:
            try:
                installer.install(
                    source, _Destination(writer, owners, source, prefix, compiler), {"INSTALLER": b"envbuilder\n"}
                )
            except (InstallerError, InvalidRecordEntry, LayerError, ValueError) as error:
                raise WheelError(wheel.name, f"cannot be installed: {error}") from error
    return writer.finish()


class _Destination(WheelDestination):
    """Takes what installer installs and writes it as entries of a layer."""

    def __init__(
        self,
        writer: LayerWriter,
        owners: dict[str, tuple[str, Digest]],
        source: WheelArchive,
        prefix: InstallPrefix,
        compiler: SourceCompiler | None,
    ) -> None:
        self._owners = owners  # path -> the wheel it came from and its digest; shared by the wheels of a layer
        self._writer = writer
        self._source = source
        self._interpreter = prefix.interpreter
        self._scheme = prefix.scheme(source.distribution)
        self._compiler = compiler
        self._compiling: deque[tuple[str, Future[bytes]]] = deque()
        self._covered: set[str] = set()  # paths that a later wheel has with other bytes

    def write_script(self, name: str, module: str, attr: str, section: ScriptSection) -> RecordEntry:
        """Write the launcher of an entry point."""
        file_name, data = Script(name, module, attr, section).generate(self._interpreter, "posix")
        return self._write("scripts", file_name, Bytes(data), executable=True)

    def write_file(
        self, scheme: Scheme, path: str | os.PathLike[str], stream: BinaryIO, is_executable: bool  # noqa: FBT001
    ) -> RecordEntry:  # fmt: skip
        """Write one file; scripts for Python get the image's interpreter, sources are sent off to be compiled."""
        name = str(path)
        if scheme == "scripts":
            if isinstance(stream, MemberStream):
                if not _begins(stream.content, b"#!python"):  # a program, perhaps of many megabytes
                    return self._write(scheme, name, stream.content, executable=True, check=stream.check)
                stream.check(_digest(stream.content))
            with fix_shebang(stream, self._interpreter) as fixed:
                return self._write(scheme, name, Bytes(fixed.read()), executable=True)
        if not isinstance(stream, MemberStream):
            return self._write(scheme, name, Bytes(stream.read()), executable=is_executable)
        compiled = name.endswith(".py") and scheme in {"purelib", "platlib"} and stream.content.size <= _LARGEST_SOURCE
        content = stream.content
        if self._compiler is not None and compiled:
            # Inflated once: to be compiled and to be hashed.
            content = content.loaded() if isinstance(content, Deflated) else Bytes(b"".join(content.chunks()))
            self._compiling.append((name, self._compiler.submit(f"/{self._scheme[scheme]}/{name}", content.data)))
        return self._write(scheme, name, content, executable=is_executable, check=stream.check)

    def finalize_installation(
        self, scheme: Scheme, record_file_path: str, records: Iterable[tuple[Scheme, RecordEntry]]
    ) -> None:
        """Write bytecode, then RECORD."""
        rows = [*records, *((scheme, entry) for entry in self._write_bytecode(scheme))]
        # RECORD names itself last; what installer gave as last is that row.
        own = next(row for row in rows if row[1].path == record_file_path)
        rows = [*(row for row in rows if row is not own), own]

        def prefix_for(file_scheme: str) -> str | None:
            if self._scheme[file_scheme] == self._scheme[scheme]:
                return None
            return posixpath.relpath(self._scheme[file_scheme], self._scheme[scheme]) + "/"

        with construct_record_file(rows, prefix_for) as stream:
            data = stream.read()
        self._writer.add(File(f"{self._scheme[scheme]}/{record_file_path}", Bytes(data)))

    def _write_bytecode(self, scheme: Scheme) -> Iterable[RecordEntry]:
        tag = "cpython-" + self._tag
        while self._compiling:  # emptied on the way: the bytecode of one wheel can have 50 MB
            name, future = self._compiling.popleft()
            data = future.result()
            if f"{self._scheme[scheme]}/{name}" in self._covered:
                continue
            if data:
                folder, file = posixpath.split(name)
                path = posixpath.join(folder, "__pycache__", f"{file.removesuffix('.py')}.{tag}.pyc")
                yield self._write(scheme, path, Bytes(data), executable=False)
            else:
                report.detail(f"{self._source.name}: {name} is not valid Python and gets no bytecode")

    @property
    def _tag(self) -> str:
        return self._scheme["purelib"].split("/lib/python")[-1].split("/")[0].replace(".", "")

    def _write(
        self,
        scheme: str,
        name: str,
        content: Content,
        *,
        executable: bool,
        check: Callable[[Digest], None] = lambda _: None,
    ) -> RecordEntry:
        path = f"{self._scheme[scheme]}/{name}"
        if (owner := self._owners.get(path)) is not None:
            # Mostly equal: the __init__ of a namespace.
            digest = _digest(content)
            if digest != owner[1]:
                self._covered.add(path)
                report.warning(f"{self._source.name} and {owner[0]} both hold {name}; that of the latter is taken")
        else:
            digest = self._writer.add(File(path, content, 0o755 if executable else 0o644)) or _digest(content)
            self._owners[path] = (self._source.name, digest)
        check(digest)
        return RecordEntry(name, _hash(digest), content.size)


def _begins(content: Content, start: bytes) -> bool:
    found = b""
    for chunk in content.chunks():
        found += chunk[: len(start)]
        if len(found) >= len(start):
            break
    return found.startswith(start)


def _digest(content: Content) -> Digest:
    sha256 = hashlib.sha256()
    for chunk in content.chunks():
        sha256.update(chunk)
    return Digest(sha256.hexdigest())


def _hash(digest: Digest) -> Hash:
    """Return a digest as RECORD writes it (PEP 376): base64 for URLs, without padding."""
    return Hash("sha256", base64.urlsafe_b64encode(bytes.fromhex(digest.hex)).decode().rstrip("="))
