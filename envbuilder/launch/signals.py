"""Pass the signals that should end a job on to it."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


@contextmanager
def forwarding(send: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``send`` for each signal of FORWARDED that arrives inside the block, instead of what it did before.

    One that was ignored (SIGHUP under nohup) stays ignored. To be used in the main thread.
    """
    before = {number: signal.getsignal(number) for number in FORWARDED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda received, _frame: send(signal.Signals(received)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
