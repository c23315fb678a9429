"""The option of a live chart: what ECharts is told to draw, and what a click on a label does."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import pytest

from ring_notebook.notebook.panel.charts.chart import Chart, Mark
from ring_notebook.notebook.panel.charts.curves import Curves, per_rank
from ring_notebook.notebook.panel.charts.live_chart import LiveChart
from ring_notebook.notebook.record.series import Points

STEPS = array("d", range(40))


def curves(size: int, odd: int = -1) -> Curves:
    return per_rank(
        {rank: Points(STEPS, array("d", (1 / (x + 1) + (rank == odd) for x in STEPS))) for rank in range(size)}
    )


def chart(size: int = 4, odd: int = -1, **details: Any) -> Chart:
    return Chart("loss", "0.1", "step", curves(size, odd), **details)


def series(live: LiveChart) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in live.widget.option["series"]}


def test_an_empty_chart_has_axes_until_it_has_values() -> None:
    live, empty = LiveChart(), Chart("loss", "", "step", Curves(()))
    assert live.draw(empty) > 0
    axes = live.widget.option["xAxis"], live.widget.option["yAxis"]
    assert [(axis["min"], axis["max"], axis["axisLabel"]["show"]) for axis in axes] == [(0, 1, False)] * 2
    live.draw(chart(1))
    assert live.widget.option["xAxis"]["axisLabel"]["show"]
    assert live.draw(empty) == 0


def test_labels_of_marks_are_not_as_faint_as_their_lines() -> None:
    live = LiveChart()
    live.draw(chart(1, epochs=(Mark(0, "0"), Mark(20, "1")), broken=(Mark(30, "NaN"),)))
    marks = series(live)["marks"]["markLine"]
    assert marks["label"]["opacity"] == 1.0
    assert marks["lineStyle"]["opacity"] < 1
    assert marks["data"][-1]["lineStyle"]["opacity"] == 1, "of a value that is not a number"


def test_one_rank_is_one_line() -> None:
    live = LiveChart()
    assert live.draw(chart(1)) > 0
    assert [name for name, one in series(live).items() if one["data"]] == ["rank 0"]
    assert live.widget.option["legend"]["data"] == []


def test_ranks_are_a_mean_and_a_band_and_wait_for_a_click() -> None:
    live = LiveChart()
    live.draw(chart(8))
    drawn = {name for name, one in series(live).items() if one["data"]}
    assert drawn == {"mean of 8", "range"}
    legend = live.widget.option["legend"]
    assert [*legend["data"][2:]] == [*"01234567"]  # short, because there may be many
    assert legend["selected"]["7"] is False
    live.draw(chart(8, odd=2))
    legend = live.widget.option["legend"]
    assert legend["data"][:2] == ["mean of 8", "rank 2"]
    assert series(live)["rank 2"]["name"] == "rank 2"


def test_a_smooth_line_has_its_values_behind_it_until_it_is_not_smooth() -> None:
    live = LiveChart()
    live.draw(Chart("loss", "", "step", per_rank({0: Points(STEPS, STEPS)}, 0.9), values="nats"))
    behind = series(live)["rank 0 raw"]
    assert behind["data"][-1] == [39.0, 39.0]
    assert series(live)["rank 0"]["data"][-1][1] < 39
    assert [*series(live)] == ["rank 0 raw", "rank 0", "marks"], "behind is before"
    assert live.widget.option["yAxis"]["name"] == "nats"
    live.draw(Chart("loss", "", "step", per_rank({0: Points(STEPS, STEPS)})))
    assert series(live)["rank 0 raw"]["data"] == []
    assert live.widget.option["yAxis"]["name"] == ""


def test_the_band_is_one_line_there_and_back() -> None:
    live = LiveChart()
    live.draw(chart(3, odd=1))
    band = series(live)["range"]["data"]
    assert len(band) == 2 * len(STEPS)
    assert band[0] == [0.0, 2.0]
    assert band[-1] == [0.0, 1.0]


def test_a_rank_that_no_longer_differs_disappears() -> None:
    """The page merges what it gets into what it has: a series that is left out would stay."""
    live = LiveChart()
    live.draw(chart(4, odd=2))
    assert series(live)["rank 2"]["data"]
    live.draw(chart(4))
    assert series(live)["rank 2"]["data"] == []


def test_nothing_is_sent_twice() -> None:
    live = LiveChart()
    assert live.draw(chart()) > 0
    assert live.draw(chart()) == 0
    assert live.draw(replace(chart(), best=(3.0, 0.25))) > 0


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_large_chart_counts_as_many_bytes_as_it_sends(ranks: int) -> None:
    """Charts of many ranks are drawn less often, so that the page has time for its reader."""
    live = LiveChart()
    counted = live.draw(chart(ranks))
    sent = json.dumps(live.widget.option["series"])
    assert 0.5 * len(sent) < counted < 2 * len(sent)


def test_what_is_under_the_mouse_has_its_unit() -> None:
    live = LiveChart()
    for values, header in (("ms", "step {value} · ms"), ("", "step {value}")):
        live.draw(replace(chart(), values=values))
        assert live.widget.option["tooltip"]["axisPointer"]["label"]["formatter"] == header


def test_values_that_json_does_not_know_are_gaps() -> None:
    broken = Points(STEPS, array("d", [1.0, float("nan"), float("inf"), *([0.5] * 37)]))
    live = LiveChart()
    live.draw(Chart("loss", "", "step", per_rank({0: broken}), broken=(Mark(1, "NaN, rank 0"),)))
    text = json.dumps(live.widget.option, allow_nan=False)
    assert series(live)["rank 0"]["data"][:3] == [[0.0, 1.0], [1.0, None], [2.0, None]]
    assert "NaN, rank 0" in text


def test_a_click_on_a_label_asks_for_that_rank() -> None:
    clicked: list[int] = []
    live = LiveChart(clicked.append)
    live._clicked({"name": "rank 12"})
    live._clicked({"name": "12"})
    live._clicked({"name": "mean of 128"})
    assert clicked == [12, 12]


def test_a_logarithmic_scale_needs_positive_values() -> None:
    live = LiveChart()
    live.draw(chart(1, log=True))
    assert live.widget.option["yAxis"]["type"] == "log"
    flat = per_rank({0: Points(STEPS, array("d", (0.0 for _ in STEPS)))})
    live.draw(Chart("loss", "", "step", flat, log=True))
    assert live.widget.option["yAxis"]["type"] == "value"


def test_a_single_point_has_a_mark_and_lies_between_steps() -> None:
    """A line through it could not be seen, and ECharts would write -0.4 and 0.2 below it."""
    live = LiveChart()
    live.draw(chart(2))
    assert not any(one.get("showSymbol") for one in series(live).values())
    one = per_rank({rank: Points(array("d", [116]), array("d", [0.9])) for rank in range(2)})
    live.draw(Chart("test", "0.9", "step", one))
    assert [series(live)[f"rank {rank}"]["showSymbol"] for rank in range(2)] == [True, True]
    axis = live.widget.option["xAxis"]
    assert (axis["min"], axis["max"], axis["minInterval"]) == (115.5, 116.5, 1)
