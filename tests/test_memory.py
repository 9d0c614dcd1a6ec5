"""Memory that was freed goes back to the system. Each in a process of its own: what is set holds for all of it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="says something of glibc alone")

RESIDENT = """
import os
from envbuilder import memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""
LARGE = """
begin = resident()
for size in (24, 20, 16):
    buffer = b"x" * (size << 20)
    assert resident() - begin > (size - 1) << 20
    del buffer
print(resident() - begin)
"""
SMALL = """
begin, size = resident(), 4000
pieces = [b"x" * size for _ in range(8000)]
del pieces[:-1]
print(resident() - begin)
memory.trim()
print(resident() - begin)
"""


def run(program: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", RESIDENT + program], capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_freed_large_buffers_go_back():
    (kept,) = run(LARGE)
    assert kept > 12 << 20, "this C library gives back by itself: the function is no longer needed"
    (left,) = run("memory.release_large_buffers()\n" + LARGE)
    assert left < 2 << 20


def test_trimming_gives_back_what_lies_between_pieces_in_use():
    before, after = run(SMALL)
    assert before > 24 << 20
    assert after < 4 << 20
