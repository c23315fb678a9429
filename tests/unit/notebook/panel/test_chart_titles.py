"""What stands beside the title of a chart: the newest value, where it goes, and the best."""

from __future__ import annotations

import math
from array import array

import pytest

from ring_notebook.notebook.panel.charts.chart import charts
from ring_notebook.notebook.record.choices import Look
from ring_notebook.notebook.record.run_view import RunState
from ring_notebook.records import MetricBatch


def test_a_rank_without_numbers_leaves_the_best_of_the_other_in_the_title() -> None:
    state = RunState(2, 0.0)
    for rank in range(2):
        losses = [1.0 if step < 20 or rank == 0 else math.nan for step in range(40)]
        rows = array("d", (value for step, loss in enumerate(losses) for value in (step, step, loss / (step + 1))))
        state.apply(MetricBatch("run", rank, ("loss",), rows), 40.0)
    (chart,) = charts(state.view(40.0), ["loss"], Look())
    assert chart.note == "NaN on rank 1 · best 0.025"
    assert chart.best == (39, 0.025)


@pytest.mark.parametrize(
    ("since", "note", "labels"),
    [
        ({0: 21, 1: 21}, "NaN on ranks 0-1 · best 0.04762", ["NaN, ranks 0-1"]),
        ({0: 22, 1: 21}, "NaN on ranks 0-1 · best 0.04545", ["NaN, ranks 0-1", ""]),
        ({1: 21}, "NaN on rank 1 · best 0.025", ["NaN, rank 1"]),
    ],
)
def test_nan_is_said_once_and_no_trend_beside_it(since: dict[int, int], note: str, labels: list[str]) -> None:
    state = RunState(2, 0.0)
    for rank in range(2):
        rows = array("d")
        for step in range(40):
            rows.extend((step, step, math.nan if step >= since.get(rank, 40) else 1 / (step + 1)))
        state.apply(MetricBatch("run", rank, ("loss",), rows), 40.0)
    (chart,) = charts(state.view(40.0), ["loss"], Look())
    assert chart.note == note
    assert [mark.label for mark in chart.broken] == labels, "labels of several ranks would lie over each other"


def test_a_metric_that_has_numbers_again_has_its_trend() -> None:
    state = RunState(1, 0.0)
    rows = array(
        "d", (value for step in range(40) for value in (step, step, math.nan if step == 3 else 1 / (step + 1)))
    )
    state.apply(MetricBatch("run", 0, ("loss",), rows), 40.0)
    (chart,) = charts(state.view(40.0), ["loss"], Look())
    assert chart.note == "0.025 · falling · best 0.025"
    assert [mark.label for mark in chart.broken] == ["NaN, rank 0"]
