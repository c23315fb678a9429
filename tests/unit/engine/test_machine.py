"""The readings of this process and its machine, against what it has really done."""

from __future__ import annotations

import time

from ring_notebook.engine.measures import Machine


def test_a_reading_counts_what_happened_since_the_one_before() -> None:
    machine = Machine("")
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    busy = machine.read()
    time.sleep(0.5)
    idle = machine.read()
    assert busy["cpu"] > idle["cpu"] >= 0
    assert 10 << 20 < busy["memory"] < 1 << 40
    assert busy["memory_left"] > 0
    assert busy["network"] >= 0
    assert "gpu" not in busy


def test_a_gpu_that_is_not_there_is_left_out() -> None:
    assert "gpu_memory" not in Machine("4711").read()
