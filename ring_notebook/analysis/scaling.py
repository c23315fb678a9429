"""How throughput grows with the number of ranks, from runs of the same program, and where the rest is lost."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from ring_notebook.analysis.time_breakdown import SHARES, SLEEPS, RankTimes, Spent, spent
from ring_notebook.machine.energy import NOT_MEASURED, Used, used
from ring_notebook.text.words import plural

Kind = Literal["", "strong", "weak"]
PARTS = tuple(SHARES.values())
_SCALES = 0.9  # efficiency from which no cause is named
_HELD_UP = 0.3  # share of the time off its cores, above which the first size is no measure for others
_EQUAL = 0.1  # by which global batches may differ that are meant to be the same
_CAUSES = {
    "compute": "in compute, which takes longer for each sample: ranks share memory and caches, or have smaller batches",
    "asleep": "in sleeping or waiting outside of collectives, on every rank for itself",
    "off_core": "in sleeping or in waiting for a core",
    "data": "in waiting for data: the loaders of all ranks share disk and cores",
    "moving": "in moving data between ranks: larger batches or compression move less for each sample",
    "waiting": "in waiting for the slowest rank",
    "bubble": "in waiting for messages, as of other stages of a pipeline",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: ``seconds`` and ``rate`` (samples/s of all ranks) without imports and warm-up.

    ``batch``: samples of all ranks in a step. ``shares``: the parts of the ranks' time, means that make up 1.
    ``hosts``: on how many the ranks were. ``cores``: of each host; 0 where ranks compute on GPUs. ``posted``: bytes
    that each rank has given to collectives in a step. ``energy``: what it has used.
    """

    ranks: int
    seconds: float
    rate: float
    batch: float
    shares: Mapping[str, float]
    hosts: int = 1
    cores: int = 0
    posted: float = 0.0
    energy: Used = NOT_MEASURED

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.batch / self.rate


def measured(times: Sequence[RankTimes]) -> Measured:
    """One run, from what each of its ranks has measured."""
    facts = [spent(one.spent, one.seconds) for one in times]
    clocks = [one for one in times if one.seconds > 0 and one.steps > 0]
    return Measured(
        len(times),
        max((one.seconds for one in clocks), default=0.0) or max(one.seconds for one in facts),
        sum(one.samples / one.seconds for one in clocks),
        sum(one.samples / one.steps for one in clocks),
        {part: fmean(_share(one, part) for one in facts) for part in PARTS},
        times[0].hosts,
        times[0].cores,
        fmean(one.spent.get("posted", 0.0) / one.steps for one in clocks) if clocks else 0.0,
        used([one.spent for one in times]),
    )


def _share(rank: Spent, part: str) -> float:
    return rank.share(getattr(rank, part))


@dataclass(frozen=True, slots=True)
class Scaling:
    """One size: medians of its runs, and the ``spread`` of their pace, largest less smallest, as a part of the median.

    ``speedup`` is relative to the smallest size, by samples/s, or by time when the program logs no samples;
    ``efficiency`` is the speedup divided by that of ideal scaling. A size that was predicted has an ``interval``, in
    which its efficiency lies. ``joules``: of a sample, the median; None where energy was not measured.
    """

    ranks: int
    seconds: float
    rate: float
    batch: float
    spread: float
    speedup: float
    efficiency: float
    shares: Mapping[str, float]
    interval: tuple[float, float] | None = None
    joules: float | None = None


def measure(runs: Sequence[Measured]) -> list[Scaling]:
    """The scaling of runs of one program, several for each size, in order of size."""
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
                {part: fmean(run.shares[part] for run in same) for part in PARTS},
                joules=median(joules) if (joules := _joules(same)) else None,
            )
        )
    return points


def _joules(runs: Sequence[Measured]) -> list[float]:
    return [run.energy.per_sample for run in runs if run.energy.per_sample is not None]


def lost(first: Scaling, last: Scaling) -> dict[str, float]:
    """The parts of the time of ``last`` that ``first`` did not need for the same samples; they sum to what is lost.

    With S seconds of all ranks for a sample on the larger size, and E·S on the smaller one, E is the efficiency.
    """
    return {part: last.shares[part] - last.efficiency * first.shares[part] for part in PARTS}


