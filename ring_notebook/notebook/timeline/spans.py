"""What ranks did when, read from the trace of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from ring_notebook.notebook.record.spent import Spent
from ring_notebook.records import PROGRAM, TRAINING

__all__ = ["HELD", "Span", "read_spans", "read_training", "spent_in"]

HELD = ("held", "held up")
"""Phases in which an operation holds the program: the second is the part of the first in which others had not come."""


class Span(NamedTuple):
    """One thing that a rank did, in seconds since the first event of the run.

    ``phase`` is "packing", "waiting", "moving" or "sending" of an operation of ``group``, with or without the program;
    in the group PROGRAM one of HELD, or "data", "bubble", "moving" and, for operations of other backends, "waiting".
    ``last`` is the rank that came last to what was waited for, -1 where nobody waited.
    """

    rank: int
    begin: float
    end: float
    phase: str
    what: str
    group: int
    sequence: int
    nbytes: int
    last: int


def read_spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The spans among events in Chrome's format, by begin; what is merely queued takes nobody's time."""
    first = _first(events)
    spans = []
    for event in events:
        if event["ph"] != "X":
            continue
        args, begin = event["args"], event["ts"] * 1e-6 - first
        spans.append(
            Span(
                event["pid"],
                begin,
                begin + event["dur"] * 1e-6,
                event["cat"],
                event["name"],
                event["tid"],
                args.get("sequence", 0),
                args.get("bytes", 0),
                args.get("last to arrive", -1),
            )
        )
    return sorted(spans, key=attrgetter("begin"))


def read_training(events: Iterable[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """When the training of each rank began and ended, in seconds since the first event of the run."""
    first = _first(events)
    marks: dict[int, list[float]] = {}
    for event in events:
        if event.get("cat") == TRAINING:
            marks.setdefault(event["pid"], []).append(event["ts"] * 1e-6 - first)
    return {rank: (min(moments), max(moments)) for rank, moments in marks.items()}


def _first(events: Iterable[dict[str, Any]]) -> float:
    return min((event["ts"] * 1e-6 for event in events if event["ph"] == "X"), default=0.0)


def spent_in(spans: Iterable[Span], begin: float, end: float) -> Spent:
    """Where the time of one rank went from ``begin`` to ``end``: the same parts as ranks count themselves in a run."""
    parts: dict[str, list[Span]] = {}
    for span in spans:
        if span.group == PROGRAM:
            parts.setdefault(span.phase, []).append(span)

    def seconds(*phases: str) -> float:
        return _covered([span for phase in phases for span in parts.get(phase, ())], begin, end)

    held_up = seconds("held up")
    moving = seconds("held", "moving") - held_up
    return Spent(end - begin, moving, held_up + seconds("waiting"), seconds("bubble"), seconds("data"))


def _covered(spans: Iterable[Span], begin: float, end: float) -> float:
    """Seconds in which at least one of them was, since several threads of a program may wait at the same time."""
    total, reached = 0.0, begin
    for span in sorted(spans, key=attrgetter("begin")):
        until = min(span.end, end)
        total += max(0.0, until - max(span.begin, reached))
        reached = max(reached, until)
    return total
