"""Compile bytecode with the image's Python minor, in worker processes, to bytes that depend on the source alone."""

from __future__ import annotations

import struct
import subprocess
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Protocol, Self

from envbuilder.errors import EnvbuilderError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

_PROGRAM = Path(__file__).with_name("_compile.py")
#: Enters layer keys: whatever changes the bytes must change this.
REVISION = "bytecode 3"
#: Bytes of source that one process is given at once: about 40 ms of work.
_BATCH = 1 << 18
_COUNT, _SIZES = struct.Struct(">L"), struct.Struct(">LL")


class CompilerError(EnvbuilderError):
    """The interpreter that compiles bytecode could not be run or broke off."""


class Compiler:
    """A pool of ``workers`` processes of one interpreter. Use as a context manager.

    Each is started when there is something for it to do, and is given several sources at a time: waiting for an answer
    to every one would leave it idle while the threads that make layers take turns at the interpreter lock.
    """

    revision = REVISION

    def __init__(self, python: Path, *, workers: int) -> None:
        self._python = python
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._ended = False
        self._threads = [threading.Thread(target=self._serve, name=f"compile-{n}", daemon=True) for n in range(workers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kill()  # so that nobody waits for what is being compiled
        self._requests.put(None)
        for thread in self._threads:
            thread.join()
        self._kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # of what a killed process did not read
                        pipe.close()

    def submit(self, path: str, source: bytes) -> Future[bytes]:
        """Compile ``source`` that will lie at ``path``; the result is a .pyc, empty when it is not valid Python."""
        request = _Request(path.encode(), source, Future())
        self._requests.put(request)
        return request.result

    def _serve(self) -> None:
        """Answer requests with a process of this thread's own until there are no more to come."""
        worker: _Worker | None = None
        while batch := self._next_batch():
            try:
                worker = worker or self._start()
                for request, compiled in zip(batch, worker.compile(batch), strict=True):
                    request.result.set_result(compiled)
            except CompilerError as error:
                for request in batch:
                    if not request.result.done():
                        request.result.set_exception(error)

    def _next_batch(self) -> list[_Request]:
        """Wait for a request; return it with more of those that wait, leaving the other workers their share.

        None at all: the end.
        """
        batch: list[_Request] = []
        room = _BATCH
        while room > 0 and (not batch or self._requests.qsize() >= len(self._threads)):
            try:
                request = self._requests.get(block=not batch)
            except Empty:
                break
            if request is None:
                self._requests.put(None)  # for the other threads
                break
            batch.append(request)
            room -= len(request.source)
        return batch

    def _start(self) -> _Worker:
        with self._lock:
            if self._ended:
                raise CompilerError("the bytecode compiler was ended")
            worker = _Worker(self._python)
            self._processes.append(worker.process)
            return worker

    def _kill(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.kill()


@dataclass(frozen=True)
class _Request:
    path: bytes
    source: bytes
    result: Future[bytes]


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

    def compile(self, batch: Sequence[_Request]) -> Iterator[bytes]:
        words = [_COUNT.pack(len(batch))]
        for request in batch:
            words += (_SIZES.pack(len(request.path), len(request.source)), request.path, request.source)
        try:
            pipe = _open(self.process.stdin)
            pipe.write(b"".join(words))
            pipe.flush()
        except OSError as error:
            raise _broken(batch[0]) from error
        for request in batch:
            yield self._answer(request)

    def _answer(self, request: _Request) -> bytes:
        pipe = _open(self.process.stdout)
        head = pipe.read(_COUNT.size)
        size = _COUNT.unpack(head)[0] if len(head) == _COUNT.size else 0
        data = pipe.read(size)
        if len(head) != _COUNT.size or len(data) != size:
            raise _broken(request)
        return data


def _broken(request: _Request) -> CompilerError:
    return CompilerError(f"the bytecode compiler ended while it compiled {request.path.decode()}")


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise CompilerError("the bytecode compiler has no pipe")
    return pipe


class SourceCompiler(Protocol):
    """What compiles the sources of one wheel: ``Compiler``, or what was compiled before."""

    def submit(self, path: str, source: bytes) -> Future[bytes]:
        """See ``Compiler.submit``."""
