"""What hashing, inflating and compiling alone cost on this machine: the least that a build of these wheels can take.

    python -m benchmarks.limit WHEELS            # a folder of wheels
    python -m benchmarks.limit WHEELS --json     # the same for benchmarks.build

Two lines: every member inflated (isal) and both digests of it computed, in threads on all cores; and the same with
every source compiled meanwhile by worker processes. No file is written, no tar header made, nothing compressed. Then a
table of inflaters on a sample, one thread each.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import struct
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import deflate
from isal import igzip_lib, isal_zlib

from envbuilder.parallel import cores, run_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_CHUNK = 1 << 20
_LARGE, _SMALL = 1 << 20, 1 << 16
_SAMPLE = 192 << 20  # bytes of inflated data in each half of the sample
_SAMPLE_ROUNDS = 3
#: Reads indices of members from its arguments' file and compiles them; imports nothing of ours.
_COMPILE = """
import importlib.util, marshal, sys, warnings, zipfile
warnings.simplefilter("ignore")
archives = {}
for line in sys.stdin:
    path, name = line.rstrip("\\n").split("\\0")
    archive = archives.get(path) or archives.setdefault(path, zipfile.ZipFile(path))
    source = archive.read(name)
    try:
        marshal.dumps(compile(source, name, "exec", dont_inherit=True))
    except (SyntaxError, ValueError):
        continue
    importlib.util.source_hash(source)
"""


@dataclass(frozen=True)
class Line:
    """One limit: wall and CPU seconds, and the bytes that went through."""

    label: str
    wall: float
    cpu: float


@dataclass(frozen=True)
class Rate:
    """How fast one function goes through the sample's large and small members: MB of inflated data a second."""

    name: str
    large: float
    small: float


@dataclass(frozen=True)
class Limits:
    """Everything that is measured here. ``compressed`` and ``inflated`` are bytes; ``sources`` counts modules."""

    compressed: int
    inflated: int
    members: int
    sources: int
    lines: tuple[Line, ...]
    rates: tuple[Rate, ...]

    def table(self, wall: float | None = None, cpu: float | None = None) -> str:
        """Return all of it as Markdown; ``wall`` and ``cpu`` are our build's seconds, to be held against the limits."""
        volume = (
            f"{self.members} members of {self.compressed / 1e6:.0f} MB, {self.inflated / 1e6:.0f} MB inflated, "
            f"{self.sources} of them Python sources."
        )
        rows = [volume, "", "| limit | seconds | CPU seconds | our build / limit | in CPU |", "|---|--:|--:|--:|--:|"]
        if wall is not None and cpu is not None:
            rows.append(f"| our build | {wall:.2f} | {cpu:.2f} | | |")
        for line in self.lines:
            ratios = [f"{a / b:.2f}" if a is not None else "" for a, b in ((wall, line.wall), (cpu, line.cpu))]
            rows.append(f"| {line.label} | {line.wall:.2f} | {line.cpu:.2f} | {' | '.join(ratios)} |")
        rows += [
            "",
            "| one thread, MB of inflated data a second | members of 1 MiB and more | of 64 KiB and less |\n|---|--:|--:|",
        ]
        rows += [f"| {rate.name} | {rate.large:.0f} | {rate.small:.0f} |" for rate in self.rates]
        return "\n".join(rows)


@dataclass(frozen=True)
class Member:
    """A member of a wheel; ``offset`` is where its bytes begin, ``size`` how many they are."""

    wheel: Path
    name: str
    offset: int
    size: int
    inflated: int
    deflated: bool


def members(wheels: Sequence[Path]) -> list[Member]:
    """Return the members of all wheels, the largest first."""
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive, wheel.open("rb") as file:
            for info in archive.infolist():
                if info.is_dir():
                    continue
                file.seek(info.header_offset + 26)
                name_size, extra_size = struct.unpack("<HH", file.read(4))
                offset = info.header_offset + 30 + name_size + extra_size
                deflated = info.compress_type == zipfile.ZIP_DEFLATED
                found.append(Member(wheel, info.filename, offset, info.compress_size, info.file_size, deflated))
    return sorted(found, key=lambda member: (-member.inflated, member.name))


def measure(wheels: Sequence[Path], python: Path, rounds: int) -> Limits:
    """Measure the limits (the best of ``rounds``) and the inflaters; ``python`` compiles."""
    every = members(wheels)
    sources = [m for m in every if m.name.endswith(".py")]
    for wheel in wheels:  # so that the disk plays no part
        with wheel.open("rb") as file:
            while file.read(_CHUNK):
                pass
    lines = (
        _timed("inflating and both digests, threads on all cores", lambda: hash_all(every), rounds),
        _timed("the same, and compiling every source", lambda: hash_and_compile(every, sources, python), rounds),
    )
    totals = sum(m.size for m in every), sum(m.inflated for m in every)
    return Limits(*totals, len(every), len(sources), lines, tuple(rates(every)))


def hash_all(every: Sequence[Member]) -> None:
    """Inflate all members and hash them before and after, in as many threads as there are cores."""
    run_all(hash_share, shares(every, 64 * cores()), workers=cores())


def shares(every: Sequence[Member], count: int) -> list[list[Member]]:
    """Cut the members, given largest first, into shares: each large one alone, the rest dealt out in turn."""
    large = [[member] for member in every if member.inflated >= _LARGE]
    rest = [member for member in every if member.inflated < _LARGE]
    return [*large, *(share for number in range(count) if (share := rest[number::count]))]


