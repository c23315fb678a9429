"""What a chart shows, whatever draws it: its curves, its title, and what is marked on it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ring_notebook.notebook.panel.charts.curves import Curves, Line, mean, mean_line, per_rank
from ring_notebook.notebook.record.choices import Look
from ring_notebook.notebook.record.run_view import EPOCH, SAMPLES, RunView
from ring_notebook.notebook.style import VALIDATION, number, ranks, whole

RATE = "samples/s"  # a chart of every run with samples
_LOWER = re.compile(r"loss|err|mse|mae|ppl|perplex|nll|wer|fid|\bkl\b|entropy", re.IGNORECASE)
_HIGHER = re.compile(r"acc|auc|f1|bleu|rouge|iou|\bmap\b|reward|return|precision|recall|r2|score|psnr", re.IGNORECASE)
_VALIDATION = re.compile(r"^(?:val|valid|validation|test|eval)[_/. -](.+)$|^(.+)[_/. -](?:val|valid|test|eval)$")
MOST_BROKEN = 8  # steps at which ranks begin to lack a number
_CHANGES = 0.02  # the least change between two fifths of a curve


@dataclass(frozen=True)
class Mark:
    """A place on the x axis with a word: where an epoch begins, or where a value is not finite."""

    x: float
    label: str


@dataclass(frozen=True)
class Chart:
    """One chart. ``note`` is beside the title; ``best`` is the best point so far; ``broken`` marks NaN and infinity."""

    title: str
    note: str
    xlabel: str
    curves: Curves
    log: bool = False
    from_zero: bool = False
    best: tuple[float, float] | None = None
    epochs: tuple[Mark, ...] = ()
    broken: tuple[Mark, ...] = ()

    @property
    def unit(self) -> str:
        """A short name of the x axis, for the corner below the labels of the y axis."""
        return "s" if self.xlabel == "seconds" else self.xlabel

    @property
    def some_epochs(self) -> tuple[Mark, ...]:
        """At most a dozen epochs, without the first one, which begins with the chart."""
        return self.epochs[1 :: 1 + len(self.epochs) // 12]


def titles(view: RunView) -> tuple[str, ...]:
    """The metrics with a chart of their own: not the epoch, and not the validation of another metric."""
    return tuple(name for name in view.charted if _trained(name, view.curves) is None)


def empty(names: Collection[str], ranks: int) -> list[Chart]:
    """Charts without a line, for metrics that a cell will log."""
    shown = [name for name in names if name not in (SAMPLES, EPOCH) and _trained(name, names) is None]
    made = [Chart(name, "", "step", Curves(())) for name in shown]
    if SAMPLES in names:
        made.append(Chart(f"{RATE} per rank" if ranks > 1 else RATE, "", "seconds", Curves(()), from_zero=True))
    return made


def charts(view: RunView, names: Collection[str], look: Look) -> list[Chart]:
    """A chart for each logged metric of ``names``, and the chart of samples/s."""
    made = [_metric(view, name, look) for name in names if name in view.curves]
    if any(len(points.x) > 1 for points in view.throughput.values()):
        curves = per_rank(view.throughput, look.smooth, look.ranks)
        note = f"{whole(view.samples_per_s)} in all" if len(view.ranks) > 1 else whole(view.samples_per_s)
        title = f"{RATE} per rank" if len(view.ranks) > 1 else RATE
        made.append(Chart(title, note, "seconds", curves, from_zero=True))
    return made


def _metric(view: RunView, name: str, look: Look) -> Chart:
    curves = per_rank(view.curves[name], look.smooth, look.ranks)
    beside = [one for one in view.charted if _trained(one, view.curves) == name]
    extra = [mean_line(one, view.curves[one], VALIDATION, sparse=True) for one in beside]
    judged = extra[0] if extra else _judged(curves)
    curves = replace(curves, lines=(*curves.lines, *extra))
    best = _best(judged, direction(name)) if judged is not None else None
    log = look.log and all(np.nanmin(line.y, initial=np.inf) > 0 for line in curves.lines)
    return Chart(
        name,
        _note(name, curves, judged, best, _no_numbers(view, name)),
        "step",
        curves,
        log=log,
        best=best,
        epochs=tuple(Mark(step, f"{epoch:g}") for step, epoch in view.epochs),
        broken=_broken(view.broken.get(name, {})),
    )


def _broken(firsts: Mapping[int, tuple[float, str]]) -> tuple[Mark, ...]:
    """A mark for each step at which ranks began to lack a number; the first has the label for all of them.

    Labels of their own would lie over each other, because one rank without a number soon leaves the others without one.
    """
    kinds: dict[str, list[int]] = {}
    for rank, (_, kind) in sorted(firsts.items()):
        kinds.setdefault(kind, []).append(rank)
    label = "; ".join(f"{kind}, {ranks(who)}" for kind, who in kinds.items())
    steps = sorted({step for step, _ in firsts.values()})[:MOST_BROKEN]
    return tuple(Mark(step, "" if index else label) for index, step in enumerate(steps))


def _no_numbers(view: RunView, name: str) -> str:
    """Which ranks have no number now; empty if all have one."""
    newest = {rank.rank: rank.last[name] for rank in view.ranks if name in rank.last}
    without = [rank for rank, value in newest.items() if not math.isfinite(value)]
    kind = "NaN" if any(map(math.isnan, newest.values())) else "inf"
    return f"{kind} on {ranks(without)}" if without else ""


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


def _note(
    name: str, curves: Curves, judged: Line | None, best: tuple[float, float] | None, no_numbers: str = ""
) -> str:
    if judged is None or not len(judged.y):
        return ""
    main = _judged(Curves(tuple(line for line in curves.lines if not line.sparse), curves.band)) or judged
    finite = main.y[np.isfinite(main.y)]
    # No trend beside ranks without numbers: it would praise what was before.
    parts = [no_numbers or (number(float(finite[-1])) if finite.size else "no number")]
    parts += [trend(main)] if direction(name) and not no_numbers else []
    if best is not None:
        which = judged.label.replace(name, "").strip("_/. -") if judged.sparse else ""
        parts.append(" ".join(filter(None, ["best", which, number(best[1])])))
    return " · ".join(filter(None, parts))


def direction(name: str) -> int:
    """-1 if a lower value of this metric is better, 1 if a higher one is, 0 if its name does not say."""
    return -1 if _LOWER.search(name) else 1 if _HIGHER.search(name) else 0


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


def _best(line: Line, toward: int) -> tuple[float, float] | None:
    if not toward or not np.isfinite(line.y).any():
        return None
    index = int(np.nanargmin(line.y) if toward < 0 else np.nanargmax(line.y))
    return float(line.x[index]), float(line.y[index])


def _trained(name: str, known: Collection[str]) -> str | None:
    """The metric whose validation ``name`` is: ``loss`` for ``val_loss``; None if there is none."""
    found = _VALIDATION.match(name)
    if not found:
        return None
    base = found[1] or found[2]
    like = [one for one in (base, f"train_{base}", f"train/{base}", f"{base}_train") if one in known]
    return like[0] if like and like[0] != name else None


def columns(count: int) -> str:
    """The columns of a grid of ``count`` charts in CSS: two or three per row, if the page has room."""
    least = 45 if count in (1, 2, 4) else 30
    return f"repeat(auto-fit,minmax(min(100%,max(260px,{least}%)),1fr))"
