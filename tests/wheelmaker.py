"""Make wheels and source archives in memory, good ones and malicious ones, without any packaging tool.

The same arguments give the same bytes. ``make_wheel`` writes a correct RECORD unless told otherwise; ``Member`` gives
raw access to the ZIP for names such as ``../evil``, symbolic links, and names that occur twice.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
import stat
import tarfile
import warnings
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.oci.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

_DATE = (2024, 5, 17, 12, 30, 14)


@dataclass(frozen=True)
class Made:
    """A wheel or source archive: its file name, its bytes, its core metadata."""

    file: str
    data: bytes
    metadata: bytes

    @property
    def digest(self) -> Digest:
        return Digest.of(self.data)

    @property
    def size(self) -> int:
        return len(self.data)

    def write(self, folder: Path) -> Path:
        """Write it into a folder, made when absent, and return the file's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file
        path.write_bytes(self.data)
        return path


@dataclass(frozen=True)
class Member:
    """A ZIP member exactly as it is to be written. ``mode`` is that of stat, with the type of file in it."""

    name: str
    data: bytes = b""
    mode: int = stat.S_IFREG | 0o644
    compression: int = zipfile.ZIP_DEFLATED

    @classmethod
    def symlink(cls, name: str, target: str) -> Member:
        return cls(name, target.encode(), stat.S_IFLNK | 0o777, zipfile.ZIP_STORED)


def make_wheel(
    name: str,
    version: str = "1.0",
    *,
    files: Mapping[str, str | bytes] | None = None,
    requires: Sequence[str] = (),
    requires_python: str | None = None,
    extras: Sequence[str] = (),
    entry_points: str | Mapping[str, str] | None = None,
    scripts: Mapping[str, str | bytes] | None = None,
    data: Mapping[str, str | bytes] | None = None,
    executable: Collection[str] = (),
    tag: str = "py3-none-any",
    build: str | None = None,
    purelib: bool | None = None,
    metadata: str | bytes | None = None,
    record: str | None = None,
    extra_members: Sequence[Member] = (),
    compression: int = zipfile.ZIP_DEFLATED,
) -> Made:
    """Make a wheel.

    Args:
        name: as the project spells it; the file name is made of it.
        version: as it stands in the metadata.
        files: path below the root of the wheel -> content; one module named like the project when None.
        requires: Requires-Dist lines.
        requires_python: the Requires-Python specifier.
        extras: Provides-Extra names.
        entry_points: the text of entry_points.txt, or console scripts (``{"cmd": "pkg:main"}``).
        scripts: files of ``.data/scripts``; name -> content. They are executable.
        data: files below ``.data``, ``{"data/share/man/x.1": ..., "headers/x.h": ...}``.
        executable: which of ``files`` and ``data`` have the executable bits.
        tag: python-abi-platform; compressed sets (``py2.py3-none-any``) are expanded in WHEEL.
        build: build number.
        purelib: Root-Is-Purelib; by default whether the platform is ``any``.
        metadata: replaces METADATA as a whole.
        record: replaces RECORD as a whole.
        extra_members: written after all others, not in RECORD.
        compression: of all members but the extra ones.

    """
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{re.sub(r'-', '_', version)}"
    info, datadir = f"{stem}.dist-info", f"{stem}.data"
    module = re.sub(r"[-_.]+", "_", name).lower()
    contents = {f"{module}.py": f"name = {name!r}\n"} if files is None else files
    core = _bytes(metadata) if metadata is not None else _metadata(name, version, requires, requires_python, extras)
    members = [Member(path, _bytes(text), _mode(path in executable), compression) for path, text in contents.items()]
    for path, text in (data or {}).items():
        members.append(Member(f"{datadir}/{path}", _bytes(text), _mode(path in executable), compression))
    for path, text in (scripts or {}).items():
        members.append(Member(f"{datadir}/scripts/{path}", _bytes(text), _mode(True), compression))
    members.append(Member(f"{info}/METADATA", core, _mode(False), compression))
    wheel = _wheel(tag, build, ("any" in tag.rsplit("-", 1)[-1]) if purelib is None else purelib)
    members.append(Member(f"{info}/WHEEL", wheel, _mode(False), compression))
    if entry_points is not None:
        members.append(Member(f"{info}/entry_points.txt", _entry_points(entry_points), _mode(False), compression))
    lines = _record(members, info) if record is None else record.encode()
    members.append(Member(f"{info}/RECORD", lines, _mode(False), compression))
    file = f"{stem}-{build}-{tag}.whl" if build else f"{stem}-{tag}.whl"
    return Made(file, make_zip([*members, *extra_members]), core)


