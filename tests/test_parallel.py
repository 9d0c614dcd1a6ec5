from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from envbuilder import parallel, report

if TYPE_CHECKING:
    from envbuilder.report import Kind, Task


def test_results_come_in_order():
    def slow(number: int) -> int:
        time.sleep(0.02 * (3 - number))
        return number * 10

    assert parallel.run_all(slow, [0, 1, 2], workers=3) == [0, 10, 20]
    assert parallel.run_all(slow, [], workers=3) == []


def test_the_first_error_stops_the_others():
    begun = time.monotonic()

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("broken")
        while True:
            parallel.checkpoint()
            time.sleep(0.01)

    with pytest.raises(ValueError, match="broken"):
        parallel.run_all(work, range(5), workers=5)
    assert time.monotonic() - begun < 5


def test_an_error_stops_what_inner_calls_do():
    def forever(_: int) -> None:
        while True:
            parallel.checkpoint()
            time.sleep(0.01)

    def outer(number: int) -> None:
        if number == 0:
            raise ValueError("broken")
        parallel.run_all(forever, range(2), workers=2)

    with pytest.raises(ValueError, match="broken"):
        parallel.run_all(outer, range(2), workers=2)


def test_threads_speak_to_the_reporter_in_force():
    class Collector:
        def __init__(self) -> None:
            self.texts: list[str] = []

        def message(self, text: str, kind: Kind) -> None:
            self.texts.append(f"{kind.value}: {text}")

        def begin(self, label: str, total: int | None) -> Task:
            raise AssertionError(label, total)

        def end(self, task: Task) -> None:
            raise AssertionError(task)

    collector = Collector()
    with report.using(collector):
        parallel.run_all(lambda n: report.step(str(n)), [1, 2], workers=2)
        report.warning("w")
    assert sorted(collector.texts) == ["step: 1", "step: 2", "warning: w"]
