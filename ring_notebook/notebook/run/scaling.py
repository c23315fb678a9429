"""Measures how throughput grows with the number of ranks, from runs of the same cell, and where the rest is lost."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from ring_notebook.notebook.panel.charts import svg_chart
from ring_notebook.notebook.panel.charts.chart import Chart
from ring_notebook.notebook.panel.charts.curves import many
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import SAMPLES
from ring_notebook.notebook.record.series import Points
from ring_notebook.notebook.record.spent import SHARES, Spent, spent
from ring_notebook.notebook.style import plural
from ring_notebook.notebook.table import Listing

Kind = Literal["", "strong", "weak"]
_SCALES = 0.9  # efficiency from which nothing is worth a cause
_EQUAL = 0.1  # by which global batches may differ that are meant to be the same
_PARTS = ("compute", "data", "moving", "waiting", "bubble")
_CAUSES = {
    "compute": "in compute, which takes longer for each sample: ranks share memory and caches, or have smaller batches",
    "data": "in waiting for data: the loaders of all ranks share disk and cores",
    "moving": "in moving data between ranks: larger batches or compression move less for each sample",
    "waiting": "in waiting for the slowest rank",
    "bubble": "in waiting for messages, as of other stages of a pipeline",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: ``seconds`` and ``rate`` (samples/s of all ranks) without imports and warm-up.

    ``batch``: samples of all ranks in a step. ``shares``: the parts of the ranks' time, means that make up 1.
    """

    ranks: int
    seconds: float
    rate: float
    batch: float
    shares: Mapping[str, float]


def measured(log: RunRecord, warmup: int) -> Measured:
    """What a run that has ended has reached after ``warmup`` steps. The row of a step is logged when it is done."""
    rate = batch = seconds = 0.0
    rows: dict[int, list[tuple[float, int, float]]] = {rank: [] for rank in range(log.size)}
    first: dict[int, int] = {}
    for row in log.metrics():
        if row.step - first.setdefault(row.rank, row.step) >= warmup - 1 and SAMPLES in row.values:
            rows[row.rank].append((row.time, row.step, row.values[SAMPLES]))
    for own in rows.values():
        if len(own) < 2 or own[-1][0] <= own[0][0]:
            continue
        took, samples = own[-1][0] - own[0][0], sum(row[2] for row in own[1:])
        seconds = max(seconds, took)
        rate += samples / took
        batch += samples / max(1, own[-1][1] - own[0][1])
    facts = [spent(one, log.summary["seconds"]) for one in log.summary["ranks"]]
    seconds = seconds or max(one.seconds for one in facts)
    return Measured(log.size, seconds, rate, batch, _shares(facts))


def _shares(ranks: Sequence[Spent]) -> dict[str, float]:
    return {part: fmean(one.share(getattr(one, part)) for one in ranks) for part in _PARTS}


@dataclass(frozen=True, slots=True)
class Scaling:
    """One size: medians of its runs, and the ``spread`` of their pace, largest less smallest, as a part of the median.

    ``speedup`` is relative to the smallest size, by samples/s, or by time when the cell logs no samples;
    ``efficiency`` is the speedup divided by that of ideal scaling.
    """

    ranks: int
    seconds: float
    rate: float
    batch: float
    spread: float
    speedup: float
    efficiency: float
    shares: Mapping[str, float]


def measure(runs: Sequence[Measured]) -> list[Scaling]:
    """The scaling of runs of one cell, several for each size, in order of size."""
    by_size: dict[int, list[Measured]] = {}
    for run in sorted(runs, key=lambda run: run.ranks):
        by_size.setdefault(run.ranks, []).append(run)
    # Without samples every run is taken to do the same work.
    counts = all(run.rate for run in runs)
    points: list[Scaling] = []
    first, base = 0, 0.0
    for size, same in by_size.items():
        paces = [run.rate if counts else 1 / run.seconds for run in same]
        pace = median(paces)
        first, base = first or size, base or pace
        points.append(
            Scaling(
                size,
                median(run.seconds for run in same),
                median(run.rate for run in same),
                median(run.batch for run in same),
                (max(paces) - min(paces)) / pace,
                pace / base,
                pace / base / (size / first),
                {part: fmean(run.shares[part] for run in same) for part in _PARTS},
            )
        )
    return points


