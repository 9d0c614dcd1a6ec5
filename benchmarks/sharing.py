"""What a store of single files would save: the bytes that two versions of a wheel have in common.

    python -m benchmarks.sharing OLD.whl NEW.whl [OLD.whl NEW.whl ...]

Trees share files only when their layers are the same. This counts the files that two wheels have in common, by size
and CRC-32 as their central directories state them, under the same path and under any path; nothing is inflated. What
is equal is told twice: in bytes inflated, which a host would save on its disk, and in bytes compressed, which it would
not have to pull if layers were pulled file by file.
"""

from __future__ import annotations

import argparse
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class File:
    """A file of a wheel: what tells its content from another's, and what it takes compressed."""

    size: int
    crc32: int
    compressed: int

    @property
    def content(self) -> tuple[int, int]:
        """Equal for equal files, and for different ones about once in four billion."""
        return self.size, self.crc32


@dataclass(frozen=True)
class Shared:
    """What the new wheel of a pair has in common with the old one. Sizes are bytes."""

    old: str
    new: str
    files: int
    size: int
    compressed: int
    same_path: tuple[int, int, int]
    any_path: tuple[int, int, int]


def read(path: Path) -> dict[str, File]:
    """Return the files of a wheel that hold something, by path."""
    with zipfile.ZipFile(path) as wheel:
        infos = wheel.infolist()
    return {info.filename: File(info.file_size, info.CRC, info.compress_size) for info in infos if info.file_size}


def compare(old: Path, new: Path) -> Shared:
    """Compare two wheels."""
    before, after = read(old), read(new)
    contents = {file.content for file in before.values()}
    same = [file for path, file in after.items() if path in before and before[path].content == file.content]
    anywhere = [file for file in after.values() if file.content in contents]
    return Shared(_name(old), _name(new), *_sums(after.values()), _sums(same), _sums(anywhere))


def largest_different(old: Path, new: Path, count: int) -> list[tuple[str, int]]:
    """Return the largest files of the new wheel that the old one has under no path."""
    contents = {file.content for file in read(old).values()}
    sizes = [(path, file.size) for path, file in read(new).items() if file.content not in contents]
    return sorted(sizes, key=lambda row: (-row[1], row[0]))[:count]


def table(rows: Sequence[Shared]) -> str:
    """Return the rows as a table, and their sum."""
    lines = [
        "| old | new | files | MB inflated | equal, same path | equal, any path | MB compressed | equal, any path |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in (*rows, total(rows)):
        cells = [
            f"{row.files}", f"{row.size / 1e6:.1f}", _share(row.same_path[1], row.size),
            _share(row.any_path[1], row.size), f"{row.compressed / 1e6:.1f}", _share(row.any_path[2], row.compressed),
        ]  # fmt: skip
        lines.append(f"| {row.old} | {row.new} | {' | '.join(cells)} |")
    return "\n".join(lines)


def total(rows: Sequence[Shared]) -> Shared:
    """Return the sum of all pairs."""
    same, anywhere = (
        (sum(part[0] for part in parts), sum(part[1] for part in parts), sum(part[2] for part in parts))
        for parts in ([row.same_path for row in rows], [row.any_path for row in rows])
    )
    files, size, compressed = (sum(getattr(row, name) for row in rows) for name in ("files", "size", "compressed"))
    return Shared("all", "", files, size, compressed, same, anywhere)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", metavar="WHEEL", type=Path, nargs="+", help="pairs: an older and a newer one")
    wheels = parser.parse_args().wheels
    if len(wheels) % 2:
        parser.error("wheels come in pairs")
    pairs = list(zip(wheels[::2], wheels[1::2], strict=True))
    print(table([compare(*pair) for pair in pairs]))
    for old, new in pairs:
        different = largest_different(old, new, 3)
        listed = ", ".join(f"`{path}` {size / 1e6:.1f} MB" for path, size in different)
        print(f"\n{_name(old)} -> {_name(new)}, largest that differ: {listed or 'none'}")


def _sums(files: Iterable[File]) -> tuple[int, int, int]:
    """Return number, bytes inflated and bytes compressed."""
    files = list(files)
    return len(files), sum(file.size for file in files), sum(file.compressed for file in files)


def _share(part: int, whole: int) -> str:
    return f"{part / 1e6:.1f} ({100 * part / whole:.0f} %)" if whole else "0"


def _name(path: Path) -> str:
    return " ".join(path.name.split("-")[:2])


if __name__ == "__main__":
    main()
