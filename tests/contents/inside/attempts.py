"""Run many commands, two at a time, each in a process of its own, and tell what became of each. Runs inside an image.

Usage: ``attempts.py OUT FILE``. FILE is JSON: ``[[name, [word, ...], seconds], ...]``. OUT becomes JSON: a list of
``{"name", "code", "seconds", "output"}`` in the same order; ``code`` is null for a command that was still running after
its seconds and was killed, negative for one that a signal ended; ``output`` is the end of what it wrote.
Stand-alone: needs nothing but Python's standard library.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

WORKERS = 2
TAIL = 4000


def attempt(job: tuple[str, list[str], float]) -> dict[str, object]:
    """Run one command without a terminal or input; what it started is killed with it."""
    name, words, limit = job
    start = time.monotonic()
    with tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:  # no program, no interpreter for a script, no format that the kernel knows
            return {"name": name, "code": 126, "seconds": 0.0, "output": str(error)}
        code: int | None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        size = out.seek(0, os.SEEK_END)
        out.seek(max(0, size - TAIL))
        output = out.read().decode("utf-8", "replace")
    return {"name": name, "code": code, "seconds": round(time.monotonic() - start, 1), "output": output}


def main(target: str, source: str) -> None:
    """Run all commands of a file."""
    jobs = json.loads(Path(source).read_text(encoding="utf-8"))
    with ThreadPoolExecutor(WORKERS) as pool:
        done = list(pool.map(attempt, jobs))
    Path(target).write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
