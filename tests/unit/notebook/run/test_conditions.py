"""What ends a wait for a run, where its ranks are at different steps."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from harness.waiting import until
from ring_notebook.notebook.lab.conditions import condition
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.protocol.records import MetricBatch, encode


@pytest.mark.parametrize("unit", ["30 steps", "3 epochs"])
@pytest.mark.parametrize("late", [15, 40, 48])
def test_a_rank_that_is_ahead_makes_no_value_stale(tmp_path: Path, unit: str, late: int) -> None:
    """The run would be stopped because one of its ranks is late."""
    log = RunLog(tmp_path / "a", "a", "a", 2, "", {}, {})
    stale = condition(f"loss has not improved for {unit}")

    def rows(rank: int, steps: range) -> str:
        values = array("d", (one for step in steps for one in (log.started, step, abs(step - 20), step // 10)))
        log.put(encode([MetricBatch("a", rank, ("loss", "epoch"), values)]))
        until(lambda: log.taken == log.received)
        return stale.holds(log.view())

    assert rows(1, range(1)) == rows(0, range(60)) == ""
    assert rows(1, range(1, late)) == ""
    assert rows(1, range(late, 60)) == "loss has not improved since step 20 (0)"
    log.close()


def test_a_step_is_reached_where_rank_0_alone_logs(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "a", "a", "a", 2, "", {}, {})
    reached = condition("step 500")
    assert reached.holds(log.view()) == ""
    log.put(encode([MetricBatch("a", 0, ("loss",), array("d", (log.started, 600, 1.0)))]))
    until(lambda: log.taken == log.received)
    assert reached.holds(log.view()) == "step 600"
    log.put(encode([MetricBatch("a", 1, ("loss",), array("d", (log.started, 400, 1.0)))]))
    until(lambda: log.taken == log.received)
    assert reached.holds(log.view()) == "", "the ranks that log have not all reached it"
    log.close()
