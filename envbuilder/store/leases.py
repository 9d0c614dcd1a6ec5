"""Leases: what a process relies on is not collected as long as the process lives.

A lease is a file ``leases/<pid>-<random>`` that its holder has locked (flock) and to which it appends the digests that
it found in the store or is about to put there. Every ``Store`` in use has one (``Store.protect``), so other rooms need
not think of it. The gate is the lock on ``locks/gate``: who writes a lease passes it with others, for microseconds; the
collector closes it while it decides and moves away what goes, which takes milliseconds; deleting comes after.

What the collector may take, with the gate closed: what no live lease names and no reference or pin leads to. It reads
the leases before the references. Why nothing is lost:

1. *Between finding and using.* The digest is in the lease before the holder looks whether the blob is there. Either
   the collector's closed gate came before that, and the holder finds the blob absent, or it sees the lease.
2. *Between putting and referring.* The digest is in the lease before the blob gets its name, and stays there until the
   reference is written, since the process that writes it holds the lease. A lease that the collector finds dead was
   let go after its reference was written, so the collector, which reads the references later, sees that.
3. *Being used by name.* ``Store.find_image`` writes the digest into the lease and then looks again whether the name
   still means it. Leases and references cover all that an image consists of.
4. *kill -9* at any moment lets go of the lease, and leaves temporary files and blobs that nothing refers to: the work
   in flight. They are garbage for the next collection, or found by the next build.
5. *Clocks* play no part in this. They only decide the order of eviction, where a time in the future counts as now.

Where a lease cannot be written (no room, no right to write), its holder keeps the gate open instead until it ends.

Locks of other hosts may not be seen on a network file system. So a lease of another host counts as live for ``FOREIGN``
seconds after it was last written even when nobody seems to hold its lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from envbuilder.errors import HostError
from envbuilder.oci.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

#: How long a lease counts whose lock may be held where it cannot be seen: longer than jobs run.
FOREIGN = 14 * 24 * 3600
_WAIT, _LOOK = 30.0, 0.01  # seconds that the collector waits for the gate, and between two attempts
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class GateError(HostError):
    """The collector cannot be alone with the store, so nothing may be removed."""


@dataclass(frozen=True)
class Lease:
    """A live lease as the collector sees it: who holds it, as far as is known, and the digests it names."""

    holder: str
    digests: frozenset[Digest]


class HeldLease:
    """A lease of this process, made at once. ``name`` says to people what it is for. Safe to share between threads.

    Use as a context manager, or call ``release``; the end of the process releases it too. A process that was forked
    off goes on holding it.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._mutex = threading.Lock()
        self._known: set[Digest] = set()
        self._pid = os.getpid()
        self._file: int | None = None
        self._gate: int | None = None  # held open instead, see above
        self.path = root / "leases" / f"{self._pid}-{os.urandom(8).hex()}"
        with gate(root), _suppress(_CANNOT_WRITE):
            self.path.parent.mkdir(exist_ok=True)
            self._file = os.open(self.path, _NEW_FILE, 0o644)
            with _suppress(_NO_LOCKS):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            about = {"holder": f"process {self._pid}: {name}", "host": os.uname().nodename, "boot": boot()}
            _write_line(self._file, json.dumps(about))
            return
        self._hold_gate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def digests(self) -> frozenset[Digest]:
        """What is under the lease."""
        with self._mutex:
            return frozenset(self._known)

    def add(self, digests: Iterable[Digest]) -> None:
        """Put digests under the lease. What is there under them when this returns stays until the release."""
        with self._mutex:
            fresh = [digest for digest in dict.fromkeys(digests) if digest not in self._known]
            if not fresh or self._gate is not None or self._file is None:
                return
            self._known.update(fresh)
            with gate(self._root), _suppress(_CANNOT_WRITE):
                _write_line(self._file, "\n".join(digest.hex for digest in fresh))
                return
            self._hold_gate()

    def release(self) -> None:
        """Let go. In a process that was forked off this does nothing."""
        if self._pid != os.getpid():
            return
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        for handle in (self._file, self._gate):
            if handle is not None:
                os.close(handle)
        self._file = self._gate = None

    def step_aside(self) -> None:
        """Keep the gate open no longer: for who is to close it, and would wait for itself on a disk that is full."""
        with self._mutex:
            if self._gate is not None:
                os.close(self._gate)
            self._gate = None

    def _hold_gate(self) -> None:
        """Keep the gate open until the release: nothing at all is collected then."""
        with _suppress(_CANNOT_WRITE | _NO_LOCKS):
            self._gate = _open_gate(self._root)
            fcntl.flock(self._gate, fcntl.LOCK_SH)


@contextmanager
def gate(root: Path, *, closed: bool = False) -> Iterator[None]:
    """Pass the gate, or close it and be alone with the store until the block ends.

    Raises:
        GateError: it is to be closed, but somebody holds it open, or this file system has no locks.

    """
    try:
        handle = _open_gate(root)
    except OSError as error:
        if closed or error.errno not in _CANNOT_WRITE:
            raise
        yield  # who may not write here is not collected from by us, and by others only what is not referred to
        return
    try:
        if closed:
            _close_gate(handle, root)
        else:
            with _suppress(_NO_LOCKS):
                fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def live_leases(root: Path, *, but: Path | None = None) -> list[Lease]:
    """Return the live leases, without the one at the path ``but``; files of dead ones are removed.

    To be called with the gate closed.
    """
    found = []
    for path in sorted((root / "leases").glob("*")):
        if path == but:
            continue
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        with os.fdopen(handle, "rb") as file:
            header, *lines = file.read().split(b"\n")
            about = _header(header)
            if _is_locked(handle) or _may_be_foreign(about, os.fstat(handle).st_mtime):
                digests = frozenset(Digest(line.decode()) for line in lines if len(line) == 64)
                found.append(Lease(about.get("holder", path.name), digests))
            else:
                path.unlink(missing_ok=True)
    return found


@contextmanager
def _suppress(numbers: set[int]) -> Iterator[None]:
    """Suppress the errors of a disk on which nothing can be written, or of a file system without locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def _open_gate(root: Path) -> int:
    path = root / "locks" / "gate"
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _close_gate(handle: int, root: Path) -> None:
    deadline = time.monotonic() + _WAIT
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_LOOK)
                continue
            raise GateError(
                f"{root}: a process holds the store open, because it found no room to say what it uses",
                hint="wait for it to end, or make a little room on the disk; nothing was removed",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise GateError(
                f"{root}: the file system has no locks between processes (flock), so nothing can be removed safely",
                hint="put the store on a local disk: set XDG_CACHE_HOME",
            ) from error
        return


def _write_line(handle: int, text: str) -> None:
    data = text.encode() + b"\n"
    before = os.fstat(handle).st_size
    try:
        written = os.write(handle, data)
    except OSError:
        os.ftruncate(handle, before)
        raise
    if written != len(data):
        os.ftruncate(handle, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _may_be_foreign(about: dict[str, str], written: float) -> bool:
    """Return whether somebody may hold the lease whose lock cannot be seen; a time in the future counts as now."""
    if not about:
        return False  # its holder was killed while it made it
    here = about.get("boot") == boot() or about.get("host") == os.uname().nodename
    return not here and time.time() - written < FOREIGN


def _header(line: bytes) -> dict[str, str]:
    try:
        document = json.loads(line)
    except ValueError:
        return {}
    return {key: str(value) for key, value in document.items()} if isinstance(document, dict) else {}


def boot() -> str:
    """Return what names this run of this machine's kernel: all who share it see each other's locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
