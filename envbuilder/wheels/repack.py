"""Write a wheel anew so that its bytes depend on its files' names, contents and executable bits alone.

Members are sorted with the dist-info folder last (as PEP 427 recommends) and RECORD at the very end, dated 1980,
0644 or 0755, and stored without compression: every compressor gives other bytes, and a layer compresses them anyway.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import stat
import zipfile
from typing import TYPE_CHECKING

from envbuilder import parallel

if TYPE_CHECKING:
    from pathlib import Path

REVISION = "repack 1"
_DATE = (1980, 1, 1, 0, 0, 0)
_UNIX = 3


def repack(wheel: Path, canonical: Path) -> None:
    """Write the canonical form of a wheel to a new file, synced to the disk."""
    with canonical.open("xb") as out:
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
            for info in sorted((i for i in source.infolist() if not i.is_dir()), key=_order):
                parallel.checkpoint()
                _copy(source, info, target)
        out.flush()
        os.fsync(out.fileno())


def _copy(source: zipfile.ZipFile, info: zipfile.ZipInfo, target: zipfile.ZipFile) -> None:
    entry = zipfile.ZipInfo(info.filename, _DATE)
    entry.create_system = _UNIX
    executable = (info.external_attr >> 16) & stat.S_IXUSR
    entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    if info.filename.endswith(".dist-info/RECORD"):
        target.writestr(entry, _sorted_record(source.read(info)))
        return
    entry.file_size = info.file_size  # known beforehand, so that ZIP64 is used only where it must be
    with source.open(info) as reader, target.open(entry, "w") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)


def _order(info: zipfile.ZipInfo) -> tuple[bool, bool, str]:
    folder = info.filename.partition("/")[0]
    return folder.endswith(".dist-info"), info.filename.endswith(".dist-info/RECORD"), info.filename


def _sorted_record(data: bytes) -> bytes:
    rows = sorted(row for row in csv.reader(io.StringIO(data.decode("utf-8"))) if row)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()