def cause(points: Sequence[Scaling], cores: int) -> str:
    """In one sentence how far the largest size scales, and the main cause of what is lost.

    ``cores``: of all hosts together; 0 where ranks compute on GPUs.
    """
    first, last = points[0], points[-1]
    if len(points) < 2:
        return ""
    reach = f"{plural(last.ranks, 'rank')} reach {last.efficiency:.0%} of ideal scaling"
    if cores >= first.ranks and first.shares["off_core"] > _HELD_UP:
        off = (
            f"{plural(first.ranks, 'rank')} alone slept or waited for a core {first.shares['off_core']:.0%} of the time"
        )
        return f"{reach}, but {off}: if other programs use the cores, measure again without them."
    if last.efficiency > 1 + _EQUAL:
        same = first.batch and batches(points)[0]
        caches = " or smaller batches, which fit caches better" if same else ""
        return (
            f"{reach}, more than ideal. Usual causes: {plural(first.ranks, 'rank')} alone was held up by other "
            f"programs{caches}. Measure again with --repeat 3."
        )
    if last.efficiency >= _SCALES:
        return f"{reach}."
    if cores and last.ranks > cores:
        taken = plural(cores, "core")
        return f"{reach}: they take turns on {taken}, so more ranks than cores gain nothing."
    parts = lost(first, last)
    worst = max(parts, key=lambda part: parts[part])
    return f"{reach}; {1 - last.efficiency:.0%} is lost, most of it ({max(parts[worst], 0):.0%}) {_CAUSES[worst]}."


def batches(points: Sequence[Scaling] | Sequence[Measured]) -> tuple[bool, bool]:
    """Whether the global batch stays the same (strong scaling), and whether it grows with the ranks (weak)."""
    first, *others = points
    growth = {point.ranks: point.batch / first.batch for point in others}
    strong = all(abs(grown - 1) <= _EQUAL for grown in growth.values())
    weak = all(abs(grown / (ranks / first.ranks) - 1) <= _EQUAL for ranks, grown in growth.items())
    return strong, weak


def kind_of(points: Sequence[Scaling], wanted: Kind) -> str:
    """Whether this was strong or weak scaling, or that it is not as ``wanted``."""
    first, *others = points
    if not others or not all(point.batch for point in points):
        return ""
    strong, weak = batches(points)
    last = points[-1]
    got = f"it is {first.batch:.0f} on {plural(first.ranks, 'rank')} and {last.batch:.0f} on {last.ranks}"
    if wanted == "strong" and not strong:
        return f"Not strong scaling: the global batch should stay the same; {got}. Divide the batch by ring.size()."
    if wanted == "weak" and not weak:
        return f"Not weak scaling: the global batch should grow with the ranks; {got}. Give each rank the same batch."
    if strong:
        return f"Strong scaling: the global batch is {first.batch:.0f} on any number of ranks."
    return f"Weak scaling: {first.batch / first.ranks:.0f} samples a rank." if weak else f"The global batch: {got}."


def table(points: Sequence[Scaling]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, a row for each size; one that was predicted has an interval instead of a spread."""
    counts = all(point.rate for point in points)
    names = dict(zip(SHARES.values(), SHARES, strict=True))
    rare = {"asleep": SLEEPS, "off_core": SLEEPS, "bubble": 0.005}  # shown from this share of the time on
    parts = [part for part in PARTS if any(point.shares[part] >= rare.get(part, 0.0) for point in points)]
    burnt = any(point.joules is not None for point in points)
    rows = [
        [
            f"{point.ranks} predicted" if point.interval else str(point.ranks),
            f"{point.seconds:.2f}",
            *([f"{point.batch:,.0f}", f"{point.rate:,.0f}"] if counts else []),
            "" if point.interval else f"{point.spread:.0%}",
            f"{point.speedup:.2f}",
            f"{point.efficiency:.0%}" + (" ({:.0%} to {:.0%})".format(*point.interval) if point.interval else ""),
            *(f"{point.shares[part]:.0%}" for part in parts),
            *([] if not burnt else [""] if point.joules is None else [f"{point.joules:.3g}"]),
        ]
        for point in points
    ]
    counted = ["global batch", "samples/s"] if counts else []
    columns = ["ranks", "seconds", *counted, "spread", "speedup", "efficiency", *(names[part] for part in parts)]
    return [*columns, *(["J/sample"] if burnt else [])], rows


def write_csv(points: Sequence[Scaling], path: str | Path) -> None:
    """Write the numbers, a line for each size. ``low`` and ``high`` are those of a prediction. Raises OSError."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        names = ["ranks", "seconds", "samples_per_s", "batch", "spread", "speedup", "efficiency", *PARTS]
        out.writerow([*names, "low", "high", "joules_per_sample"])
        for one in points:
            numbers = (one.seconds, one.rate, one.batch, one.spread, one.speedup, one.efficiency)
            shares = (one.shares[part] for part in PARTS)
            interval = one.interval or ("", "")
            ends = (f"{end:.6g}" if isinstance(end, float) else end for end in interval)
            joules = "" if one.joules is None else f"{one.joules:.6g}"
            out.writerow([one.ranks, *(f"{number:.6g}" for number in (*numbers, *shares)), *ends, joules])


def rank_counts(text: str) -> list[int]:
    """The numbers of ``1,2,4``. Raises ValueError."""
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isdecimal() and int(piece) > 0 for piece in pieces):
        raise ValueError(f"expected numbers of ranks separated by commas, such as 1,2,4, got {text!r}")
    return [int(piece) for piece in pieces]
