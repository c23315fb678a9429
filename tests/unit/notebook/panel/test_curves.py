"""Which lines a chart shows, and on which axes."""

import math
from array import array

import numpy as np
import pytest

from ring_notebook.notebook.panel.charts.axes import Scale, for_log_axis, margin, scales
from ring_notebook.notebook.panel.charts.curves import Curves, many, per_rank, smoothed
from ring_notebook.notebook.record.series import Points


def points(x: list[float], y: list[float]) -> Points:
    return Points(array("d", x), array("d", y))


def by_label(curves: Curves) -> dict[str, list[float]]:
    return {line.label: line.y.tolist() for line in curves.lines}


def test_two_ranks_are_two_lines_on_their_own_steps() -> None:
    curves = per_rank({0: points([1, 2], [5, 6]), 3: points([1, 4], [7, 8])})
    assert by_label(curves) == {"rank 0": [5, 6], "rank 3": [7, 8]}
    assert [line.x.tolist() for line in curves.lines] == [[1, 2], [1, 4]]
    assert curves.band is None
    assert len({line.color for line in curves.drawn}) == 2


def test_three_ranks_are_a_mean_and_a_band() -> None:
    curves = per_rank({rank: points([0, 1], [rank, 2 * rank]) for rank in range(3)})
    assert [line.label for line in curves.drawn] == ["mean of 3"]
    assert by_label(curves)["mean of 3"] == [1, 2]
    assert curves.band is not None
    assert (curves.band.low.tolist(), curves.band.high.tolist()) == ([0, 0], [2, 4])


def test_chosen_ranks_are_drawn_beside_the_mean() -> None:
    lines = {rank: points([0, 1], [rank, 2 * rank]) for rank in range(200)}
    assert [line.label for line in per_rank(lines, chosen=[150]).drawn] == ["mean of 200", "rank 150"]


def test_the_rank_that_differs_is_drawn_by_itself() -> None:
    steps = [float(step) for step in range(100)]
    noise = np.random.default_rng(0).normal(0, 0.05, (8, 100))
    alike = {rank: points(steps, (1 + row).tolist()) for rank, row in enumerate(noise)}
    assert [line.label for line in per_rank(alike).drawn] == ["mean of 8"]
    apart = alike | {5: points(steps, (1.5 + noise[5]).tolist())}
    assert [line.label for line in per_rank(apart).drawn] == ["mean of 8", "rank 5"]
    host = apart | {rank: points(steps, (1.4 + noise[rank]).tolist()) for rank in (4, 6)}
    assert [line.label for line in per_rank(host).drawn] == ["mean of 8", "rank 4", "rank 5", "rank 6"]
    gone = apart | {2: points(steps, [math.nan] * 100)}
    assert [line.label for line in per_rank(gone).drawn] == ["mean of 8", "rank 5"]


def test_a_few_steps_make_no_rank_differ() -> None:
    lines = {rank: points([0, 1, 2], [float(rank == 1)] * 3) for rank in range(4)}
    assert len(per_rank(lines).drawn) == 1


def test_ranks_that_logged_at_other_steps_share_a_grid() -> None:
    curves = per_rank({rank: points([5.0 * rank, 10 + 5 * rank], [0, 10]) for rank in range(3)})
    mean = curves.lines[0]
    assert (mean.x[0], mean.x[-1]) == (0, 20)
    assert np.isfinite(mean.y).all()
    assert np.isnan(curves.lines[1].y[mean.x > 10]).all()


def test_ranks_that_are_a_few_steps_apart_are_compared_where_all_have_been() -> None:
    lengths = (100, 97, 98, 99)
    lines = {
        rank: points(range(length), [1 / (step + 1) + (rank == 2) for step in range(length)])
        for rank, length in enumerate(lengths)
    }
    curves = per_rank(lines)
    assert [line.label for line in curves.drawn] == ["mean of 4", "rank 2"], "also while the ranks do not keep step"
    mean = curves.lines[0]
    assert mean.x[-1] == 96
    assert mean.y[-1] == pytest.approx(1 / 97 + 0.25), "of all ranks, also at the end"
    lines[3] = points(range(9), [1.0] * 9)
    assert per_rank(lines).lines[0].x[-1] == 99, "a rank that logs no more hides nothing"


