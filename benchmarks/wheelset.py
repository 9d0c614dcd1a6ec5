"""The wheels that are measured with: the closure of some packages in a committed lock, and one of them changed."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import zipfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuilder.oci.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from envbuilder.lock.model import Lock, Package


@dataclass(frozen=True)
class Size:
    """A size of the benchmark: the packages whose closure is built, and the import that is timed."""

    name: str
    packages: tuple[str, ...]
    statement: str


SIZES = {
    "small": Size("small", ("mlflow-skinny", "numpy", "pandas"), "import numpy, pandas, mlflow"),
    "full": Size("full", ("torch", "mlflow"), "import torch"),
}


def closure(lock: Lock, roots: Sequence[str]) -> tuple[Package, ...]:
    """Return the packages that ``roots`` need, themselves included, sorted by name; extras are followed.

    Raises:
        KeyError: a root is not in the lock.

    """
    variables = {
        "python_version": lock.target.python, "python_full_version": f"{lock.target.python}.0",
        "implementation_name": "cpython", "platform_python_implementation": "CPython", "os_name": "posix",
        "sys_platform": "linux", "platform_system": "Linux", "platform_machine": lock.target.architecture,
    }  # fmt: skip
    found: set[tuple[str, str]] = set()
    waiting = [(lock.by_name[root].name, "") for root in roots]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found or name not in lock.by_name:  # not in the lock: for another platform
            continue
        found.add((name, extra))
        for text in lock.by_name[name].requires:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(variables | {"extra": extra}):
                waiting += [(canonicalize_name(requirement.name), more) for more in ("", *requirement.extras)]
    return tuple(lock.by_name[name] for name in sorted({name for name, _ in found}))


def smallest_group_member(packages: Sequence[Package], alone: int) -> Package:
    """Return the package to change: the median by size of those that share a layer (smaller than ``alone`` bytes)."""
    small = sorted((p for p in packages if p.size < alone and p.build is None), key=lambda p: (p.size, p.name))
    return small[len(small) // 2]


def changed(package: Package, wheel: Path, target: Path) -> Package:
    """Write the wheel to ``target`` with one more line in one module, and return the package it then is.

    The name stays, as if it had been built anew; RECORD fits. Everything is stored as deflate at zlib's default level.
    """
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        infos = [info for info in source.infolist() if not info.is_dir()]
        touched = min(info.filename for info in infos if info.filename.endswith(".py"))
        data = source.read(touched) + b"\n# Changed by the benchmark.\n"
        for info in infos:
            content = data if info.filename == touched else source.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                content = record_with(content, touched, data)
            entry = replace_info(info)
            out.writestr(entry, content)
    return replace(package, digest=Digest.of_file(target), size=target.stat().st_size)


def replace_info(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """Return the head of a member that is written anew: name, date and mode stay."""
    entry = zipfile.ZipInfo(info.filename, info.date_time)
    entry.external_attr, entry.compress_type = info.external_attr, zipfile.ZIP_DEFLATED
    return entry


def record_with(record: bytes, path: str, data: bytes) -> bytes:
    """Return a RECORD in which the row of ``path`` states the digest and size of ``data``."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in csv.reader(io.StringIO(record.decode())):
        writer.writerow([path, f"sha256={digest}", len(data)] if row and row[0] == path else row)
    return out.getvalue().encode()


def link(source: Path, target: Path) -> None:
    """Make ``target`` the same file by hard link, or a copy where that is not possible."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
