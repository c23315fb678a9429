"""What ranks did when, read from the trace of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

__all__ = ["PHASES", "Span", "read_spans"]

PHASES = ("data", "packing", "waiting", "bubble", "moving", "sending")


class Span(NamedTuple):
    """One thing that a rank did, in seconds since the first event of the run.

    ``phase`` is one of PHASES. ``last`` is the rank that came last to what was waited for, -1 where nobody waited.
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
    spans = []
    for event in events:
        if event["ph"] != "X":
            continue
        args, begin = event["args"], event["ts"] * 1e-6
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
    first = min((span.begin for span in spans), default=0.0)
    return sorted(
        (span._replace(begin=span.begin - first, end=span.end - first) for span in spans), key=attrgetter("begin")
    )
