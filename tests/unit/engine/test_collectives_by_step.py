"""What is noted of a loop: a bounded number of its steps, the same ones on all ranks."""

from __future__ import annotations

from itertools import count

from ring_notebook.core import metrics
from ring_notebook.engine.collectives_by_step import MOST, LoopCalls


def test_the_steps_of_a_long_loop_thin_out_alike_on_all_ranks() -> None:
    def noted(steps: int, extra: int) -> dict[int, int]:
        calls = count()
        loops = LoopCalls(lambda: next(calls) + extra, list)
        begin_step = loops.begin("here")
        for step in range(steps):
            begin_step(step)
        return dict(loops.report()["marks"])

    ahead, behind = noted(1000, 0), noted(990, 5)
    assert MOST // 2 <= len(ahead) <= MOST
    assert [*ahead] == [*range(0, 1000, 32)]
    assert {*behind} == {step for step in ahead if step < 990}


def test_a_tracked_loop_is_noted_by_its_lines_and_passes() -> None:
    calls = count(100)
    loops = LoopCalls(lambda: next(calls), lambda: [7, 3])
    assert loops.report() == {}
    metrics.begin(loops.begin)
    try:
        names = []
        for _ in range(2):
            for _ in metrics.track(range(3)):
                pass
            names.append(loops.report()["name"])
        report = loops.report()
    finally:
        metrics.begin()
        metrics.end()
    assert names[0] != names[1]
    assert names[0].endswith("7 3 1")
    assert report["line"] == 7
    assert report["marks"] == [(0, 104), (1, 105), (2, 106), (3, 107)]
