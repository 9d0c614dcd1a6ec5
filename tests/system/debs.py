"""Make Debian packages and an archive of them, by hand and small."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envbuilder.system.apt import Host, architecture

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Thing:
    """One member of a data.tar: text is a file, None a directory; ``link`` makes a link of it."""

    path: str
    text: str | bytes | None = None
    mode: int | None = None
    link: str = ""
    hard: bool = False
    owner: tuple[int, int] = (0, 0)

    def write(self, archive: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(f"./{self.path}")
        info.uid, info.gid = self.owner
        data = self.text.encode() if isinstance(self.text, str) else self.text
        if self.link:
            info.type, info.linkname = (tarfile.LNKTYPE if self.hard else tarfile.SYMTYPE), self.link
        elif data is None:
            info.type = tarfile.DIRTYPE
        info.mode = self.mode if self.mode is not None else 0o755 if data is None else 0o644
        info.size = len(data or b"") if not self.link else 0
        archive.addfile(info, io.BytesIO(data or b""))


@dataclass(frozen=True)
class Deb:
    """A package to make."""

    name: str
    version: str = "1.0-1"
    things: Sequence[Thing] = ()
    fields: dict[str, str] = field(default_factory=dict)
    control: dict[str, str] = field(default_factory=dict)
    compression: str = "xz"

    @property
    def paragraph(self) -> str:
        own = {"Package": self.name, "Version": self.version, "Architecture": architecture(), "Maintainer": "A <a@b>"}
        own |= {"Description": f"{self.name} for tests\n  .\n  Made by hand."}
        return "".join(f"{key}: {value}\n" for key, value in (own | self.fields).items())

    @property
    def data(self) -> bytes:
        control = [Thing(name, text) for name, text in {"control": self.paragraph, **self.control}.items()]
        members = {
            "debian-binary": b"2.0\n",
            "control.tar.gz": gzip.compress(_tar(control), mtime=0),
            **dict([_compressed(_tar([Thing(""), *self.things]), self.compression)]),
        }
        return b"!<arch>\n" + b"".join(_member(name, data) for name, data in members.items())

    @property
    def file(self) -> str:
        return f"{self.name}_{self.version.replace(':', '%3a')}_{architecture()}.deb"

    def write(self, folder: Path) -> Path:
        path = folder / self.file
        path.write_bytes(self.data)
        return path


def make_archive(root: Path, suite: str, debs: Sequence[Deb], *, origin: str = "Debian", codename: str = "") -> str:
    """Write (or replace) an archive with one suite below ``root``; return its one-line source."""
    (root / "pool").mkdir(parents=True, exist_ok=True)
    for old in (root / "pool").iterdir():
        old.unlink()
    paragraphs = []
    for deb in debs:
        path = deb.write(root / "pool")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        where = f"Filename: pool/{path.name}\nSize: {path.stat().st_size}\nSHA256: {digest}\n"
        paragraphs.append(deb.paragraph + where)
    packages = "\n".join(paragraphs).encode()
    listed = f"main/binary-{architecture()}/Packages"
    (root / "dists" / suite / listed).parent.mkdir(parents=True, exist_ok=True)
    (root / "dists" / suite / listed).write_bytes(packages)
    (root / "dists" / suite / "Release").write_text(
        f"Origin: {origin}\nLabel: {origin}\nSuite: stable\nCodename: {codename or suite}\n"
        f"Architectures: {architecture()}\nComponents: main\nDate: Mon, 01 Jan 2024 00:00:00 UTC\n"
        f"SHA256:\n {hashlib.sha256(packages).hexdigest()} {len(packages)} {listed}\n"
    )
    return f"deb [trusted=yes] copy:{root} {suite} main\n"


def make_host(folder: Path, sources: str, codename: str = "duck") -> Host:
    """Return a machine whose apt has these sources, in one-line format."""
    etc = folder / "etc"
    etc.mkdir(exist_ok=True)
    (etc / "sources.list").write_text(sources)
    (folder / "os-release").write_text(f'ID=debian\nVERSION_CODENAME="{codename}"\n')
    return Host(etc, folder / "os-release")


def _tar(things: Sequence[Thing]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for thing in things:
            thing.write(archive)
    return buffer.getvalue()


def _compressed(data: bytes, how: str) -> tuple[str, bytes]:
    match how:
        case "xz":
            return "data.tar.xz", lzma.compress(data, preset=0)
        case "gz":
            return "data.tar.gz", gzip.compress(data, mtime=0)
        case "none":
            return "data.tar", data
        case _:
            return f"data.tar.{how}", data


def _member(name: str, data: bytes) -> bytes:
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode()
    return header + data + b"\n" * (len(data) % 2)
