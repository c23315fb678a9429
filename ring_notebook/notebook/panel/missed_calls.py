"""A collective that a rank never calls: said as soon as it has left the statement in which the others wait for it.

Statements of the top level of a cell are executed once and in order. So when one rank waits within a statement, for a
rank that executes a later one and has called fewer collectives, the numbers of calls differ for good.
"""

from __future__ import annotations

from typing import Any

from ring_notebook.notebook.panel.beginning import source_line
from ring_notebook.notebook.record.run_view import RankView, RunView
from ring_notebook.notebook.style import ranks

__all__ = ["sentence"]

_SECONDS = 1.0  # that a rank has waited, so that the states of both ranks are of the same moment


def sentence(view: RunView, source: str = "", first_line: int = 1) -> str:
    """Which rank waits for which, with both numbers of calls; empty where no call has been left out."""
    by_number = {rank.rank: rank for rank in view.ranks}
    for rank in view.ranks:
        waiting = (rank.status.waiting if rank.status and not rank.ended else None) or {}
        if float(waiting.get("seconds", 0.0)) < _SECONDS:
            continue
        past = [one for one in waiting.get("missing", ()) if one in by_number and _has_left_out(by_number[one], rank)]
        if past and rank.status is not None:
            other = by_number[past[0]]
            line = rank.status.line
            text = source_line(source, first_line, line)
            calls = (
                f"{_fact(rank, 'calls'):,} calls on {ranks([rank.rank])}, {_fact(other, 'calls'):,} on {ranks(past)}"
            )
            return (
                f"{calls}; the last differs at line {line}{f': {text}' if text else ''}, which {ranks(past)} has left"
            )
    return ""


def _has_left_out(other: RankView, waiting: RankView) -> bool:
    if other.ended or other.status is None or (other.status.waiting or {}):
        return False
    return _fact(other, "statement") > _fact(waiting, "statement") >= 0 and _fact(other, "calls") < _fact(
        waiting, "calls"
    )


def _fact(rank: RankView, name: str) -> int:
    value: Any = rank.status.extra.get(name, -1) if rank.status else -1
    return int(value)
