"""Choose which files of an installed Python go into an image, and which shared libraries they need beside glibc's."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder import report
from envbuilder.errors import HostError
from envbuilder.run import run
from envbuilder.system.elf import MAGIC, Elf, read_elf

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: What is taken, relative to the prefix; {minor} is 3.12. Patterns as of a shell, except that * matches / too.
TAKEN = (
    "bin/python{minor}",
    "bin/python{minor}-config",
    "include/python{minor}/*",
    "lib/libpython{minor}*.so*",
    "lib/libpython3.so",
    "lib/pkgconfig/python-{minor}*.pc",
    "lib/pkgconfig/python3*.pc",
    "lib/python{minor}/*",
)
#: What of it is left out: packages, tests, what needs a screen (Tk), bytecode (made anew), static libraries.
DROPPED = (
    "*/__pycache__/*",
    "lib/python{minor}/site-packages/*",
    "lib/python{minor}/dist-packages/*",
    "lib/python{minor}/test/*",
    "lib/python{minor}/*/test/*",
    "lib/python{minor}/*/tests/*",
    "lib/python{minor}/idlelib/*",
    "lib/python{minor}/tkinter/*",
    "lib/python{minor}/turtledemo/*",
    "lib/python{minor}/turtle.py",
    "lib/python{minor}/lib-dynload/_tkinter.*",
    "lib/python{minor}/lib-dynload/_test*",
    "lib/python{minor}/lib-dynload/_ctypes_test.*",
    "lib/python{minor}/lib-dynload/_xxtestfuzz.*",
    "lib/python{minor}/lib-dynload/xx*",
    "lib/python{minor}/lib-dynload/nis.*",  # NIS: deprecated, gone in 3.13, and brings Kerberos along
    "lib/python{minor}/config-{minor}*/*.a",
    "lib/python{minor}/config-{minor}*/*.o",
)
LINKS = {
    "bin/python3": "python{minor}",
    "bin/python": "python3",
    "bin/python3-config": "python{minor}-config",
    "bin/python-config": "python3-config",
}
#: What a base always holds: glibc with its loader, and the run-time libraries of gcc. The first must not be carried
#: along (program and library are made for each other), the second must not be there twice in one process.
SYSTEM_LIBRARIES = re.compile(
    r"(linux-vdso|linux-gate|ld-linux.*|libc|libm|libmvec|libpthread|libdl|librt|libutil|libresolv|libanl|libnsl"
    r"|libthread_db|libBrokenLocale|libnss_.*|libgcc_s|libstdc\+\+)\.so(\.\d+)*"
)
_LDD = re.compile(r"\s+(?P<name>\S+) => (?P<path>/\S+|not found)")


@dataclass(frozen=True)
class Picked:
    """One file to take: its path relative to the prefix, and where its bytes are; ``elf`` if it is such a file."""

    path: str
    source: Path
    elf: Elf | None


def pick(prefix: Path, minor: str) -> tuple[list[Picked], dict[str, str]]:
    """Return the files to take, sorted, and the links among them (path → target)."""
    files: list[Picked] = []
    links: dict[str, str] = {}
    paths = sorted(path for path in _walk(prefix, minor) if _is_taken(path, minor))
    known = set(paths)
    for path in paths:
        source = prefix / path
        target = str(source.readlink()) if source.is_symlink() else ""
        if target and "/" not in target and f"{path.rpartition('/')[0]}/{target}" in known:
            links[path] = target
        elif source.is_file():
            files.append(Picked(path, source.resolve(), _elf(source)))
    for path, form in LINKS.items():
        target = form.format(minor=minor)
        if f"bin/{target}" in known or f"bin/{target}" in links:
            links[path] = target
    return files, links


def carried(files: Iterable[Picked], prefix: Path) -> list[Picked]:
    """Return the shared libraries of this machine that the files need and a base may lack, as files of ``lib/``.

    They are the ones that the loader takes on this machine, with what they need in turn.
    """
    dynamic = [file for file in files if file.elf is not None and file.elf.needed]
    if not dynamic:
        return []
    there = {file.path.rpartition("/")[2] for file in dynamic} | {f.elf.soname for f in dynamic if f.elf}
    found: dict[str, Path] = {}
    for name, path in _loaded(run(["ldd", *(file.source for file in dynamic)]).stdout):
        if SYSTEM_LIBRARIES.fullmatch(name) or name in there:
            continue
        if path is None:
            report.detail(f"{prefix}: needs {name}, which is not on this machine; the module that does will not load")
        else:
            found[name] = path
    return [Picked(f"lib/{name}", path.resolve(), _elf(path)) for name, path in sorted(found.items())]


def check_glibc(files: Iterable[Picked], glibc: str) -> None:
    """Raise HostError when a file needs a newer glibc than the base's, ``2.36``."""
    have = tuple(int(word) for word in glibc.split(".")[:2])
    for file in files:
        if file.elf is not None and file.elf.glibc > have:
            need = ".".join(map(str, file.elf.glibc))
            raise HostError(
                f"{file.source} needs glibc {need}, and the base has {glibc}",
                hint="take a base of this machine's release or a newer one, or an interpreter built on an older system",
            )


def _walk(prefix: Path, minor: str) -> Iterator[str]:
    for top in ("bin", f"include/python{minor}", "lib"):
        for folder, names, files in os.walk(prefix / top):
            relative = Path(folder).relative_to(prefix).as_posix()
            if relative == "lib":
                names[:] = [name for name in names if name in {"pkgconfig", f"python{minor}"}]
            # A folder all of whose files are left out need not be looked into.
            names[:] = [n for n in names if not _matches(f"{relative}/{n}/.", DROPPED, minor)]
            yield from (f"{relative}/{name}" for name in files)


def _is_taken(path: str, minor: str) -> bool:
    return _matches(path, TAKEN, minor) and not _matches(path, DROPPED, minor)


def _matches(path: str, patterns: Iterable[str], minor: str) -> bool:
    return any(fnmatchcase(path, pattern.format(minor=minor)) for pattern in patterns)


def _elf(path: Path) -> Elf | None:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
    return read_elf(path.read_bytes(), str(path))


def _loaded(output: str) -> Iterator[tuple[str, Path | None]]:
    for line in output.splitlines():
        if match := _LDD.match(line):
            yield match["name"], None if match["path"] == "not found" else Path(match["path"])