def lost(first: Scaling, last: Scaling) -> dict[str, float]:
    """The parts of the time of ``last`` that ``first`` did not need for the same samples; they sum to what is lost.

    With S seconds of all ranks for a sample on the larger size, and E·S on the smaller one, E is the efficiency.
    """
    return {part: last.shares[part] - last.efficiency * first.shares[part] for part in _PARTS}


def cause(points: Sequence[Scaling], cores: int) -> str:
    """In one sentence how far the largest size scales, and the main cause of what is lost.

    ``cores``: of all hosts together; 0 where ranks compute on GPUs.
    """
    first, last = points[0], points[-1]
    if len(points) < 2:
        return ""
    reach = f"{plural(last.ranks, 'rank')} reach {last.efficiency:.0%} of ideal scaling"
    if last.efficiency >= _SCALES:
        return f"{reach}."
    if cores and last.ranks > cores:
        return f"{reach}: they take turns on {plural(cores, 'core')}, so more ranks than cores gain nothing."
    parts = lost(first, last)
    worst = max(parts, key=lambda part: parts[part])
    return f"{reach}; {1 - last.efficiency:.0%} is lost, most of it ({max(parts[worst], 0):.0%}) {_CAUSES[worst]}."


def kind_of(points: Sequence[Scaling], wanted: Kind) -> str:
    """Whether the global batch stays the same (strong scaling) or grows with the ranks (weak), or is as ``wanted``."""
    first, *others = points
    if not others or not all(point.batch for point in points):
        return ""
    growth = {point.ranks: point.batch / first.batch for point in others}
    strong = all(abs(grown - 1) <= _EQUAL for grown in growth.values())
    weak = all(abs(grown / (ranks / first.ranks) - 1) <= _EQUAL for ranks, grown in growth.items())
    last = points[-1]
    got = f"it is {first.batch:.0f} on {plural(first.ranks, 'rank')} and {last.batch:.0f} on {last.ranks}"
    if wanted == "strong" and not strong:
        return f"Not strong scaling: the global batch should stay the same; {got}. Divide the batch by ring.size()."
    if wanted == "weak" and not weak:
        return f"Not weak scaling: the global batch should grow with the ranks; {got}. Give each rank the same batch."
    if strong:
        return f"Strong scaling: the global batch is {first.batch:.0f} on any number of ranks."
    return f"Weak scaling: {first.batch / first.ranks:.0f} samples a rank." if weak else f"The global batch: {got}."


class ScalingReport(Listing):
    """The table of a scaling measurement, with a chart beside ideal scaling; ``points`` has the numbers."""

    def __init__(self, points: Sequence[Scaling], note: str = "") -> None:
        counts = all(point.rate for point in points)
        names = dict(zip(SHARES.values(), SHARES, strict=True))
        parts = [part for part in _PARTS if part != "bubble" or any(point.shares[part] > 0.005 for point in points)]
        rows = [
            [
                str(point.ranks),
                f"{point.seconds:.2f}",
                *([f"{point.batch:.0f}", f"{point.rate:.0f}"] if counts else []),
                f"{point.spread:.0%}",
                f"{point.speedup:.2f}",
                f"{point.efficiency:.0%}",
                *(f"{point.shares[part]:.0%}" for part in parts),
            ]
            for point in points
        ]
        counted = ["global batch", "samples/s"] if counts else []
        columns = ("ranks", "seconds", *counted, "spread", "speedup", "efficiency", *(names[part] for part in parts))
        super().__init__(columns, rows, note)
        self.points = list(points)

    def to_csv(self, path: str | Path) -> None:
        """Write the numbers, a line for each size. Raises OSError."""
        with open(path, "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["ranks", "seconds", "samples_per_s", "batch", "spread", "speedup", "efficiency", *_PARTS])
            for one in self.points:
                numbers = (one.seconds, one.rate, one.batch, one.spread, one.speedup, one.efficiency)
                shares = (one.shares[part] for part in _PARTS)
                out.writerow([one.ranks, *(f"{number:.6g}" for number in (*numbers, *shares))])

    def _repr_html_(self) -> str:
        ranks = array("d", (point.ranks for point in self.points))
        lines = {
            "measured": {0: Points(ranks, array("d", (point.speedup for point in self.points)))},
            "ideal": {0: Points(ranks, array("d", (rank / ranks[0] for rank in ranks)))},
        }
        chart = Chart("speedup", "", "ranks", many(lines), from_zero=True)
        return f"{super()._repr_html_()}{svg_chart.CSS}{svg_chart.grid([chart])}"
