"""The scaling of a cell, as it is measured in runs of a notebook and shown there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ring_notebook.analysis.scaling import Measured, Scaling, measured, table, write_csv
from ring_notebook.analysis.time_breakdown import RankTimes
from ring_notebook.notebook.colors import rank_color
from ring_notebook.notebook.panel.charts import svg_chart
from ring_notebook.notebook.panel.charts.chart import Chart
from ring_notebook.notebook.panel.charts.curves import Band, Curves, Line
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import SAMPLES
from ring_notebook.notebook.table import Listing


def measured_run(log: RunRecord, warmup: int) -> Measured:
    """What a run that has ended has reached after ``warmup`` steps. The row of a step is logged when it is done."""
    rows: dict[int, list[tuple[float, int, float]]] = {rank: [] for rank in range(log.size)}
    first: dict[int, int] = {}
    for row in log.metrics():
        if row.step - first.setdefault(row.rank, row.step) >= warmup - 1 and SAMPLES in row.values:
            rows[row.rank].append((row.time, row.step, row.values[SAMPLES]))
    hosts, cores = len(log.environment.get("hosts", [""])), log.environment.get("cores", 0)
    times = []
    for rank, own in rows.items():
        # A rank that carries several logical ranks logs a row of each in a step: the clock runs from the last one.
        start = [row for row in own if row[1] == own[0][1]]
        (began, step, _), (ended, last, _) = (start[-1], own[-1]) if own else ((0.0, 0, 0.0),) * 2
        facts = log.summary["ranks"][rank]
        facts = {"training": facts.get("training") or log.summary["seconds"], **facts}
        samples = sum(row[2] for row in own[len(start) :])
        cores = 0 if log.environment.get("gpus") else cores
        times.append(RankTimes(rank, hosts, cores, last - step, ended - began, samples, facts))
    return measured(times)


class ScalingReport(Listing):
    """The table of a scaling measurement, with a chart beside ideal scaling; ``points`` has the numbers."""

    def __init__(self, points: Sequence[Scaling], note: str = "") -> None:
        super().__init__(*table(points), note)
        self.points = list(points)

    def to_csv(self, path: str | Path) -> None:
        """Write the numbers, a line for each size. Raises OSError."""
        write_csv(self.points, path)

    def _repr_html_(self) -> str:
        done = [point for point in self.points if point.interval is None]
        guessed = [point for point in self.points if point.interval is not None]
        first = done[0].ranks
        ranks = np.array([point.ranks for point in self.points], dtype=float)
        lines = [_line("measured", 0, done)]
        band = None
        if guessed:
            # The curve begins at the last size that was measured before them.
            from_there = [([one for one in done if one.ranks < guessed[0].ranks] or done)[-1], *guessed]
            lines.append(_line("predicted", 2, from_there, sparse=True))
            ends = np.array([one.interval or (one.efficiency, one.efficiency) for one in from_there])
            x = lines[-1].x
            band = Band(x, ends[:, 0] * x / first, ends[:, 1] * x / first)
        lines.append(Line("ideal", rank_color(1), ranks, ranks / first))
        chart = Chart("speedup", "", "ranks", Curves(tuple(lines), band), from_zero=True)
        return f"{super()._repr_html_()}{svg_chart.CSS}{svg_chart.grid([chart])}"


def _line(label: str, color: int, points: Sequence[Scaling], sparse: bool = False) -> Line:
    x, y = (np.array([getattr(point, name) for point in points], dtype=float) for name in ("ranks", "speedup"))
    return Line(label, rank_color(color), x, y, sparse=sparse)
