"""A live chart shows what it is given, from the first point of the first rank on."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from ring_notebook.notebook import close_widgets
from ring_notebook.notebook.panel.charts.curves import per_rank
from ring_notebook.notebook.panel.charts.live_chart import Chart
from ring_notebook.notebook.record.series import Points


def points(*values: float) -> Points:
    """A value per step."""
    return Points(array("d", range(len(values))), array("d", values))


@pytest.mark.parametrize("ranks", [1, 2, 9])
def test_from_the_first_point_on(ranks: int) -> None:
    chart = Chart("loss", "step")
    for count in range(5):
        chart.draw(per_rank({rank: points(*(rank / (step + 1) for step in range(count))) for rank in range(ranks)}))
        lines = chart.figure.marks[1]
        assert list(lines.x) == (list(range(count)) if count > 1 else [])
    assert np.atleast_2d(lines.y).shape == (ranks if ranks < 9 else 1, 4)
    close_widgets.close(chart.figure)


def test_ranks_that_come_one_after_the_other() -> None:
    chart = Chart("loss", "step")
    chart.draw(per_rank({0: points(1.0), 1: points()}))
    chart.draw(per_rank({0: points(1.0, 0.5, 0.2), 1: points(1.5)}))
    chart.draw(per_rank({0: points(1.0, 0.5, 0.2), 1: points(1.5, 1.0, 0.5)}))
    lines = chart.figure.marks[1]
    assert lines.y.tolist() == [[1.0, 0.5, 0.2], [1.5, 1.0, 0.5]]
    close_widgets.close(chart.figure)
