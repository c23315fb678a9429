"""Which lines a chart shows, and on which axes."""

import math
from array import array

import numpy as np
import pytest

from ring_notebook.notebook.panel.charts.axes import Scale, scales
from ring_notebook.notebook.panel.charts.curves import many, per_rank
from ring_notebook.notebook.record.series import Points


def points(x: list[float], y: list[float]) -> Points:
    return Points(array("d", x), array("d", y))


def test_a_line_per_rank_on_their_own_steps() -> None:
    curves = per_rank({0: points([1, 2], [5, 6]), 3: points([1, 2], [7, 8])})
    assert curves.labels == ("rank 0", "rank 3")
    assert curves.x.tolist() == [1, 2]
    assert curves.rows.tolist() == [[5, 6], [7, 8]]
    assert curves.band is None
    assert len(set(curves.colors)) == 2


def test_mean_and_band_above_eight_ranks() -> None:
    curves = per_rank({rank: points([0, 1], [rank, 2 * rank]) for rank in range(9)})
    assert curves.labels == ("mean of 9 ranks",)
    assert curves.rows.tolist() == [[4, 8]]
    assert curves.band is not None
    assert curves.band.tolist() == [[0, 0], [8, 16]]


def test_ranks_that_logged_at_other_steps_share_a_grid() -> None:
    curves = per_rank({0: points([0, 10], [0, 10]), 1: points([5, 20], [5, 20])})
    assert curves.x[0] == 0
    assert curves.x[-1] == 20
    first, second = curves.rows
    assert np.allclose(first[curves.x <= 10], curves.x[curves.x <= 10])
    assert np.isnan(first[curves.x > 10]).all()
    assert np.isnan(second[curves.x < 5]).all()


def test_a_gap_of_one_rank_leaves_the_mean_of_the_others() -> None:
    curves = per_rank({rank: points([0], [math.nan if rank == 0 else 2.0]) for rank in range(9)})
    assert curves.rows.tolist() == [[2.0]]
    everything_lost = per_rank({rank: points([0], [math.nan]) for rank in range(9)})
    assert math.isnan(everything_lost.rows[0, 0])


def test_runs_over_one_another() -> None:
    curves = many({"a": {0: points([0, 1], [1, 1]), 1: points([0, 1], [3, 3])}, "b": {0: points([0, 1], [9, 8])}})
    assert curves.labels == ("a", "b")
    assert curves.rows.tolist() == [[2, 2], [9, 8]]


def test_same_only_when_nothing_would_change() -> None:
    one = per_rank({0: points([0, 1], [1, math.nan])})
    assert one.same(per_rank({0: points([0, 1], [1, math.nan])}))
    assert not one.same(per_rank({0: points([0, 1], [1, 2])}))
    assert not one.same(None)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        (0, 210, (0, 50, 100, 150, 200)),
        (-0.3, 2.6, (0, 1, 2)),
        (0.0101, 0.0109, (0.0102, 0.0104, 0.0106, 0.0108)),
        (1e6, 2e6, (1e6, 1.2e6, 1.4e6, 1.6e6, 1.8e6, 2e6)),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert Scale(low, high).ticks == ticks


@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [0.0], [-5.0, -5.0], [1.0, math.inf]])
def test_axes_of_few_or_strange_values_have_a_width(values: list[float]) -> None:
    x = [float(index) for index in range(len(values))]
    for from_zero in (False, True):
        for scale in scales(per_rank({0: points(x, values)}), from_zero):
            assert scale.low < scale.high
            assert scale.ticks


def test_a_rate_starts_at_zero() -> None:
    x, y = scales(per_rank({0: points([1, 2], [900, 1000])}), from_zero=True)
    assert x.low == 1
    assert y.low == 0
    assert y.high >= 1000
