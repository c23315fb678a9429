"""What is said and drawn of the machines: sparklines, charts, and warnings that come neither late nor from noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ring_notebook.notebook.panel import machines, rank_table, report
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.tags_and_look import Look
from ring_notebook.protocol.records import Ended, Load, Status, encode

GIB = 2.0**30


def recorded(
    directory: Path, name: str, values: list[float], size: int = 1, status: str = "ok", **facts: float
) -> RunLog:
    """A run whose ranks have sent these readings of one load, one a second, and then ended with ``status``."""
    log = RunLog(directory / "run", "run", "", size, "train()", {}, {"cores": 8, "hosts": ["here"]})
    for rank in range(size):
        loads = [Load("run", rank, log.started + second, {name: value}) for second, value in enumerate(values)]
        log.put(encode([*loads, Status("run", rank, log.started, extra=dict(facts))]))
        log.put(encode([Ended("run", rank, status, 20.0, dict(facts))]))  # type: ignore[arg-type]
    log.finish(status)
    return log


@pytest.mark.parametrize(
    ("load", "title", "values", "cell"),
    [
        ("cpu", "CPU", [100 * part / 7 for part in range(8)], "▁▂▃▄▅▆▇█ 100%"),
        ("cpu", "CPU", [100 * part / 799 for part in range(800)], "▁▂▃▄▅▆▇█ 100%"),
        ("memory", "memory", [0.0], " 0 GiB"),
    ],
)
def test_a_sparkline_shows_the_way_from_nothing_to_the_top(
    tmp_path: Path, load: str, title: str, values: list[float], cell: str
) -> None:
    content = rank_table.table(recorded(tmp_path, load, values).view(), still=True)
    assert content.rows[0][content.columns.index(title)] == cell


def test_what_memory_will_come_to_stands_beside_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "run", "", 2, "train()", {}, {"cores": 8, "hosts": ["here"]})
    for second in (1, 2):
        loads: list[dict[str, float]] = [
            {"memory": second * GIB},
            {"memory": second * GIB, "memory_expected": 3.5 * GIB},
        ]
        log.put(encode([Load("run", rank, log.started + second, values) for rank, values in enumerate(loads)]))
    log.finish("ok")
    content = rank_table.table(log.view(), still=True)
    column = content.columns.index("memory")
    assert [row[column] for row in content.rows] == ["▃▆ 2 GiB", "▃▆ 2 GiB of ~3.5"]


def test_readings_are_kept_drawn_and_listed(tmp_path: Path) -> None:
    log = recorded(tmp_path, "cpu", [10.0, 50.0, 90.0], size=2)
    again = RunRecord.load(log.directory)
    assert [row.values for row in again.loads()] == [{"cpu": value} for value in (10.0, 50.0, 90.0)] * 2
    assert [row.step for row in again.loads()][:3] == [0, 1, 2]
    for one in (log, again):
        content = rank_table.table(one.view(), still=True)
        assert content.rows[1][content.columns.index("CPU")] == "▂▅▇ 90%"
        assert [chart.title for chart in machines.charts(one.view(), Look())] == ["CPU"]
    log.summary["seconds"] = 30.0
    page = report.mime_bundle(log)["text/html"]
    assert "<details><summary>Machine</summary>" in page
    log.look = Look(machine=True)
    assert "<details open><summary>Machine</summary>" in report.mime_bundle(log)["text/html"]


@pytest.mark.parametrize(
    ("values", "warns"),
    [
        ([GIB * (10 - 0.2 * second) for second in range(20)], True),
        ([GIB * (100 - 0.01 * second) for second in range(20)], False),  # hours
        ([GIB * 10] * 10 + [GIB * 5] * 10, False),  # what the model took at once
        ([GIB * 10] * 20, False),
        (list(GIB * (10 + 0.3 * np.random.default_rng(1).normal(size=20))), False),
        ([GIB * (10 - second) for second in range(5)], False),  # too few
        ([GIB * (16 - 0.1 * second) for second in range(12)], False),  # 11 s say nothing about the next 150
    ],
    ids=["falls", "slowly", "jump", "level", "noise", "few", "start"],
)
def test_memory_that_runs_out_is_said_before(tmp_path: Path, values: list[float], warns: bool) -> None:
    log = recorded(tmp_path, "memory_left", values, status="failed")
    found = machines.warnings(log, log.view())
    assert bool(found) is warns
    if warns:
        assert found == ("memory runs out in about 31 s: 6.2 GiB left where rank 0 runs",)


def test_a_run_that_ended_well_has_had_memory_enough(tmp_path: Path) -> None:
    log = recorded(tmp_path, "memory_left", [GIB * (10 - 0.2 * second) for second in range(20)])
    assert machines.warnings(log, log.view()) == ()


def test_ranks_that_share_cores(tmp_path: Path) -> None:
    log = recorded(tmp_path, "cpu", [1.0], size=9)
    assert machines.warnings(log, log.view()) == ("9 ranks share 8 cores: each computes more slowly than alone",)
    log.environment["gpus"] = ["0"]
    assert machines.warnings(log, log.view()) == ()


def test_more_threads_than_cores(tmp_path: Path) -> None:
    log = recorded(tmp_path, "threads", [16.0, 4.0], size=2)
    assert machines.warnings(log, log.view()) == ()
    log = recorded(tmp_path / "more", "threads", [1.0, 8.0], size=2)
    (warning,) = machines.warnings(log, log.view())
    assert warning.startswith("2 ranks compute with 16 threads on 8 cores, which wait for one another: unset OMP_NUM_")
    log.environment["gpus"] = ["0"]
    assert machines.warnings(log, log.view()) == ()


def test_a_gpu_that_idles_for_data(tmp_path: Path) -> None:
    log = recorded(tmp_path, "gpu", [30.0] * 12, training=20.0, data_wait=8.0)
    assert machines.warnings(log, log.view()) == ("the GPU of rank 0 idles: 40% of the time goes to waiting for data",)
    busy = recorded(tmp_path / "busy", "gpu", [95.0] * 12, training=20.0, data_wait=8.0)
    assert machines.warnings(busy, busy.view()) == ()
