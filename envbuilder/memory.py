"""Keep what a process holds of memory near what it uses. Both functions do nothing with another C library than glibc."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

#: Buffers of this many bytes and more go back to the system when they are freed. Above the pieces of one megabyte that
#: everything is copied in: those are taken and freed too often for that.
LARGE = 4 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>


@cache
def release_large_buffers() -> None:
    """Have freed large buffers go back to the system. Call it before work in which threads hold some; once is enough.

    By itself glibc, once a buffer of up to 32 MiB was freed, takes further ones of that size from its arenas, of which
    each thread has one, and keeps them there (mallopt(3), M_MMAP_THRESHOLD). That was half of what a build held.
    """
    with suppress(AttributeError):
        mallopt = _libc().mallopt
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, 2 * LARGE)


def trim() -> None:
    """Give back what lies free between small pieces in use (malloc_trim(3)); takes milliseconds. Call it after a step."""
    with suppress(AttributeError):
        _libc().malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    import ctypes  # noqa: PLC0415 (takes milliseconds, which a build that makes nothing should not spend)

    return ctypes.CDLL(None)
