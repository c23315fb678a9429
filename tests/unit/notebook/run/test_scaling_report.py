"""A run of a notebook is measured after its warm-up, and the report draws what was measured and predicted."""

from __future__ import annotations

import base64
import re
from array import array
from pathlib import Path

import pytest

from ring_notebook.analysis.scaling import PARTS, Scaling
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.scaling_report import ScalingReport, measured_run
from ring_notebook.protocol.records import Ended, MetricBatch, encode


def test_a_run_is_measured_after_its_warm_up(tmp_path: Path) -> None:
    """A row is logged when its step is done: with a warm-up of 3 the clock starts at the row of step 2."""
    log = RunLog(tmp_path / "r", "r", "scale", 2, "", {}, {})
    for rank in range(2):
        times = [100.0, 150.0, 152.0, 154.0, 156.0]  # the second step compiles
        values = array("d", [number for step, time in enumerate(times) for number in (time, 1000 + step, 32.0)])
        log.put(encode([MetricBatch(log.run, rank, ("samples",), values)]))
        spent = {"training": 10.0, "communication": 4.0, "waiting": 3.0, "data_wait": 1.0}
        log.put(encode([Ended(log.run, rank, "ok", 60.0, spent)]))
    log.finish("ok")
    run = measured_run(log, warmup=3)
    assert (run.ranks, run.seconds, run.rate, run.batch) == (2, 4.0, 32.0, 64.0)
    assert run.shares == pytest.approx(
        {**dict.fromkeys(PARTS, 0.0), "compute": 0.5, "data": 0.1, "moving": 0.1, "waiting": 0.3}
    )
    assert measured_run(log, warmup=1).rate == pytest.approx(2 * 4 * 32 / 56)
    assert measured_run(log, warmup=6).rate == 0.0


def test_rows_of_one_step_are_one_step(tmp_path: Path) -> None:
    """A rank logs a row of each logical rank that it carries: 4 of 16 samples are a batch of 64."""
    log = RunLog(tmp_path / "r", "r", "scale", 1, "", {}, {})
    rows = [(100.0 + step + turn / 10, 1000 + step, 16.0) for step in range(4) for turn in range(4)]
    log.put(encode([MetricBatch(log.run, 0, ("samples",), array("d", [number for row in rows for number in row]))]))
    log.put(encode([Ended(log.run, 0, "ok", 60.0, {"training": 10.0})]))
    log.finish("ok")
    run = measured_run(log, warmup=1)
    assert (run.batch, run.rate) == (64.0, pytest.approx(64.0))


def test_what_was_predicted_is_dashed_with_its_interval() -> None:
    shares = dict.fromkeys(PARTS, 0.2)
    points = [Scaling(n, 1.0, 100.0 * n, 64.0, 0.0, float(n), 1.0, shares) for n in (1, 2)]
    measured_only = drawn(ScalingReport(points))
    assert "predicted" not in measured_only
    report = ScalingReport([*points, Scaling(8, 1.0, 400.0, 64.0, 0.0, 4.0, 0.5, shares, (0.4, 0.6))])
    picture = drawn(report)
    assert "predicted" in picture
    assert picture.count("stroke-dasharray=") == measured_only.count("stroke-dasharray=") + 2  # line and legend
    assert "fill-opacity=" in picture
    assert "8 predicted" in repr(report)


def drawn(report: ScalingReport) -> str:
    images = re.findall(r"data:image/svg\+xml;base64,([^']+)", report._repr_html_())
    return "".join(base64.b64decode(image).decode() for image in images)
