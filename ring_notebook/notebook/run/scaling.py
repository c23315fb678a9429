"""Measures how throughput grows with the number of ranks, from runs of the same cell."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ring_notebook.notebook.panel.charts import svg_chart
from ring_notebook.notebook.panel.charts.chart import Chart
from ring_notebook.notebook.panel.charts.curves import many
from ring_notebook.notebook.record.series import Points
from ring_notebook.notebook.table import Listing


@dataclass(frozen=True, slots=True)
class Scaling:
    """One size: its ``ranks``, ``seconds`` of the run, ``rate`` (samples/s of all ranks), speedup and efficiency.

    ``speedup`` is relative to the smallest size, by samples/s, or by time when the cell logs no samples;
    ``efficiency`` is the speedup divided by that of ideal scaling.
    """

    ranks: int
    seconds: float
    rate: float
    speedup: float
    efficiency: float


def measure(summaries: Sequence[dict[str, Any]]) -> list[Scaling]:
    """The scaling of runs of one cell, from their summaries, in order of size."""
    ordered = sorted(summaries, key=lambda summary: int(summary["size"]))
    # Of the training alone, as the panels say it: not of the imports before and the rest of the cell.
    rates = [float(summary["samples_per_s"]) for summary in ordered]
    # Without samples every run is taken to do the same work.
    pace = rates if all(rates) else [1 / summary["seconds"] for summary in ordered]
    first = ordered[0]["size"]
    return [
        Scaling(
            ranks=summary["size"],
            seconds=summary["seconds"],
            rate=rate,
            speedup=speed / pace[0],
            efficiency=speed / pace[0] / (summary["size"] / first),
        )
        for summary, rate, speed in zip(ordered, rates, pace, strict=True)
    ]


class ScalingReport(Listing):
    """The table of a scaling measurement, with a chart beside ideal scaling."""

    def __init__(self, points: Sequence[Scaling]) -> None:
        rows = [
            [
                str(point.ranks),
                f"{point.seconds:.2f}",
                f"{point.rate:.0f}" if point.rate else "",
                f"{point.speedup:.2f}",
                f"{point.efficiency:.0%}",
            ]
            for point in points
        ]
        super().__init__(("ranks", "seconds", "samples/s", "speedup", "efficiency"), rows)
        self.points = list(points)

    def _repr_html_(self) -> str:
        ranks = array("d", (point.ranks for point in self.points))
        lines = {
            "measured": {0: Points(ranks, array("d", (point.speedup for point in self.points)))},
            "ideal": {0: Points(ranks, array("d", (rank / ranks[0] for rank in ranks)))},
        }
        chart = Chart("speedup", "", "ranks", many(lines), from_zero=True)
        return f"{super()._repr_html_()}{svg_chart.CSS}{svg_chart.grid([chart])}"
