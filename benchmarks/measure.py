"""Measure a command: wall and CPU seconds and the largest process's memory, with the daemons that work for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    import resource
    from collections.abc import Iterator, Mapping, Sequence

_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE_SECONDS = 0.2


class CommandFailedError(Exception):
    """A command that was to be measured ended with another exit code than 0."""


@dataclass(frozen=True)
class Measured:
    """One command: wall and CPU seconds, peak memory of its largest process in bytes, what it printed.

    ``size`` counts the bytes it made or moved, None where nobody asks. ``others`` says how many cores were busy with
    something else meanwhile: where that is much, the seconds say little.
    """

    wall: float
    cpu: float
    peak: int
    stdout: str = ""
    size: int | None = None
    others: float = 0.0


@dataclass(frozen=True)
class Runner:
    """Runs commands in ``folder``; ``daemons`` are processes whose work is counted with them, by pid."""

    folder: Path
    log: IO[bytes]
    daemons: tuple[int, ...] = ()

    def run(self, words: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Measured:
        """Run a command to its end. What earlier ones wrote is flushed to the disk first, outside the timing.

        Raises:
            CommandFailedError: it fails; the end of what it wrote to stderr is in the message.

        """
        argv = [str(word) for word in words]
        os.sync()
        before, busy = sum(_tree_cpu(daemon) for daemon in self.daemons), _busy()
        with _PeakWatch(self.daemons) as watch:
            begun = time.monotonic()
            done = _to_the_end(argv, self.folder, self.log, os.environ | dict(env or {}), watch)
            wall = time.monotonic() - begun
            busy = _busy() - busy
        cpu = done.usage.ru_utime + done.usage.ru_stime + sum(_tree_cpu(daemon) for daemon in self.daemons) - before
        peak, others = done.usage.ru_maxrss * 1024, max(0.0, busy - cpu) / wall
        # Between fork and exec a child has our memory, and the kernel counts that as its peak: what is not above our
        # own says nothing, and what was seen while it ran counts.
        told = peak if peak > high_water(os.getpid()) else 0
        return Measured(wall, cpu, max(told, watch.peak), done.stdout, others=others)

    def quietly(self, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run a command whose cost does not count; return what it printed."""
        argv = [str(word) for word in words]
        return _to_the_end(argv, self.folder, self.log, os.environ | dict(env or {})).stdout.strip()


@dataclass(frozen=True)
class _Done:
    stdout: str
    usage: resource.struct_rusage


def _to_the_end(
    argv: Sequence[str], folder: Path, log: IO[bytes], env: Mapping[str, str], watch: _PeakWatch | None = None
) -> _Done:  # fmt: skip
    log.write(f"$ {' '.join(argv)}\n".encode())
    log.flush()
    process = subprocess.Popen(
        argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
    )
    if watch is not None:
        watch.add(process.pid)
    try:
        stdout = process.stdout.read() if process.stdout is not None else ""
        # wait4 and not wait: it alone says what this child, and nobody else's, has used.
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        tail = "\n".join(Path(log.name).read_text("utf-8", "replace").splitlines()[-25:])
        raise CommandFailedError(f"`{' '.join(argv)}` ended with exit code {process.returncode}:\n{tail}")
    return _Done(stdout, usage)


class _PeakWatch:
    """Watches processes and what they start: ``peak`` is the largest resident size that any of them reached, in bytes.

    The kernel keeps each process's high-water mark, so that looking now and then is enough.
    """

    def __init__(self, daemons: Sequence[int]) -> None:
        self.peak = 0
        self._roots = list(daemons)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def add(self, pid: int) -> None:
        """Watch one more process."""
        self._roots.append(pid)

    def __enter__(self) -> Self:
        for pid in [pid for root in self._roots for pid in tree(root)]:
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): reset the high-water mark
            except OSError:
                continue
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        self.peak = max([self.peak, *(high_water(pid) for root in self._roots for pid in tree(root))])


def tree(root: int) -> list[int]:
    """Return a process and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 (a Path for each of hundreds of processes, five times a second)
        if entry.isdigit() and (fields := _stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def _tree_cpu(root: int) -> float:
    """Return the CPU seconds of a process's tree. Who ended was waited for, and is counted by its parent."""
    return sum(sum(map(int, fields[11:15])) for pid in tree(root) if (fields := _stat(pid))) / _TICKS


def _busy() -> float:
    """Return the seconds that all cores together have worked since the machine started."""
    user, nice, system, _, _, irq, softirq, steal = map(int, _lines("/proc/stat")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def started(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks, which tells it from a later one of its pid; None when gone."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; nothing when the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def high_water(pid: int) -> int:
    """Return the largest resident size that a process has reached, in bytes; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def machine(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what a reader of the numbers must know of this machine, as pairs of name and value; ``folder`` is on the disk."""
    models = {line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "processor", f"{', '.join(sorted(models)) or platform.processor()}, {len(os.sched_getaffinity(0))} cores"
    yield "memory", f"{memory / 1e9:.0f} GB"
    yield "kernel", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "disk", _disk(folder)
    yield "Python", f"{platform.python_version()} ({sys.implementation.name})"


def _disk(folder: Path) -> str:
    """Return the file system of a folder and whether its device says that it rotates."""
    mounts = [line.split() for line in _lines("/proc/self/mounts")]
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, kind, *_ = max(above, key=lambda mount: len(mount[1]))
    number = folder.stat().st_dev
    queue = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/queue/rotational")
    rotates = {"0": "not rotating", "1": "rotating"}.get("".join(_lines(str(queue))), "of unknown kind")
    virtual = " (a virtual disk: what the host has under it is not known)" if Path(device).name.startswith("vd") else ""
    return f"{kind} on a device that calls itself {rotates}{virtual}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
