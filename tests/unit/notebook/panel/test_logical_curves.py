"""Logical ranks in panels and reports: each has its own curve and newest values, whatever rank carries it."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import pytest

from ring_notebook.notebook.panel import headline, rank_table
from ring_notebook.notebook.panel.charts.chart import Chart, charts, results
from ring_notebook.notebook.panel.comparison import Comparison
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.tags_and_look import Look
from ring_notebook.notebook.run.equal_runs import compared
from ring_notebook.protocol.records import Ended, MetricBatch, Params, Record, encode
from ring_notebook.text.words import plural

LOGICAL, STEPS = 8, 5


def loss(turn: int, step: int) -> float:
    return math.nan if (turn, step) == (5, 4) else 1 / (step + 1) + turn


def run(directory: Path, size: int, logical: int = LOGICAL, before: tuple[Record, ...] = ()) -> RunLog:
    """A run whose ranks log the loss of each logical rank in its turn, and behind them the loss of a test."""
    log = RunLog(directory, directory.name, f"on {size}", size, "", {}, {})
    log.put(encode([Params(log.run, rank, {"logical_ranks": logical}) for rank in range(size)]))
    log.put(encode(before))
    for rank in range(size):
        first, end = (one * logical // size for one in (rank, rank + 1))
        rows = [(step, turn) for step in range(STEPS) for turn in range(first, end)]
        values = array("d")
        for place, (step, turn) in enumerate(rows):
            values.extend((log.started + place / (end - first), step, turn, loss(turn, step), 4.0))
        tested = array("d", (log.started + STEPS, STEPS, 0.5 + rank))
        names = ("logical_rank", "loss", "samples")
        log.put(encode([MetricBatch(log.run, rank, names, values), MetricBatch(log.run, rank, ("tested",), tested)]))
    log.put(encode([Ended(log.run, rank, "ok", 3.0) for rank in range(size)]))
    log.finish("ok", "")
    return log


def drawn(log: RunLog, x: str = "step") -> Chart:
    return charts(log.view(), ["loss"], Look(x=x))[0]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_each_has_its_curve_on_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    log = run(tmp_path / "run", size)
    view = log.view()
    assert {turn: [*map(repr, points.y)] for turn, points in view.curves["loss"].items()} == {
        turn: [repr(loss(turn, step)) for step in range(STEPS)] for turn in range(LOGICAL)
    }
    assert list(view.curves["tested"]) == list(range(size))
    chart = drawn(log)
    assert [line.label for line in chart.curves.lines] == ["mean of 8", *(f"logical {turn}" for turn in range(8))]
    assert chart.note.startswith("NaN on logical rank 5")
    assert [mark.label for mark in chart.broken] == ["NaN, logical rank 5"]
    content = headline.headline(log, view)
    assert f"8 logical ranks on {plural(size, 'rank')}" in content.facts
    assert "loss is NaN on logical rank 5 since step 4" in content.alarms
    everything, _ = results(view, "tested")
    assert everything == sum(0.5 + rank for rank in range(size)) / size


@pytest.mark.parametrize("axis", ["time", "samples"])
def test_other_axes_are_those_of_the_ranks(tmp_path: Path, axis: str) -> None:
    """Also of ranks that carry different numbers of logical ranks."""
    uneven, each = (drawn(run(tmp_path / f"{size}", size), axis).curves.lines[0] for size in (3, 8))
    assert uneven.x[-1] == pytest.approx(each.x[-1], abs=1)
    if axis == "samples":
        assert uneven.x.tolist() == each.x.tolist() == [32.0 * (step + 1) for step in range(STEPS)]


def test_the_table_has_them_below_their_ranks(tmp_path: Path) -> None:
    content = rank_table.table(run(tmp_path / "2", 2).view(), still=True)
    place = content.columns.index("loss")
    assert [row[0] for row in content.rows] == [
        *("0", "logical 0", "logical 1", "logical 2", "logical 3"),
        *("1", "logical 4", "logical 5", "logical 6", "logical 7"),
    ]
    values = ["1.7", "0.2", "1.2", "2.2", "3.2", "nan", "4.2", "nan", "6.2", "7.2"]
    assert [row[place] for row in content.rows] == values
    page = rank_table.html(content)
    assert page.count("■</span> logical ") == 8
    assert page.count("<tr>") == page.count("</tr>") == 11
    each = rank_table.table(run(tmp_path / "8", 8).view(), still=True)
    assert [row[0] for row in each.rows] == [str(rank) for rank in range(8)]


def test_what_was_logged_outside_of_turns_is_that_of_the_first_one(tmp_path: Path) -> None:
    before = [MetricBatch("run", rank, ("loss",), array("d", (0.0, -1, 9.0))) for rank in range(2)]
    view = run(tmp_path / "run", 2, before=tuple(before)).view()
    assert [turn for turn, points in view.curves["loss"].items() if points.y[0] == 9.0] == [0, 4]


def test_runs_on_other_numbers_of_ranks_are_compared(tmp_path: Path) -> None:
    one, two = run(tmp_path / "1", 1), run(tmp_path / "2", 2)
    found = {row[0]: row[1:] for row in Comparison([one, two], {}).outcome().rows}
    assert found["best loss"][0] == found["best loss"][1]
    said = compared(one, two, ("one", "two"))
    assert said == "Equal bit by bit: 40 values of loss, 40 values of samples, 1 value of tested.", said
    said = compared(two, run(tmp_path / "again", 2, logical=2), ("two", "again"))
    assert "Not equal: loss differs first at step 0 of rank 2" in said, said
    assert "2 values of tested" in said, said
