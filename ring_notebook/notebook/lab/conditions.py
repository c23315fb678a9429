"""What a run can be waited for, as a user writes it: ``step 500``, ``loss has not improved for 3 epochs``, ``NaN``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from ring_notebook.errors import RingError
from ring_notebook.notebook.panel.charts.chart import results
from ring_notebook.notebook.panel.charts.curves import mean_line
from ring_notebook.notebook.panel.charts.metric_names import direction
from ring_notebook.notebook.panel.waits import stall_sentence, stuck
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.style import number
from ring_notebook.text.words import first_names

CONDITIONS = (
    "end",
    "step 500",
    "loss < 0.1",
    "val_loss has not improved for 3 epochs",
    "loss has not improved for 200 steps",
    "NaN",
    "stuck",
    "a rank is slow",
)
"""One of each kind."""
_STEP = re.compile(r"step (\d+)")
_STALE = re.compile(r"(\S+) has not improved for (\d+) (epoch|step)s?")
_BEYOND = re.compile(r"(\S+) ([<>]) (\S+)")


class Condition(NamedTuple):
    """``holds`` says in words why a run meets the condition now; empty while it does not."""

    text: str
    holds: Callable[[RunView], str]


def condition(text: str) -> Condition:
    """The condition of this text; an empty one is ``end``. Raises RingError, with a list, for any other text."""
    words = " ".join(text.split())
    fixed = {"end": lambda _: "", "nan": _broken, "stuck": _stuck, "a rank is slow": _slow}
    words = words or "end"
    if words.lower() in fixed:
        return Condition(words, fixed[words.lower()])
    if found := _STEP.fullmatch(words):
        wanted = int(found[1])
        return Condition(words, lambda view: f"step {view.step:,}" if view.step >= wanted else "")
    if found := _STALE.fullmatch(words):
        name, count, unit = found[1], int(found[2]), found[3]
        return Condition(words, lambda view: _stale(view, name, count, unit))
    if (found := _BEYOND.fullmatch(words)) and (limit := _number(found[3])) is not None:
        name, compare = found[1], operator.lt if found[2] == "<" else operator.gt
        return Condition(words, lambda view: _beyond(view, name, compare, limit))
    raise RingError(f"{text!r:.100} is no condition; expected one of: {', '.join(CONDITIONS)}")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _broken(view: RunView) -> str:
    found = [(*min(by_rank.values()), name, by_rank) for name, by_rank in view.broken.items()]
    if not found:
        return ""
    step, kind, name, by_rank = min(found, key=lambda one: one[0])
    return f"{name} is {kind} on {view.whose(name, by_rank)} at step {step:,.0f}"


def _stuck(view: RunView) -> str:
    stalled = stuck(view)
    return stall_sentence(stalled) if stalled else ""


def _slow(view: RunView) -> str:
    return view.slow.sentence if view.slow is not None else ""


def _known(view: RunView, name: str) -> bool:
    """Whether a metric has a curve. Raises RingError if the run has ended and logged only others."""
    if name in view.curves:
        return True
    if all(rank.ended is not None for rank in view.ranks) and view.names:
        raise RingError(f"no metric {name!r:.100} was logged; there are: {first_names(view.charted)}")
    return False


def _beyond(view: RunView, name: str, compare: Callable[[float, float], bool], limit: float) -> str:
    if not _known(view, name):
        return ""
    last = results(view, name)[0]
    return f"{name} is {number(last)}" if math.isfinite(last) and compare(last, limit) else ""


def _stale(view: RunView, name: str, count: int, unit: str) -> str:
    """Without a direction in its name, a lower value of a metric is better."""
    if not _known(view, name):
        return ""
    if name not in view.extremes:
        return ""
    at, value = view.extremes[name][direction(name) > 0]
    line = mean_line("", view.curves[name], "")
    told = min(own.x[-1] for own in view.curves[name].values() if len(own.x))  # by all ranks, as the extremes are
    steps = [float(x) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y) and x <= told]
    newest = max(steps, default=at)
    if unit == "step":
        since = int(newest - at)
    elif view.epochs:
        since = sum(at < step <= newest for step, _ in view.epochs)
    else:
        since = sum(step > at for step in steps)  # one value per epoch, like a validation
    return f"{name} has not improved since step {at:,.0f} ({number(value)})" if since >= count else ""
