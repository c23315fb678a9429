"""Changes of knobs in charts and reports: marks at their steps, labels apart from each other, lines of text."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from ring_notebook.notebook.panel.charts.chart import MOST_CHANGES, charts, parting
from ring_notebook.notebook.panel.report import changes_text
from ring_notebook.notebook.record.run_view import RunState, RunView
from ring_notebook.notebook.record.series import Points
from ring_notebook.notebook.record.tags_and_look import Look
from ring_notebook.notebook.run.knob_changes import parted
from ring_notebook.protocol.knobs import Range, encoded, made, unknown
from ring_notebook.protocol.records import Change, KnobRecord, MetricBatch


def change(number: int, step: int, action: str = "set", rank: int = 0, **values: object) -> Change:
    return Change("run", rank, 10.0 + step, number, action, values, "me, panel", step + 1, step)  # type: ignore[arg-type]


def view(*changes: Change) -> RunView:
    state = RunState(2, 10.0)
    rows = array("d", [one for step in range(100) for one in (10.0 + step, step, 1 / (step + 1))])
    state.apply(MetricBatch("run", 0, ("loss",), rows), 100.0)
    state.apply(KnobRecord("run", 0, "lr", 0.1, encoded(Range(0.1, 0.0))), 100.0)
    for one in changes:
        state.apply(one, 100.0)
    return state.view(110.0)


def test_each_change_is_a_mark_once() -> None:
    seen = view(change(1, 10, lr=0.05), change(1, 10, rank=1, lr=0.05), change(2, 50, "pause"), change(3, 50, "resume"))
    (chart,) = charts(seen, ["loss"], Look())
    assert [(mark.x, mark.label) for mark in chart.changes] == [(10, "lr 0.05"), (50, "paused")]
    (by_time,) = charts(seen, ["loss"], Look(x="time"))
    assert [mark.x for mark in by_time.changes] == [10, 50]
    assert seen.knobs["lr"].value == 0.05
    assert changes_text(seen) == [
        "step 10: lr = 0.05 (me, panel)",
        "step 50: pause (me, panel)",
        "step 50: resume (me, panel)",
    ]
    assert not parted(seen)
    (waits,) = charts(view(change(1, 100, "pause")), ["loss"], Look())
    assert [mark.x for mark in waits.changes] == [99], "its step has not been made"


def test_labels_lie_apart_and_many_marks_have_none() -> None:
    (chart,) = charts(view(change(1, 10, lr=0.05), change(2, 12, lr=0.04), change(3, 30, lr=0.03)), ["loss"], Look())
    assert [mark.label for mark in chart.changes] == ["lr 0.05", "", "lr 0.03"]
    (chart,) = charts(view(*(change(n + 1, n, lr=1 / (n + 1)) for n in range(90))), ["loss"], Look())
    assert len(chart.changes) == MOST_CHANGES
    assert not any(mark.label for mark in chart.changes)


def test_ranks_that_took_a_change_apart_are_named() -> None:
    seen = view(change(1, 10, lr=0.05), change(1, 11, rank=1, lr=0.05))
    assert parted(seen) == "rank 1 took change 1 after 12 steps, rank 0 after 11"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("x", [1], None, None, None, ()), "a number, a bool or a str"),
        (("x", "a", None, None, None, ()), "needs choices"),
        (("x", True, 0, 1, None, ()), "for numbers, not for a bool"),
        (("x", 2.0, 0, 1, None, ()), "takes numbers from 0 to 1"),
        (("x", 0.5, 1, 0, None, ()), "low must be less than high"),
        (("x", 0.5, 0, 1, True, ()), "needs a low above 0"),
        (("x", "c", None, None, None, ("a", "b")), "takes one of a, b"),
    ],
)
def test_a_knob_that_contradicts_itself(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        made(*arguments)  # type: ignore[arg-type]


def test_values_are_read_as_their_knob_takes_them() -> None:
    assert made("x", 0.1, 1e-5, 1, None, ()).log
    assert not made("x", 0.1, 0, 1, None, ()).log
    assert Range(3).read("7", "x") == 7
    assert Range(False).read("on", "x") is True
    assert Range("a", choices=("a", 2)).read("2", "x") == 2
    assert Range(0.001, choices=(0.001, 0.1)).read("1e-3", "x") == 0.001
    assert Range(0.001, choices=(0.001, 0.1)).read(".1", "x") == 0.1
    assert Range(True, choices=(True, False)).read("off", "x") is False
    with pytest.raises(ValueError, match="takes one of 1, b"):
        Range(1, choices=(1, "b")).read("true", "x")
    assert Range(0.1).checked(1, "x") == 1.0
    for wrong in ("nan", "inf", "x", ""):
        with pytest.raises(ValueError, match="takes numbers"):
            Range(0.1).read(wrong, "x")
    assert unknown("lrr", ["lr", "noise"]) == "there is no knob 'lrr'; did you mean lr?"


def noisy_losses(ranks: int, seed: int, apart: float = 0.0) -> list[Points]:
    """400 steps; from step 200 on the last rank stays behind by ``apart``."""
    draw = np.random.default_rng(seed)
    steps = np.arange(400.0)
    rows = [2 * np.exp(-steps / 100) + draw.normal(1, 0.2, 400) for _ in range(ranks)]
    rows[-1][200:] += apart
    return [Points(array("d", steps), array("d", row)) for row in rows]


@pytest.mark.parametrize("ranks", [2, 8])
def test_where_the_losses_of_ranks_part(ranks: int) -> None:
    syncs = np.arange(19.0, 400.0, 20.0)
    assert [parting(noisy_losses(ranks, seed), syncs) for seed in range(50)] == [None] * 50
    assert [parting(noisy_losses(ranks, seed, 0.6), syncs) for seed in range(50)] == [199.0] * 50
    assert parting(noisy_losses(ranks, 0, 0.6), np.arange(2.0, 400.0, 3.0)) is None, "too few steps between syncs"


def test_ranks_that_part_are_marked_where_they_make_local_steps() -> None:
    state = RunState(2, 10.0)
    for rank, (steps, losses) in enumerate(noisy_losses(2, 0, 0.6)):
        rows = array("d", [one for step, loss in zip(steps, losses, strict=True) for one in (10 + step, step, loss)])
        state.apply(MetricBatch("run", rank, ("loss",), rows), 410.0)
    assert not charts(state.view(410.0), ["loss"], Look())[0].changes
    for rank in range(2):
        rows = array("d", [one for step in range(20, 400) for one in (10 + step, step, 1 / (step // 20))])
        state.apply(MetricBatch("run", rank, ("sync/distance",), rows), 410.0)
    of_loss, of_distance = charts(state.view(410.0), ["loss", "sync/distance"], Look())
    assert [(mark.x, mark.label) for mark in of_loss.changes] == [(199.0, "ranks part")]
    assert not of_distance.changes