def test_a_gap_of_one_rank_leaves_the_mean_of_the_others() -> None:
    curves = per_rank({rank: points([0], [math.nan if rank == 0 else 2.0]) for rank in range(9)})
    assert by_label(curves)["mean of 9"] == [2.0]
    everything_lost = per_rank({rank: points([0], [math.nan]) for rank in range(9)})
    assert math.isnan(everything_lost.lines[0].y[0])


def test_runs_over_one_another() -> None:
    curves = many({"a": {0: points([0, 1], [1, 1]), 1: points([0, 1], [3, 3])}, "b": {0: points([0, 1], [9, 8])}})
    assert by_label(curves) == {"a": [2, 2], "b": [9, 8]}


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([4.0, 2.0, 3.0], 0.0, [4.0, 2.0, 3.0]),
        ([4.0, 2.0], 0.5, [4.0, (0.5 * 4 + 2) / 1.5]),
        ([math.nan, 4.0, math.inf, 2.0], 0.5, [math.nan, 4.0, math.nan, (0.5 * 4 + 2) / 1.5]),
        ([3.0] * 50, 0.9, [3.0] * 50),
        ([[4.0, 2.0], [math.nan, 1.0]], 0.5, [[4.0, 4 / 1.5], [math.nan, 1.0]]),
        ([], 0.9, []),
    ],
)
def test_smoothing_begins_at_the_first_value_and_leaves_gaps(
    values: list[float], share: float, expected: list[float]
) -> None:
    assert smoothed(np.array(values), share) == pytest.approx(np.array(expected), nan_ok=True)


def test_a_smooth_line_has_its_own_values_behind_it() -> None:
    rows = {rank: points([0, 1], [rank, rank + 2]) for rank in range(3)}
    (alone,) = per_rank({0: rows[0]}, 0.5).lines
    assert (alone.y.tolist(), alone.raw.tolist()) == ([0, 2 / 1.5], [0, 2])  # type: ignore[union-attr]
    assert [line.raw for line in per_rank({0: rows[0]}).lines] == [None]
    mean, first, *_ = per_rank(rows, 0.5).lines
    assert (mean.raw.tolist(), first.raw.tolist()) == ([1, 3], [0, 2])  # type: ignore[union-attr]
    assert [line.raw.tolist() for line in many({"a": rows}, 0.5).lines] == [[1, 3]]  # type: ignore[union-attr]


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


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    _, y = scales(per_rank({0: points([0, 1, 2], [100, 1, 0.001])}), from_zero=False, log=True)
    assert y.log
    assert set(y.ticks) >= {0.001, 0.01, 0.1, 1, 10, 100}
    assert y.place(0.001) < y.place(1) < y.place(100)
    assert y.place(10) - y.place(1) == pytest.approx(y.place(1) - y.place(0.1))


def test_zeros_are_left_out_of_a_logarithmic_axis() -> None:
    """A loss of exactly 0 at one step, also of one rank of many, whose band would end at 0."""
    lines = {rank: points([0, 1, 2], [1, 0 if rank < 3 else 0.5, 0.1]) for rank in range(4)}
    for some in ({0: lines[0]}, lines):
        kept = for_log_axis(per_rank(some))
        assert kept is not None
        _, y = scales(kept, from_zero=False, log=True)
        assert y.log
        assert y.low >= 0.1
        assert all(np.nanmin(line.y) > 0 for line in kept.lines)
        assert math.isnan(for_log_axis(per_rank({0: lines[0]})).lines[0].y[1])  # type: ignore[union-attr]
    for values in ([1, -1, 2], [0, 0, 0], [math.nan] * 3):
        assert for_log_axis(per_rank({0: points([0, 1, 2], values)})) is None


@pytest.mark.parametrize(
    ("values", "low", "high", "longest"),
    [
        ([0.1674, 294271.7], 0.1, 500_000, "500,000"),
        ([2.5e-6, 1e-3], 2e-6, 1e-3, "0.000002"),
        ([0.26, 0.973], 0.2, 1, "0.2"),
        ([3.0, 3.1], 2, 5, "2"),
    ],
)
def test_no_label_of_a_logarithmic_axis_is_cut(values: list[float], low: float, high: float, longest: str) -> None:
    _, y = scales(per_rank({0: points([0, 1], values)}), from_zero=False, log=True)
    assert (y.low, y.high) == (low, high), "what a live chart writes at its ends is round"
    assert margin(y) >= 7 * len(longest)


