"""Curves stay bounded and keep their shape."""

import math

import pytest

from ring_notebook.notebook.record.series import Rate, Series


def test_keeps_every_value_while_there_is_room() -> None:
    series = Series(limit=8)
    series.extend([1, 2, 3], [10, 20, 30])
    assert list(series.points().x) == [1, 2, 3]
    assert list(series.points().y) == [10, 20, 30]


def test_joins_neighbours_when_full() -> None:
    series = Series(limit=4)
    series.extend([1, 2, 3, 4], [10, 20, 30, 50])
    assert [list(axis) for axis in series.points()] == [[1.5, 3.5], [15, 40]]
    series.extend([5], [7])  # half of the next pair: shown as it is until its partner comes
    assert [list(axis) for axis in series.points()] == [[1.5, 3.5, 5], [15, 40, 7]]


@pytest.mark.parametrize("chunk", [1, 7, 100_000])
def test_a_long_run_is_bounded_and_keeps_its_mean(chunk: int) -> None:
    series = Series(limit=100)
    total = 100_000
    for start in range(0, total, chunk):
        steps = range(start, min(start + chunk, total))
        series.extend(steps, [2.0 * step for step in steps])
        if start % 9_000 == 0:
            assert len(series.points().x) <= 100
    points = series.points()
    assert 50 <= len(points.x) <= 100
    assert all(y == pytest.approx(2 * x) for x, y in zip(*points, strict=True))
    assert list(points.x) == sorted(points.x)


def test_nan_is_a_gap_and_not_the_end() -> None:
    series = Series(limit=4)
    series.extend(range(8), [math.nan, 1, 1, 1, 3, 3, 3, 3])
    y = list(series.points().y)
    assert math.isnan(y[0])
    assert y[-1] == 3


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_limit_that_cannot_be_halved_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit={limit}"):
        Series(limit)


def test_rate_counts_what_came_after_the_first_value() -> None:
    rate = Rate(origin=100.0, interval=0.5)
    rate.extend([102.0, 102.25, 102.5], [64, 64, 64])
    assert rate.total == 192
    assert rate.current() == rate.mean() == pytest.approx(128 / 0.5)
    assert [list(axis) for axis in rate.points()] == [[2.25], [256]]


def test_rate_forgets_what_is_older_than_its_window() -> None:
    rate = Rate(origin=0.0, interval=0.5, window=2.0)
    rate.extend([0, 1, 2, 3, 4, 5, 6], [10, 10, 10, 10, 50, 50, 50])
    assert rate.current() == pytest.approx(50)
    assert rate.mean() == pytest.approx(180 / 6)


def test_a_run_shorter_than_an_interval_has_a_rate() -> None:
    rate = Rate(origin=0.0, interval=0.5)
    rate.extend([1.0, 1.1, 1.2], [10, 10, 10])
    assert rate.current() == rate.mean() == pytest.approx(100)
    assert len(rate.points().x) == 0


def test_rate_is_zero_before_it_can_be_known() -> None:
    rate = Rate(origin=0.0)
    assert rate.current() == 0
    rate.extend([1.0], [10])
    assert rate.current() == 0


def test_points_are_copied_once_until_another_value_comes() -> None:
    series = Series(8)
    series.extend((0.0, 1.0, 2.0), (1.0, 2.0, 3.0))
    points = series.points()
    assert series.points() is points
    series.extend((3.0,), (4.0,))
    assert list(points.y) == [1.0, 2.0, 3.0]
    assert list(series.points().y) == [1.0, 2.0, 3.0, 4.0]


def test_values_of_one_step_are_one_point() -> None:
    """As of batches whose gradients are accumulated: drawn one by one they are strokes over each other."""
    series = Series(8)
    series.extend([0, 0, 0, 1], [1, 2, 6, 5])
    series.extend([1, 2], [7, 1])
    assert [list(line) for line in series.points()] == [[0, 1, 2], [3, 6, 1]]
    series.extend([2, 2, 3], [math.nan, 1, 4])  # now each two values have been joined
    assert list(series.points().x) == [0, 0.5, 1.5, 2, 3]
