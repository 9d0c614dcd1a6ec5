"""Threads for work that waits on the network or runs in C without the interpreter lock.

One job's error stops the others: ``checkpoint`` raises in every thread that is still copying. Ctrl-C does the same.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
R = TypeVar("R")

_stop: ContextVar[threading.Event | None] = ContextVar("stop", default=None)


class StoppedError(Exception):
    """Raised by ``checkpoint`` in a thread whose work is no longer wanted. Never leaves ``run_all``."""


def checkpoint() -> None:
    """Raise ``StoppedError`` when this thread's work is no longer wanted. Call it in every copy loop."""
    event = _stop.get()
    if event is not None and event.is_set():
        raise StoppedError


def cores() -> int:
    """Return the number of processors this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(function: Callable[[T], R], items: Iterable[T], *, workers: int) -> list[R]:
    """Apply ``function`` to every item, ``workers`` at a time, started in order; return results in order.

    The first exception (or Ctrl-C) stops the others at their next ``checkpoint`` and is raised here.
    """
    event = threading.Event()
    outer = _stop.get()

    def call(item: T) -> R:
        _stop.set(event)
        checkpoint()
        return function(item)

    pool = ThreadPoolExecutor(max_workers=max(1, workers))
    futures: list[Future[R]] = [pool.submit(copy_context().run, call, item) for item in items]
    try:
        while True:
            done, pending = wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION)
            stopped = outer is not None and outer.is_set()
            if stopped or not pending or any(future.exception() for future in done):
                break
    except BaseException:
        # Ctrl-C must not wait for a thread that is stuck in a read: what it leaves is a temporary file.
        event.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    if pending:
        event.set()
    pool.shutdown(wait=True, cancel_futures=True)
    failures = [error for f in futures if not f.cancelled() and (error := f.exception()) is not None]
    for error in sorted(failures, key=lambda error: isinstance(error, StoppedError)):
        raise error
    if any(future.cancelled() for future in futures):
        raise StoppedError  # stopped from outside while no job of ours was at a checkpoint
    return [future.result() for future in futures]
