"""The table of a run in progress: what has not changed is not made again, and what is shown is what there is."""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Callable
from types import FrameType

from ring_notebook.notebook.colors import PHASE_COLORS, rank_color
from ring_notebook.notebook.panel import machines, rank_table
from ring_notebook.notebook.record.run_view import RunState, RunView
from ring_notebook.protocol.records import Load, MetricBatch, Status

RANKS = 4


def step(state: RunState, rank: int, second: int) -> None:
    """A second of one rank."""
    now = state.started + second
    state.apply(MetricBatch("run", rank, ("loss", "samples"), array("d", (now, second, 1 / (second + 1), 8.0))), now)
    facts = {"training": 1.0 + second, "communication": 0.5, "waiting": 0.25}
    state.apply(Status("run", rank, now, 3, progress=(second, 100), extra=facts), now)
    values = {"cpu": 50.0 + 40 * (second % 2), "memory": 2.0**30 * (1 + second + rank)}
    state.apply(Load("run", rank, now, values), now)


def running() -> RunState:
    state = RunState(RANKS, 1000.0)
    for second in range(60):
        for rank in range(RANKS):
            step(state, rank, second)
    return state


def page(view: RunView) -> str:
    return rank_table.html(rank_table.table(view))


def calls(action: Callable[[], object]) -> int:
    """How many functions the action calls, whatever the machine does besides."""
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_a_table_drawn_again_costs_what_has_changed() -> None:
    state = running()
    first = calls(lambda: page(state.view(1060.0)))
    again = calls(lambda: page(state.view(1060.2)))
    step(state, 1, 60)
    one = calls(lambda: page(state.view(1060.4)))
    assert again < first / 3
    assert again < one < first


def test_what_is_remembered_is_what_there_is() -> None:
    state = RunState(RANKS, 1000.0)
    for second in range(5):
        for rank in range(RANKS):
            before = state.view(1000.0 + second)
            shown = page(before)
            step(state, rank, second)
            view = state.view(1000.0 + second)
            remembered = page(view)
            for cached in (machines._highest, machines._cell, rank_table._bar, rank_table._row):
                cached.cache_clear()
            assert page(view) == remembered
            assert page(before) == shown, "a view does not change"
    state.apply(Load("run", 2, 1006.0, {"gpu": 20.0}), 1006.0)
    assert "GPU" in page(state.view(1006.0))


def test_any_page_leaves_out_columns_that_it_has_no_room_for() -> None:
    """The last metrics first, and the pace before them; each from a width on that grows with all that stands before."""
    state = running()
    names = ("loss", "validation/top5_accuracy", "scheduler/learning_rate", "a", "b", "c", "d", "e")
    state.apply(MetricBatch("run", 0, names, array("d", (1060.0, 60, *(0.5,) * 8))), 1060.0)
    content = rank_table.table(state.view(1060.0))
    assert content.folds == (*names[:6], "and 2 more metrics", "samples/s")
    page = rank_table.html(content)
    widths = [max(map(int, re.findall(rf"<= (\d+)px\) {{ .\S+ .ring-fold-{number} ", page))) for number in range(8)]
    assert widths == sorted(widths)
    assert widths[0] < 700 < 900 < widths[-1]
    for number, name in enumerate(content.folds):
        assert page.count(f"ring-fold-{number}'") == 1 + RANKS, name


def test_metrics_stand_together_before_the_load_of_the_machines() -> None:
    state = running()
    names = tuple(f"metric_{number:02}" for number in range(15))
    state.apply(MetricBatch("run", 0, names, array("d", (1060.0, 60, *range(15)))), 1060.0)
    content = rank_table.table(state.view(1060.0))
    start = content.columns.index("loss")
    assert content.columns[start:] == ("loss", *names[:5], "and 10 more metrics", "CPU", "memory")
    assert content.rows[0][start + 1 : start + 4] == ("0", "1", "2")
    assert content.rows[0][-2].endswith("90%")
    assert set(names[:5]) < set(content.folds)
    state = running()
    state.apply(MetricBatch("run", 0, names[:6], array("d", (1060.0, 60, *range(6)))), 1060.0)
    seven = rank_table.table(state.view(1060.0)).columns
    assert seven[start:] == ("loss", *names[:6], "CPU", "memory"), "as wide as the words for the one that is left out"


def test_no_color_means_a_rank_and_a_phase() -> None:
    ranks = [rank_color(rank) for rank in range(rank_table.MOST_COLORS)]
    phases = list(PHASE_COLORS.values())
    assert min(apart(phase, rank) for phase in phases for rank in ranks) > 25
    assert min(apart(one, other) for index, one in enumerate(phases) for other in phases[:index]) > 25


def apart(one: str, other: str) -> float:
    """The distance of two colors in CIELAB, where 2 can just be told apart."""
    return math.dist(cielab(one), cielab(other))


def cielab(color: str) -> tuple[float, float, float]:
    shares = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares)
    white = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
    )
    x, y, z = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in white)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_ranks_that_wait_for_the_end_of_a_pause_are_paused_and_owe_no_sign_of_life() -> None:
    state = running()
    facts = {"training": 60.0, "communication": 0.5, "waiting": 0.25}
    for rank in range(RANKS):
        state.apply(Status("run", rank, 1060.0, 3, progress=(59, 100), extra={**facts, "paused": True}), 1060.0)
    content = rank_table.table(state.view(1090.0))
    assert {row[1] for row in content.rows} == {"paused"}
    assert "silent for" not in content.columns
    for rank in range(RANKS):
        state.apply(Status("run", rank, 1090.0, 3, progress=(59, 100), extra=facts), 1090.0)
    content = rank_table.table(state.view(1090.0))
    assert {row[1] for row in content.rows} == {"running"}
    assert "silent for" in content.columns