def hash_share(share: Sequence[Member]) -> None:
    """Inflate and hash some members; what is stored is only hashed, once for the tar and once for the layer."""
    compressed, tar = hashlib.sha256(), hashlib.sha256()
    for member in share:
        inflate = isal_zlib.decompressobj(-15).decompress if member.deflated else bytes
        for data in _pieces(member):
            compressed.update(data)
            tar.update(inflate(data))


def hash_and_compile(every: Sequence[Member], sources: Sequence[Member], python: Path) -> None:
    """Do what ``hash_all`` does while one process for each core compiles its share of the sources."""
    workers = [
        threading.Thread(target=_compile, args=(sources[number :: cores()], python)) for number in range(cores())
    ]
    for worker in workers:
        worker.start()
    hash_all(every)
    for worker in workers:
        worker.join()


def _compile(sources: Sequence[Member], python: Path) -> None:
    lines = "".join(f"{member.wheel}\0{member.name}\n" for member in sources)
    subprocess.run([python, "-I", "-S", "-B", "-c", _COMPILE], input=lines, text=True, check=True)


def _timed(label: str, work: Callable[[], None], rounds: int) -> Line:
    """Return the least wall and the least CPU seconds of some rounds: a limit is what is possible."""
    walls, cpus = [], []
    for _ in range(rounds):
        before, begun = os.times(), time.monotonic()
        work()
        walls.append(time.monotonic() - begun)
        cpus.append(sum(os.times()[:4]) - sum(before[:4]))
    return Line(label, min(walls), min(cpus))


def _pieces(member: Member) -> Iterator[bytes]:
    with member.wheel.open("rb") as file:
        file.seek(member.offset)
        left = member.size
        while left and (data := file.read(min(left, _CHUNK))):
            left -= len(data)
            yield data


@dataclass(frozen=True)
class _Sample:
    """Deflate streams in memory, each with the size it inflates to."""

    streams: tuple[tuple[bytes, int], ...]

    @classmethod
    def of(cls, chosen: Sequence[Member]) -> _Sample:
        streams, total = [], 0
        for member in chosen:
            if total + member.inflated > _SAMPLE:
                continue
            streams.append((b"".join(_pieces(member)), member.inflated))
            total += member.inflated
        return cls(tuple(streams))

    def rate(self, function: Callable[[bytes, int], object]) -> float:
        """Return MB of inflated data a second of CPU, the best of some rounds; 0 when there is nothing in the sample."""
        total, best = sum(size for _, size in self.streams), 0.0
        for _ in range(_SAMPLE_ROUNDS):
            begun = time.thread_time()
            for stream, size in self.streams:
                function(stream, size)
            best = max(best, total / 1e6 / max(time.thread_time() - begun, 1e-9))
        return best


def rates(every: Sequence[Member]) -> Iterator[Rate]:
    """Measure each inflater that is installed, and the sums beside them, on a sample of the members."""
    deflated = [member for member in every if member.deflated and member.inflated]
    large = _Sample.of([member for member in deflated if _LARGE <= member.inflated <= _SAMPLE // 2])
    small = _Sample.of([member for member in deflated if member.inflated <= _SMALL])
    for name, function in _functions():
        yield Rate(name, large.rate(function), small.rate(function))
    plain = [
        _Sample(tuple((bytes(deflate.deflate_decompress(s, n)), n) for s, n in part.streams)) for part in (large, small)
    ]
    for name, sum_of in (
        ("SHA-256 of the inflated data", lambda data, _: hashlib.sha256(data)),
        ("CRC-32 of the inflated data (libdeflate)", lambda data, _: deflate.crc32(data)),
    ):
        yield Rate(name, *(part.rate(sum_of) for part in plain))


def _functions() -> Iterator[tuple[str, Callable[[bytes, int], object]]]:
    """Yield name and function of each inflater. ``deflate`` needs a whole member in memory, the others stream."""
    yield "zlib, 1 MiB at a time", _streaming(lambda: zlib.decompressobj(-15).decompress)
    with contextlib.suppress(ImportError):
        zlib_ng = importlib.import_module("zlib_ng.zlib_ng")  # not a dependency: only compared
        yield "zlib-ng, 1 MiB at a time", _streaming(lambda: zlib_ng.decompressobj(-15).decompress)
    yield "isal (isal_zlib), 1 MiB at a time", _streaming(lambda: isal_zlib.decompressobj(-15).decompress)
    yield (
        "isal (igzip_lib), 1 MiB at a time",
        _streaming(lambda: igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_DEFLATE, hist_bits=15).decompress),
    )
    yield "isal (isal_zlib), whole member", lambda data, size: isal_zlib.decompress(data, -15, max(size, 1))
    yield "libdeflate, whole member", deflate.deflate_decompress


def _streaming(new: Callable[[], Callable[[bytes], bytes]]) -> Callable[[bytes, int], object]:
    def inflate(data: bytes, _: int) -> None:
        more = new()
        for start in range(0, len(data), _CHUNK):
            more(data[start : start + _CHUNK])

    return inflate


def from_json(text: str) -> Limits:
    """Read what ``--json`` printed."""
    document = json.loads(text)
    lines, found = (document.pop(key) for key in ("lines", "rates"))
    return Limits(**document, lines=tuple(Line(**x) for x in lines), rates=tuple(Rate(**x) for x in found))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What hashing, inflating and compiling alone cost.")
    parser.add_argument("wheels", type=Path, help="a folder of wheels")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="what compiles (default: this Python)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often the limits are measured (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    found = measure(sorted(args.wheels.glob("*.whl")), args.python, args.rounds)
    print(json.dumps(asdict(found)) if args.json else found.table())


if __name__ == "__main__":
    main()