def make_sdist(
    name: str,
    version: str = "1.0",
    *,
    files: Mapping[str, str | bytes] | None = None,
    requires: Sequence[str] = (),
    requires_python: str | None = None,
    root: str | None = None,
) -> Made:
    """Make a ``.tar.gz`` source archive. ``files`` should hold pyproject.toml (see ``BACKEND``); PKG-INFO is added."""
    top = root or f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}"
    core = _metadata(name, version, requires, requires_python, ())
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, text in {"PKG-INFO": core, **(files or {})}.items():
            entry = tarfile.TarInfo(f"{top}/{path}")
            entry.size, entry.mtime, entry.mode = len(_bytes(text)), 1_700_000_000, 0o644
            tar.addfile(entry, io.BytesIO(_bytes(text)))
    file = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}.tar.gz"
    return Made(file, gzip.compress(out.getvalue(), mtime=0), core)


def make_zip(members: Sequence[Member]) -> bytes:
    """Write members as they are, with a fixed date, in the order given."""
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as archive:
        warnings.simplefilter("ignore")  # zipfile warns of names that occur twice
        for member in members:
            entry = zipfile.ZipInfo(member.name, _DATE)
            entry.filename = member.name  # ZipInfo would have cut the name at a NUL
            entry.external_attr = member.mode << 16
            entry.create_system = 3
            archive.writestr(entry, member.data, member.compression)
    return out.getvalue()


def record_hash(data: bytes) -> str:
    """Return ``sha256=<base64>`` as RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _mode(executable: bool) -> int:  # noqa: FBT001
    return stat.S_IFREG | (0o755 if executable else 0o644)


def _metadata(
    name: str, version: str, requires: Sequence[str], requires_python: str | None, extras: Sequence[str]
) -> bytes:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Summary: made by a test"]
    lines += [f"Requires-Python: {requires_python}"] if requires_python else []
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    return ("\n".join(lines) + "\n").encode()


def _wheel(tag: str, build: str | None, purelib: bool) -> bytes:  # noqa: FBT001
    pythons, abis, platforms = tag.split("-")
    lines = ["Wheel-Version: 1.0", "Generator: wheelmaker", f"Root-Is-Purelib: {str(purelib).lower()}"]
    lines += [f"Tag: {p}-{a}-{s}" for p in pythons.split(".") for a in abis.split(".") for s in platforms.split(".")]
    lines += [f"Build: {build}"] if build else []
    return ("\n".join(lines) + "\n").encode()


def _entry_points(value: str | Mapping[str, str]) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return ("[console_scripts]\n" + "".join(f"{name} = {target}\n" for name, target in value.items())).encode()


def _record(members: Sequence[Member], info: str) -> bytes:
    def quoted(path: str) -> str:
        return f'"{path}"' if "," in path else path

    lines = [f"{quoted(member.name)},{record_hash(member.data)},{len(member.data)}" for member in members]
    return ("\n".join([*lines, f"{info}/RECORD,,"]) + "\n").encode()


#: A build backend that needs nothing but the standard library: files of a source archive that builds offline.
#: It packs the folder ``src`` and writes what ``BUILD_NOTE`` of the environment says into ``<module>/note.txt``.
BACKEND = {
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "backend.py": """\
import os, pathlib, re, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    info = pathlib.Path("PKG-INFO").read_text()
    name = re.search("^Name: (.*)$", info, re.M)[1]
    version = re.search("^Version: (.*)$", info, re.M)[1]
    stem = re.sub("[-_.]+", "_", name).lower() + "-" + version
    file = stem + "-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / file, "w") as archive:
        names = []
        def write(path, text):
            archive.writestr(path, text)
            names.append(path + ",,")
        for path in sorted(pathlib.Path("src").rglob("*.py")):
            write(str(path.relative_to("src")), path.read_text())
        module = re.sub("[-_.]+", "_", name).lower()
        write(module + "/note.txt", os.environ.get("BUILD_NOTE", ""))
        write(stem + ".dist-info/METADATA", info)
        write(stem + ".dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        write(stem + ".dist-info/RECORD", "\\n".join([*names, stem + ".dist-info/RECORD,,"]) + "\\n")
    return file
""",
}
