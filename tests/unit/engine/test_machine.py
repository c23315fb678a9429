"""The readings of this process and its machine, against what it has really done."""

from __future__ import annotations

import time

from ring_notebook.engine.measures import SHORTEST, Machine


def test_a_reading_counts_what_happened_since_the_one_before() -> None:
    machine = Machine("")
    until = time.process_time() + SHORTEST
    while time.process_time() < until:
        pass
    busy = machine.read()
    time.sleep(SHORTEST)
    idle = machine.read()
    assert busy["cpu"] > idle["cpu"] >= 0
    assert 10 << 20 < busy["memory"] < 1 << 40
    assert busy["memory_left"] > 0
    assert busy["network"] >= 0
    assert "gpu" not in busy


def test_a_gpu_that_is_not_there_is_left_out() -> None:
    assert "gpu_memory" not in Machine("4711").read()


def test_a_moment_has_no_rate() -> None:
    machine = Machine("")
    at_once = machine.read()
    assert "memory" in at_once
    assert not {"cpu", "network", "disk"} & set(at_once), "hundredths of a second, over a few milliseconds"
    time.sleep(SHORTEST)
    assert 0 <= machine.read()["cpu"] < 150, "since the beginning"
