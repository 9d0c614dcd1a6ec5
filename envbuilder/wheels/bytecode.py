"""Compile bytecode with the image's Python minor, in worker processes, to bytes that depend on the source alone."""

from __future__ import annotations

import struct
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, Self

from envbuilder.errors import EnvbuilderError

if TYPE_CHECKING:
    from types import TracebackType

_PROGRAM = Path(__file__).with_name("_compile.py")
#: Enters layer keys: whatever changes the bytes must change this.
REVISION = "bytecode 3"


class CompilerError(EnvbuilderError):
    """The interpreter that compiles bytecode could not be run or broke off."""


class Compiler:
    """A pool of ``workers`` processes of one interpreter. Use as a context manager."""

    revision = REVISION

    def __init__(self, python: Path, *, workers: int) -> None:
        self._python = python
        self._workers = workers
        self._local = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._ended = False
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="compile")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kill()  # so that nobody waits for what is being compiled
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # of what a killed process did not read
                        pipe.close()

    def submit(self, path: str, source: bytes) -> Future[bytes]:
        """Compile ``source`` that will lie at ``path``; the result is a .pyc, empty when it is not valid Python."""
        return self._pool.submit(lambda: self._worker.compile(path, source))

    @property
    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            with self._lock:
                if self._ended:
                    raise CompilerError("the bytecode compiler was ended")
                worker = self._local.worker = _Worker(self._python)
                self._processes.append(worker.process)
        return worker

    def _kill(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.kill()


class _Worker:
    """One process, used by one thread."""

    def __init__(self, python: Path) -> None:
        # No site, no user site, no current folder, no warnings; the hash seed fixes the order of set constants.
        words = [str(python), "-S", "-s", "-P", "-B", "-W", "ignore", str(_PROGRAM)]
        try:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
            )
        except OSError as error:
            raise CompilerError(f"{python} cannot be run: {error.strerror}") from error

    def compile(self, path: str, source: bytes) -> bytes:
        name = path.encode()
        try:
            pipe = _open(self.process.stdin)
            pipe.write(struct.pack(">LL", len(name), len(source)) + name)
            pipe.write(source)
            pipe.flush()
        except BrokenPipeError as error:
            raise CompilerError(f"the bytecode compiler ended while it compiled {path}") from error
        return self._answer()

    def _answer(self) -> bytes:
        pipe = _open(self.process.stdout)
        head = pipe.read(4)
        size = struct.unpack(">L", head)[0] if len(head) == 4 else 0
        data = pipe.read(size)
        if len(head) != 4 or len(data) != size:
            raise CompilerError("the bytecode compiler ended unexpectedly")
        return data


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise CompilerError("the bytecode compiler has no pipe")
    return pipe


class SourceCompiler(Protocol):
    """What compiles the sources of one wheel: ``Compiler``, or what was compiled before."""

    def submit(self, path: str, source: bytes) -> Future[bytes]:
        """See ``Compiler.submit``."""
