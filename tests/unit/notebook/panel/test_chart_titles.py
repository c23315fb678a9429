"""What stands beside the title of a chart: the newest value, where it goes, and the best."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from matplotlib.textpath import TextPath

from ring_notebook.notebook.panel.charts.chart import Chart, Mark, axes, charts, compared, grouped, results
from ring_notebook.notebook.panel.charts.curves import Curves, Line
from ring_notebook.notebook.panel.charts.live_chart import LiveChart
from ring_notebook.notebook.panel.charts.svg_chart import _legend, svg
from ring_notebook.notebook.record.run_view import RunState, RunView
from ring_notebook.notebook.record.tags_and_look import Look
from ring_notebook.protocol.records import MetricBatch


def rows(*values: tuple[float, ...]) -> array[float]:
    return array("d", (number for row in values for number in row))


def logged(*ranks: Iterable[tuple[float, ...]], names: tuple[str, ...] = ("loss",)) -> RunView:
    """A run whose ranks have logged these rows: time, step, and the metrics of ``names``."""
    state = RunState(len(ranks), 0.0)
    for rank, own in enumerate(ranks):
        state.apply(MetricBatch("run", rank, names, rows(*own)), 9e9)
    return state.view(9e9)


@pytest.mark.parametrize(
    ("since", "note", "labels"),
    [
        ({0: 21, 1: 21}, "NaN on ranks 0-1 · best 0.04762", ["NaN, ranks 0-1"]),
        ({0: 22, 1: 21}, "NaN on ranks 0-1 · best 0.04545", ["NaN, ranks 0-1", ""]),
        ({1: 21}, "NaN on rank 1 · best 0.025", ["NaN, rank 1"]),
    ],
)
def test_nan_is_said_once_and_no_trend_beside_it(since: dict[int, int], note: str, labels: list[str]) -> None:
    ranks = [[(s, s, math.nan if s >= since.get(rank, 40) else 1 / (s + 1)) for s in range(40)] for rank in range(2)]
    (chart,) = charts(logged(*ranks), ["loss"], Look())
    assert chart.note == note
    assert [mark.label for mark in chart.broken] == labels, "labels of several ranks would lie over each other"


def test_a_metric_that_has_numbers_again_has_its_trend() -> None:
    (chart,) = charts(logged((s, s, math.nan if s == 3 else 1 / (s + 1)) for s in range(40)), ["loss"], Look())
    assert chart.note == "0.025 · falling · best 0.025"
    assert [mark.label for mark in chart.broken] == ["NaN, rank 0"]


def test_a_large_value_is_written_as_on_the_axis() -> None:
    view = logged([(1, 0, 72201.25), (2, 1, 72201.25)], names=("tokens_per_s",))
    (chart,) = charts(view, ["tokens_per_s"], Look())
    assert chart.note.startswith("72,201 ")


def test_the_newest_value_is_that_of_the_table_of_ranks() -> None:
    """The last point of a long curve is the mean of many steps."""
    view = logged(*([(s, s, s + 2 * rank) for s in range(1000)] for rank in range(2)), names=("lr",))
    (chart,) = charts(view, ["lr"], Look())
    assert chart.note == "1000"


def of_ranks(batches: Iterable[tuple[int, Sequence[int]]], loss: Callable[[int, int], float]) -> RunState:
    """Two ranks that have told of these steps, in this order."""
    state = RunState(2, 0.0)
    for rank, steps in batches:
        state.apply(MetricBatch("run", rank, ("loss",), rows(*((at, at, loss(rank, at)) for at in steps))), 9e9)
    return state


def test_the_newest_value_is_not_better_than_the_best() -> None:
    view = of_ranks(((rank, range(1000)) for rank in range(2)), lambda _, step: 2000 - step).view(1000.0)
    (chart,) = charts(view, ["loss"], Look())
    assert chart.note == "1001 · falling · best 1001"


@pytest.mark.parametrize("steps", [30, 1000, 30_000])
def test_the_newest_value_is_of_the_newest_step_that_all_ranks_have_made(steps: int) -> None:
    """Ranks have told of different steps, in progress and at the end."""
    parts = [(rank, range(at, min(at + 999, steps - 4 * rank))) for at in range(0, steps, 999) for rank in range(2)]
    view = of_ranks(parts, lambda rank, step: 1.0 + rank if step == steps - 5 else 9.0).view(9e9)
    assert results(view, "loss") == (1.5, (steps - 5, 1.5))
    assert charts(view, ["loss"], Look())[0].note.startswith("1.5 · ")
    assert math.isnan(results(of_ranks(parts, lambda rank, _: math.nan if rank else 1.0).view(9e9), "loss")[0])
    apart = of_ranks([(0, range(0, 40, 2)), (1, range(1, 41, 2))], lambda rank, step: rank + step)
    assert results(apart.view(9e9), "loss")[0] == (38 + 40) / 2


@pytest.mark.parametrize(("steps", "apart"), [(300, 1), (400, 37), (400, 5000), (1000, 1), (5000, 37), (30_000, 5000)])
def test_the_best_is_of_one_step_however_long_a_run_is(steps: int, apart: int) -> None:
    """Rank 1 is behind. The lowest value of each rank is at another step than that of the mean."""
    lowest = steps // 2 + 1

    def loss(rank: int, step: int) -> float:
        return {lowest: -4.0 - rank, lowest + 9: (-7.0, 2.0)[rank], lowest + 25: (2.0, -7.0)[rank]}.get(step, 1.0)

    begins = range(0, steps, apart)
    parts = [range(begin, min(begin + apart, steps)) for begin in begins]
    view = of_ranks([(rank, part) for part in parts for rank in range(2)], loss).view(9e9)
    assert results(view, "loss")[1] == (lowest, -4.5)
    for look in (Look(), Look(smooth=0.9)):
        (chart,) = charts(view, ["loss"], look)
        assert chart.best == (lowest, -4.5)
        x, y = chart.scales
        assert 0 <= x.place(lowest) <= 1, "the circle is on the chart"
        assert 0 <= y.place(-4.5) <= 1


def test_the_best_is_of_what_all_rows_of_a_step_and_all_ranks_say() -> None:
    """Rows of one step are batches whose gradients are accumulated; a rank may have told of a part of them."""
    twice = [step // 2 for step in range(2000)]
    batches = [(0, twice[:701]), (1, twice[:601]), (1, twice[601:]), (0, twice[701:])]
    view = of_ranks(batches, lambda rank, step: 3.0 if step < 900 else 1.0 + rank + (step - 950) ** 2 / 1e4).view(9e9)
    assert results(view, "loss")[1] == (950, 1.5)
    sparse = of_ranks([(0, range(4000)), (1, range(3, 4000, 100))], lambda rank, step: abs(step - 2001) + rank)
    assert results(sparse.view(9e9), "loss")[1] == (2003, 2.5), "steps of rank 0 alone do not count"
    restarted = of_ranks([(rank, range(600)) for _ in range(3) for rank in range(2)], lambda _, step: abs(step - 411))
    assert results(restarted.view(9e9), "loss")[1] == (411, 0)


def test_the_best_is_of_one_step_while_ranks_have_told_of_different_ones() -> None:
    (chart,) = charts(logged(*([(s, s, 9 - s) for s in range(steps)] for steps in (3, 6))), ["loss"], Look())
    assert chart.best == (2, 7)


def trained(size: int = 2) -> RunState:
    """Four steps, two seconds apart, in two epochs; 8 samples each on every rank."""
    state = RunState(size, 100.0)
    for rank in range(size):
        steps = rows(*((102.0 + 2 * step, step, 4.0 - step + rank, step // 2, 8.0) for step in range(4)))
        state.apply(MetricBatch("run", rank, ("loss", "epoch", "samples"), steps, {"loss": "nats"}), 110.0)
    return state


@pytest.mark.parametrize(
    ("axis", "xlabel", "places", "epochs"),
    [
        ("step", "step", [0, 1, 2, 3], [0, 2]),
        ("time", "seconds", [2, 4, 6, 8], [2, 6]),
        ("samples", "samples", [16, 32, 48, 64], [16, 48]),
        ("epoch", "epoch", [0, 0.5, 1, 1.5], []),
        ("other", "step", [0, 1, 2, 3], [0, 2]),
    ],
)
def test_the_x_axis_is_chosen(axis: str, xlabel: str, places: list[float], epochs: list[float]) -> None:
    view = trained().view(110.0)
    for name in ("loss", "loss+loss"):
        (chart,) = charts(view, [name], Look(x=axis))
        assert chart.xlabel == xlabel
        assert chart.curves.lines[0].x.tolist() == places
        assert [mark.x for mark in chart.epochs] == epochs


@pytest.mark.parametrize("axis", ["step", "samples", "epoch"])
def test_a_run_that_continues_another_lies_over_it(axis: str) -> None:
    whole, again = trained().view(110.0), RunState(2, 200.0)
    for rank in range(2):
        last = rows((201.0, 3, 1.0 + rank, 1.0, 8.0))
        earlier = {"samples": 24.0, "epoch": 1.0, "epoch_step": 2.0}
        again.apply(MetricBatch("again", rank, ("loss", "epoch", "samples"), last, {}, earlier), 201.0)
        more = rows((202.0, 4, 1.0 + rank, 2.0, 8.0))
        again.apply(MetricBatch("again", rank, ("loss", "epoch", "samples"), more), 202.0)
    (chart,) = compared({"whole": whole, "again": again.view(202.0)}, ["loss"], Look(x=axis))
    first, second = chart.curves.lines
    assert chart.xlabel == axis
    assert second.x[0] == first.x[-1]
    assert (second.y[0], first.y[-1]) == (1.5, 1.5)
    assert again.view(202.0).ranks[0].samples == 16.0, "those of this run"


def test_a_run_offers_the_axes_that_it_has() -> None:
    assert axes(trained().view(110.0)) == ("step", "time", "samples", "epoch")
    state = RunState(1, 0.0)
    assert axes(state.view(1.0)) == ("step",)
    state.apply(MetricBatch("run", 0, ("loss",), rows((1, 5, 0.5), (2, 6, 0.4))), 2.0)
    assert axes(state.view(2.0)) == ("step", "time")
    state.apply(MetricBatch("run", 0, ("loss",), rows((3, 0, 0.3))), 3.0)
    assert axes(state.view(3.0)) == ("step",), "a step that comes again has no one time"


def test_units_are_said() -> None:
    view = trained().view(110.0)
    (chart,) = charts(view, ["loss"], Look())
    assert (chart.values, chart.note) == ("nats", "1.5 nats · best 1.5")
    assert charts(view, ["loss+loss"], Look())[0].values == "nats"


def test_what_it_would_be_at_every_step_is_in_the_same_chart() -> None:
    view = logged([(1, 0, 1.0, 50.0), (2, 1, 2.0, 100.0)], names=("sync/MB", "sync/MB_every_step"))
    (chart,) = [one for _, drawn in grouped(view, (), Look(), 6) for one in drawn]
    assert [(line.label, line.y.tolist(), line.sparse) for line in chart.curves.lines] == [
        ("rank 0", [1.0, 2.0], False),
        ("sync/MB_every_step", [50.0, 100.0], True),
    ]
    assert (chart.title, chart.note, chart.values) == ("sync/MB", "2 MB", "MB")


def test_charts_are_in_their_places_before_they_have_values() -> None:
    """Live; a report has only charts with values."""
    state = RunState(1, 0.0)

    def shown(*expected: str, plot: tuple[str, ...] = (), live: bool = True) -> list[tuple[str, int]]:
        made = grouped(state.view(2.0), plot, Look(), 6, expected if live else None)
        return [(one.title, one.curves.points) for _, drawn in made for one in drawn]

    state.apply(MetricBatch("run", 0, ("loss", "samples"), rows((1, 0, 1.0, 8.0))), 2.0)
    expected = ("loss", "", "samples", "epoch", "val_loss", "grad/norm")
    assert shown(*expected) == [("loss", 1), ("samples/s", 0), ("grad/norm", 0)]
    assert shown(*expected, live=False) == shown(live=False) == [("loss", 1)]
    assert shown("acc", "loss", plot=("acc", "loss")) == [("acc", 0), ("loss", 1), ("samples/s", 0)]
    state.apply(MetricBatch("run", 0, ("val_acc",), rows((1, 0, 0.5))), 2.0)
    assert shown("acc") == [("loss", 1), ("val_acc", 1), ("samples/s", 0)], "what is logged has a chart"


def test_metrics_and_runs_in_one_chart() -> None:
    ranks = [[(1, 0, 1.0 + rank, 3.0), (2, 1, 0.5 + rank, 2.0)] for rank in range(2)]
    view = logged(*ranks, names=("loss", "val_loss"))
    (chart,) = charts(view, ["loss+val_loss"], Look())
    assert {line.label: line.y.tolist() for line in chart.curves.lines} == {"loss": [1.5, 1.0], "val_loss": [3, 2]}
    one, both = compared({"a": view, "b": view}, ["loss", "loss+val_loss"], Look())
    assert [line.label for line in one.curves.lines] == ["a", "b"]
    assert [line.label for line in both.curves.lines] == ["a loss", "a val_loss", "b loss", "b val_loss"]


def test_a_run_has_one_color_and_its_name_in_all_charts() -> None:
    """Also in those of metrics that the other run lacks."""
    second = logged([(1, 0, 1.0, 0.1), (2, 1, 0.5, 0.2)], names=("loss", "acc"))
    runs = {"a": logged([(1, 0, 1.0), (2, 1, 0.5)]), "b": second}
    both, alone = compared(runs, ["loss", "acc"], Look())
    assert alone.curves.lines[0].color == both.curves.lines[1].color != both.curves.lines[0].color
    assert ">b</text>" in svg(alone)


def test_a_validation_of_every_step_has_no_marks() -> None:
    """They would lie over each other as a thick band."""
    for steps, marked in ((10, True), (200, False)):
        view = logged(((s, s, 1.0, 2.0) for s in range(steps)), names=("loss", "val_loss"))
        (chart,) = charts(view, ["loss"], Look())
        assert [line.marked for line in chart.curves.lines] == [False, marked]
        assert svg(chart).count("r='3'") == steps * marked


def test_marks_have_room_in_a_narrow_chart() -> None:
    """Labels of epochs beside each other, and a mark at the beginning or the end."""
    marks = tuple(Mark(float(at), f"{at}") for at in range(20))
    chart = Chart("loss", "", "step", Curves(()), epochs=marks)
    assert len(chart.some_epochs) <= 6, "epoch 1 and 3 would read as 13"
    ((left, width),) = re.findall(r"<svg x='(\d+)%' y='\d+' width='(\d+)%'", svg(chart))
    assert 300 * int(left) / 100 > 5.5 < 300 * (100 - int(left) - int(width)) / 100


@pytest.mark.parametrize(("at", "anchor", "align"), [(2, "start", None), (50, "middle", None), (99, "end", "right")])
def test_the_word_epoch_is_not_cut_at_an_edge(at: int, anchor: str, align: str | None) -> None:
    view = logged(((s, s, 1.0, s >= at) for s in range(100)), names=("loss", "epoch"))
    (chart,) = charts(view, ["loss"], Look())
    assert re.findall("text-anchor='([a-z]+)'>epoch 1<", svg(chart)) == [anchor]
    live = LiveChart()
    live.draw(chart)
    marks = next(one for one in live.widget.option["series"] if one["name"] == "marks")
    assert marks["markLine"]["data"][0]["label"].get("align") == align


def test_a_part_of_the_note_without_room_is_left_out() -> None:
    chart = Chart("loss", "0.006851 · falling · best val 0.08607", "step", Curves(()))
    text = svg(chart)
    assert "".join(re.findall("<tspan[^>]*>([^<]*)</tspan>", text)) == "loss0.006851 · falling · best val 0.08607"
    widths = [int(width) for width in re.findall(r"max-width:(\d+)px\){\.n", text)]
    assert 100 < widths[0] < widths[1] < 300


def test_labels_of_a_legend_do_not_touch_the_next_line() -> None:
    """In DejaVu Sans, which is wide."""
    none = np.zeros(0)
    names = ("measured", "momentum 0.9", "warm-up", "batch 256, LAMB", "ideal")
    parts, _ = _legend(Curves(tuple(Line(name, "red", none, none) for name in names)))
    drawn = "".join(parts)
    lines = [tuple(map(int, place)) for place in re.findall(r"<path d='M(\d+) (\d+)h12'", drawn)]
    texts = [(int(x), text) for x, text in re.findall(r"<text x='(\d+)'[^>]*>([^<]*)</text>", drawn)]
    for (x, text), (_, row), (following, next_row) in zip(texts, lines, lines[1:], strict=False):
        end = x + TextPath((0, 0), text, size=11).get_extents().x1
        assert next_row != row or following - end >= 6, text
