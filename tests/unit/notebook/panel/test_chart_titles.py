"""What stands beside the title of a chart: the newest value, where it goes, and the best."""

from __future__ import annotations

import math
from array import array

from ring_notebook.notebook.panel.charts.chart import charts
from ring_notebook.notebook.record.choices import Look
from ring_notebook.notebook.record.run_view import RunState
from ring_notebook.records import MetricBatch


def test_a_rank_without_numbers_leaves_those_of_the_other_in_the_title() -> None:
    state = RunState(2, 0.0)
    for rank in range(2):
        losses = [1.0 if step < 20 or rank == 0 else math.nan for step in range(40)]
        rows = array("d", (value for step, loss in enumerate(losses) for value in (step, step, loss / (step + 1))))
        state.apply(MetricBatch("run", rank, ("loss",), rows), 40.0)
    (chart,) = charts(state.view(40.0), ["loss"], Look())
    assert chart.note.startswith("0.025 ")
    assert chart.best == (39, 0.025)