def test_no_label_of_a_linear_axis_is_cut() -> None:
    """A live chart writes small numbers without an exponent."""
    _, y = scales(per_rank({0: points([0, 1], [0, 2.2e-7])}), from_zero=False)
    assert margin(y) >= 7 * len("0.00000025")


@pytest.mark.parametrize(
    ("x", "ticks"), [([1, 2], (1, 2)), ([0, 1, 3], (0, 1, 2, 3)), ([0.5, 1], (0.5, 0.6, 0.7, 0.8, 0.9, 1))]
)
def test_there_is_no_half_step_or_rank(x: list[float], ticks: tuple[float, ...]) -> None:
    scale, _ = scales(per_rank({0: points(x, x)}), from_zero=False)
    assert scale.ticks == ticks
    assert not scale.finer_ticks or x[0] == 0.5


@pytest.mark.parametrize("step", [0, 1, 100])
def test_a_single_step_is_the_only_tick(step: float) -> None:
    x, _ = scales(per_rank({0: points([step], [0.97])}), from_zero=False)
    assert (x.ticks, x.place(step)) == ((step,), 0.5)
    assert not x.finer_ticks


def test_a_value_of_zero_makes_an_axis_linear() -> None:
    assert not scales(per_rank({0: points([0, 1], [0, 1])}), from_zero=False, log=True)[1].log


def test_a_rate_starts_at_zero() -> None:
    x, y = scales(per_rank({0: points([1, 2], [900, 1000])}), from_zero=True)
    assert x.low == 1
    assert y.low == 0
    assert y.high >= 1000


def test_ticks_that_lie_close_differ_in_their_labels() -> None:
    """Of values that ranks compute alike but for the last bit, and of those that hardly change."""
    _, alike = scales(per_rank({0: points([600], [0.18052566]), 1: points([600], [0.18052567])}), from_zero=False)
    _, near = scales(per_rank({0: points([0, 1], [100.0011, 100.0094])}), from_zero=False)
    far = Scale(1_000_000.0, 1_000_010.0)
    for scale in (alike, near, far):
        labels = [scale.label(tick) for tick in scale.ticks]
        assert len(set(labels)) == len(labels), labels
    assert near.label(100.002) == "100.002"
    assert far.label(1_000_002.0) == "1,000,002"


def test_ticks_of_what_diverges_are_short() -> None:
    _, y = scales(per_rank({0: points([0, 1], [1.0, 4.4e34])}), from_zero=True)
    assert [y.label(tick) for tick in y.ticks] == ["0", "1e+34", "2e+34", "3e+34", "4e+34", "5e+34"]
    assert 45 < margin(y, "step") < 60


@pytest.mark.parametrize(
    ("values", "from_zero", "ticks"),
    [
        ([0.1, 0.1], False, (0.0, 0.05, 0.1, 0.15, 0.2)),
        ([0.0, 0.0], False, (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)),
        ([0.97], False, (0.4, 0.6, 0.8, 1.0)),  # an accuracy is not above 1
        ([1.0, 1.0], False, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)),
        ([2.5], False, (1.0, 2.0, 3.0, 4.0)),
        ([0.0, 0.0], True, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ([0.75, 4.23], False, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)),
    ],
)
def test_the_y_axis_is_from_tick_to_tick(values: list[float], from_zero: bool, ticks: tuple[float, ...]) -> None:
    """As a live chart counts them: from the beginning of the axis."""
    _, y = scales(per_rank({0: points([0, 1][: len(values)], values)}), from_zero=from_zero)
    assert y.ticks == ticks
    assert y.low + y.step * (len(ticks) - 1) == pytest.approx(y.high)


def test_single_points_of_ranks_at_different_places_are_a_point() -> None:
    (line,) = many({"run": {0: points([1], [4]), 1: points([2], [6])}}).lines
    assert (line.x.tolist(), line.y.tolist(), line.marked) == ([1.5], [5.0], True)
