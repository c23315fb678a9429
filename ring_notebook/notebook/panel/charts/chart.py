"""What any kind of chart shows: its curves, its title and its marks."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ring_notebook.notebook.colors import VALIDATION, rank_color
from ring_notebook.notebook.panel.charts.axes import Scale, for_log_axis, scales
from ring_notebook.notebook.panel.charts.curves import RANK, Curves, Line, many, mean_line, per_rank
from ring_notebook.notebook.panel.charts.metric_names import (
    Section,
    direction,
    expanded,
    parts,
    sections,
    trained,
    unit,
)
from ring_notebook.notebook.record.run_view import EPOCH, LOGICAL, SAMPLES, UNCHARTED, RunView
from ring_notebook.notebook.record.series import Points, mean
from ring_notebook.notebook.record.tags_and_look import AXES, STEP, TIME, Look
from ring_notebook.notebook.style import number, shown, whole
from ring_notebook.protocol.records import RESUME
from ring_notebook.text.words import shortened

RATE = "samples/s"  # a chart of every run with samples
_OTHER_VALIDATION = 4  # the color of a second validation in a chart, as that of a rank
MOST_CHANGES, MOST_LABELLED = 40, 6  # newest marks of changes; how many still have labels
_LABEL = 0.045  # of the x axis, between the labels of two changes
MOST_BROKEN = 8  # marks of steps at which a rank first has NaN or infinity
_CHANGES = 0.02  # the least change between two fifths of a curve
_SYNCS = re.compile(r"sync( \d+)?/distance")  # the metric of an optimizer that makes local steps
_APART, _SURE = 0.05, 5  # the least distance of two ranks, of their mean and in standard errors


@dataclass(frozen=True)
class Mark:
    """A place on the x axis with a word: where an epoch begins, a knob was changed, ranks part, or a value is not
    finite."""

    x: float
    label: str


@dataclass(frozen=True)
class Chart:
    """One chart. ``note`` is beside the title; ``best`` is the best point so far; ``broken`` marks NaN and infinity,
    ``changes`` where a user has changed knobs, and where ranks that make local steps part.

    ``values`` is the unit of the y axis, where the title does not say it. ``short`` is a shorter title.
    """

    title: str
    note: str
    xlabel: str
    curves: Curves
    log: bool = False
    from_zero: bool = False
    best: tuple[float, float] | None = None
    epochs: tuple[Mark, ...] = ()
    broken: tuple[Mark, ...] = ()
    changes: tuple[Mark, ...] = ()
    values: str = ""
    short: str = ""

    @property
    def heading(self) -> str:
        """The title, shorter where names of metrics are long."""
        return self.short or self.title

    @property
    def unit(self) -> str:
        """A short name of the x axis, for the corner below the labels of the y axis."""
        return "s" if self.xlabel == "seconds" else self.xlabel

    @property
    def scales(self) -> tuple[Scale, Scale]:
        """The x and y axes."""
        return scales(self.curves, self.from_zero, self.log, self.best)

    @property
    def digits(self) -> int:
        """Decimals of a place on the x axis."""
        return 2 if self.xlabel == EPOCH else 0

    @property
    def some_epochs(self) -> tuple[Mark, ...]:
        """A few epochs, as many as a narrow chart has room for, without the first one, which begins with the chart."""
        return self.epochs[1 :: 1 + len(self.epochs) // 6]


def _apart(marks: Sequence[Mark], curves: Curves) -> tuple[Mark, ...]:
    """The marks; those too near to the last label have none.

    A change whose step has not been made yet is drawn at the last point.
    """
    ends = [float(end) for line in curves.lines if len(line.x) for end in (line.x[0], line.x[-1])]
    least = _LABEL * (max(ends, default=0.0) - min(ends, default=0.0))
    made: list[Mark] = []
    last = -math.inf
    for mark in (replace(one, x=min(one.x, max(ends, default=one.x))) for one in marks):
        shown_here = mark.x - last >= least
        last = mark.x if shown_here and mark.label else last
        made.append(mark if shown_here else replace(mark, label=""))
    return tuple(made)


def empty(names: Collection[str], ranks: int) -> list[Chart]:
    """Charts without a line, for metrics that a cell will log."""
    shown = [name for name in names if name not in UNCHARTED and trained(name, names) is None]
    made = [Chart(name, "", "step", Curves(())) for name in shown]
    if SAMPLES in names:
        made.append(Chart(f"{RATE} per rank" if ranks > 1 else RATE, "", "seconds", Curves(()), from_zero=True))
    return made


def charts(view: RunView, names: Collection[str], look: Look, expected: Collection[str] = ()) -> list[Chart]:
    """A chart for each of ``names`` that was logged, and an empty one for each that is ``expected``.

    A name is a metric, several metrics joined by a plus sign for one chart, or a pattern.
    """
    axis = look.x if look.x in axes(view) else STEP
    made = []
    for name in expanded(names, view.curves):
        found = parts(name, view.curves)
        if found:
            made.append(_metric(view, name, look, axis) if found == (name,) else _together(view, name, look, axis))
        elif name in expected:
            made += empty([name], view.size)
    return made


def grouped(
    view: RunView, plot: Sequence[str], look: Look, most: int, expected: Collection[str] | None = None
) -> list[tuple[Section, list[Chart]]]:
    """The charts of a page by group: those of ``plot``, else the first ``most`` or what the reader has chosen.

    The chart of samples/s is in the first group. A run in progress has metrics that are ``expected``: their charts,
    and that of samples/s, are there before they have values, so that the others keep their place.
    """
    absent = [one for one in expected or () if one not in ("", *UNCHARTED, *view.charted)]
    # A metric whose validation was logged before it has a chart already.
    absent = [one for one in absent if plot or all(trained(name, [one]) is None for name in view.charted)]
    names = (*view.charted, *absent)
    found = [Section("", tuple(plot))] if plot else sections(names, look.search, look.groups, most)
    short = shortened([name for section in found for name in section.shown])
    made = [
        (section, [replace(one, short=short.get(one.title, "")) for one in charts(view, section.shown, look, absent)])
        for section in found
    ]
    if rate := _rate(view, look, expected is not None):
        made = made if made and not made[0][0].group else [(Section("", ()), []), *made]
        made[0][1].extend(rate)
    return made


def _rate(view: RunView, look: Look, early: bool) -> list[Chart]:
    """The chart of samples/s; ``early``: empty while there are no two points."""
    if look.search not in RATE or not view.throughput:
        return []
    if not any(len(points.x) > 1 for points in view.throughput.values()):
        return empty([SAMPLES], view.size) if early else []
    curves = per_rank(view.throughput, look.smooth, look.ranks)
    note = f"{whole(view.samples_per_s)} in all" if len(view.ranks) > 1 else whole(view.samples_per_s)
    title = f"{RATE} per rank" if len(view.ranks) > 1 else RATE
    return [Chart(title, note, "seconds", curves, from_zero=True)]


def axes(view: RunView) -> tuple[str, ...]:
    """What the x axis of metrics can be. All but the step are looked up by step, so steps must not decrease."""
    times = [np.asarray(by_rank[TIME].x) for by_rank in view.axes.values()]
    if not times or not all((np.diff(steps) >= 0).all() for steps in times):
        return (STEP,)
    there = {TIME, SAMPLES} & {name for by_rank in view.axes.values() for name in by_rank}
    there |= {EPOCH} if len(view.epochs) > 1 else set()
    return tuple(name for name in AXES if name == STEP or name in there)


def over(view: RunView, axis: str, name: str) -> dict[int, Points]:
    """The points of a metric over another axis than their steps: seconds, samples of all ranks, or epochs."""
    carriers = view.logical if name in view.in_turns else {}
    return {
        rank: Points(_placed(view, axis, carriers.get(rank, rank), line.x), line.y)
        for rank, line in view.curves[name].items()
    }


def _placed(view: RunView, axis: str, rank: int, steps: Any) -> Any:
    """Where steps of a rank, not a logical one, are on an axis."""
    if axis == STEP or not len(steps):
        return steps
    if axis == EPOCH:
        at, values = (list(one) for one in zip(*view.epochs, strict=True))
        last = at[-1] - at[-2]  # the epoch in progress is taken to be as long as the one before
        at, values = [*at, at[-1] + last], [*values, 2 * values[-1] - values[-2]]
        return np.interp(steps, at, values)
    if axis == SAMPLES and view.logical:  # ranks may carry different numbers of them
        lines = [by_rank[axis] for by_rank in view.axes.values() if axis in by_rank]
        return sum(np.interp(steps, one.x, one.y) for one in lines)
    known = view.axes.get(rank, {}).get(axis) or next(one[axis] for one in view.axes.values() if axis in one)
    times = len(view.throughput) if axis == SAMPLES else 1
    return times * np.interp(steps, known.x, known.y)


def _metric(view: RunView, name: str, look: Look, axis: str) -> Chart:
    curves = per_rank(over(view, axis, name), look.smooth, look.ranks, LOGICAL if name in view.in_turns else RANK)
    beside = [one for one in view.charted if trained(one, view.curves) == name]
    colors = [VALIDATION, *(rank_color(_OTHER_VALIDATION + index) for index in range(len(beside)))]
    extra = [
        mean_line(one, over(view, axis, one), color, sparse=True) for one, color in zip(beside, colors, strict=False)
    ]
    judged = extra[0] if extra else _judged(curves)
    curves = replace(curves, lines=(*curves.lines, *extra))
    best = _best(view, beside[0] if extra else name, direction(name), axis)
    values = unit(name, view.units)
    note = _note(view, name, curves, judged, best)
    positive = for_log_axis(curves) if look.log else None
    curves = positive or curves
    return Chart(
        name,
        note,
        "seconds" if axis == TIME else axis,
        curves,
        log=positive is not None,
        best=best if positive is None or best is None or best[1] > 0 else None,
        epochs=_epochs(view, axis),
        broken=_broken(view, name, axis),
        changes=_apart(sorted(_changes(view, axis) + _parting(view, name, axis), key=lambda mark: mark.x), curves),
        values="" if values == name else values,
    )


def results(view: RunView, name: str) -> tuple[float, tuple[float, float] | None]:
    """The newest value of a metric with a curve, and the step and value of its best one: each a mean over the ranks.

    The best is that of the chart; None if the name of the metric does not say which way is better.
    """
    return _last(view, name), _best(view, name, direction(name), STEP)


def _best(view: RunView, name: str, toward: int, axis: str) -> tuple[float, float] | None:
    """The place and value of the greatest mean over the ranks at a step, or of the least; None without ``toward``."""
    if not toward or name not in view.extremes:
        return None
    step, value = view.extremes[name][toward > 0]
    return _at(view, axis, next(iter(view.axes), 0), step), value


def _last(view: RunView, name: str) -> float:
    """The mean at the newest step that all ranks have logged; without a common step, of their newest values."""
    newest = view.newest.get(name, {}).values()
    return view.last[name] if name in view.last else math.fsum(newest) / len(newest) if newest else math.nan


def _together(view: RunView, wanted: str, look: Look, axis: str) -> Chart:
    """Several metrics of a run, each the mean of its ranks."""
    (made,) = compared({"": view}, [wanted], replace(look, x=axis))
    return replace(made, epochs=_epochs(view, axis), changes=_apart(_changes(view, axis), made.curves))


def compared(views: Mapping[str, RunView], names: Sequence[str], look: Look) -> list[Chart]:
    """Charts of several runs, by the label of each: the mean over the ranks of a run is a line, for each metric."""
    axis = look.x if all(look.x in axes(view) for view in views.values()) else STEP
    made = []
    for name in names:
        found = [
            (f"{label} {one}".strip() if one != name else label, one, over(view, axis, one))
            for label, view in views.items()
            for one in parts(name, view.curves)
        ]
        curves = many({label: points for label, _, points in found}, look.smooth, list(views))
        units = {unit(one, view.units) for view in views.values() for one in parts(name, view.curves)}
        values = units.pop() if len(units) == 1 else ""
        xlabel = "seconds" if axis == TIME else axis
        positive = for_log_axis(curves) if look.log else None
        made.append(Chart(name, "mean", xlabel, positive or curves, log=positive is not None, values=values))
    return made


def _at(view: RunView, axis: str, rank: int, step: float) -> float:
    return float(_placed(view, axis, rank, [step])[0])


def _epochs(view: RunView, axis: str) -> tuple[Mark, ...]:
    if axis == EPOCH:
        return ()
    rank = next(iter(view.axes), 0)
    return tuple(Mark(_at(view, axis, rank, step), f"{epoch:g}") for step, epoch in view.epochs)


def _changes(view: RunView, axis: str) -> tuple[Mark, ...]:
    """A mark for each change of knobs, and where the run was paused."""
    made: dict[float, list[str]] = {}
    for one in view.changes:
        if one.action != RESUME:
            what = [f"{name} {shown(value)}" for name, value in one.values.items()] or ["paused"]
            made.setdefault(_at(view, axis, one.rank, one.step), []).extend(what)
    newest = list(made.items())[-MOST_CHANGES:]
    labelled = len(newest) <= MOST_LABELLED
    return tuple(Mark(x, ", ".join(what) if labelled else "") for x, what in newest)


def _parting(view: RunView, name: str, axis: str) -> tuple[Mark, ...]:
    """Where a metric of ranks with local steps parts: from there on each trains as if alone."""
    distances = [by_rank for metric, by_rank in view.curves.items() if _SYNCS.fullmatch(metric)]
    if not distances or _SYNCS.fullmatch(name) or len(view.curves[name]) < 2:
        return ()
    steps, values = map(np.asarray, next(iter(distances[0].values())))
    syncs = steps[:-1][np.diff(values) != 0]  # each row has the distance at the last one
    step = parting(list(view.curves[name].values()), syncs)
    return () if step is None else (Mark(_at(view, axis, min(view.curves[name]), step), "ranks part"),)


def parting(lines: Sequence[Points], syncs: Any) -> float | None:
    """The step at which ranks part: in two consecutive rounds between ``syncs``, two ranks differ by more than chance.
    None if they do not, or have too few values between two syncs."""
    bounds = np.concatenate(([-np.inf], syncs))
    means, errors = [], []  # by rank and round
    for line in lines:
        x, y = np.asarray(line.x), np.asarray(line.y)
        if (np.diff(x) < 0).any():
            return None
        edges = np.searchsorted(x, bounds, side="right")
        sums, squares = (np.concatenate(([0.0], np.cumsum(one))) for one in (y, y * y))
        with np.errstate(invalid="ignore", divide="ignore"):
            count = np.diff(edges)
            mean = np.diff(sums[edges]) / count
            variance = np.diff(squares[edges]) / count - mean * mean
            means.append(np.where(count > 3, mean, np.nan))
            errors.append(np.maximum(variance, 0) / (count - 1))
    least, most = np.argmin(means, axis=0), np.argmax(means, axis=0)
    each = np.arange(len(bounds) - 1)
    low, high = np.stack(means)[least, each], np.stack(means)[most, each]
    error = np.sqrt(np.stack(errors)[least, each] + np.stack(errors)[most, each])
    apart = high - low > np.maximum(_SURE * error, _APART * np.abs(high + low) / 2)
    found = np.flatnonzero(apart[:-1] & apart[1:])
    if not len(found):
        return None
    return float(max(bounds[found[0]], lines[0].x[0]))  # the first round has no sync before it


def _broken(view: RunView, name: str, axis: str) -> tuple[Mark, ...]:
    """A mark for each step at which a rank first had NaN or infinity; the first mark has the label for all of them.

    More labels would overlap, because NaN of one rank soon reaches the others.
    """
    firsts = view.broken.get(name, {})
    kinds: dict[str, list[int]] = {}
    for rank, (_, kind) in sorted(firsts.items()):
        kinds.setdefault(kind, []).append(rank)
    label = "; ".join(f"{kind}, {view.whose(name, who)}" for kind, who in kinds.items())
    carriers = view.logical if name in view.in_turns else {}
    places = sorted({_at(view, axis, carriers.get(rank, rank), step) for rank, (step, _) in firsts.items()})
    return tuple(Mark(place, "" if index else label) for index, place in enumerate(places[:MOST_BROKEN]))


def _no_numbers(view: RunView, name: str) -> str:
    """Which ranks have NaN or infinity now; empty if none has."""
    newest = view.newest.get(name, {})
    without = [rank for rank, value in newest.items() if not math.isfinite(value)]
    kind = "NaN" if any(map(math.isnan, newest.values())) else "inf"
    return f"{kind} on {view.whose(name, without)}" if without else ""


def _judged(curves: Curves) -> Line | None:
    """The line whose best value counts: the mean, or the only one."""
    if not curves.lines:
        return None
    first = curves.lines[0]
    if curves.band is None and len(curves.lines) > 1:
        size = min(len(line.y) for line in curves.lines)
        rows = np.stack([line.y[:size] for line in curves.lines])
        return replace(first, x=first.x[:size], y=mean(rows))
    return first


def _note(view: RunView, name: str, curves: Curves, judged: Line | None, best: tuple[float, float] | None) -> str:
    if judged is None or not len(judged.y):
        return ""
    main = _judged(Curves(tuple(line for line in curves.lines if not line.sparse), curves.band)) or judged
    # No trend beside NaN: it would describe earlier values.
    no_numbers, values = _no_numbers(view, name), unit(name, view.units)
    # The mean of a step. The last point of a long curve is the mean of many.
    said = [no_numbers or f"{number(_last(view, name))}{'' if values == '%' else ' '}{values}".rstrip()]
    said += [trend(main)] if direction(name) and not no_numbers else []
    if best is not None:
        which = judged.label.replace(name, "").strip("_/. -") if judged.sparse else ""
        said.append(" ".join(filter(None, ["best", which, number(best[1])])))
    return " · ".join(filter(None, said))


def trend(line: Line) -> str:
    """Whether the newest fifth of a curve is below or above the fifth before; empty if the curve is too short."""
    finite = line.y[np.isfinite(line.y)]
    fifth = len(finite) // 5
    if fifth < 4:
        return ""
    newest, before = float(finite[-fifth:].mean()), float(finite[-2 * fifth : -fifth].mean())
    noise = float(np.diff(finite[-2 * fifth :]).std()) / fifth**0.5
    change = newest - before
    if abs(change) < max(_CHANGES * abs(before), noise):
        return "flat"
    return "falling" if change < 0 else "rising"


def columns(counts: Sequence[int]) -> str:
    """The class of grids with so many charts each: two or three per row, if the page has room.

    All of them have the same columns, so that charts of several groups are equally wide.
    """
    most = max(counts, default=1)
    return f"ring-columns-{2 if most in (1, 2, 4) else 3}{'-each' * (len(counts) > 1)}"
