"""A collective that a rank never calls: said as soon as it has left the statement in which the others wait for it.

Statements of the top level of a cell are executed once and in order. So when one rank waits within a statement, for a
rank that executes a later one and has called fewer collectives, the numbers of calls differ for good.

Within a loop that `track` counts, ranks may go on for long after one of them has left out a call: the next call of that
rank meets the one that the others made a step before. What each rank had called before the same steps shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ring_notebook.notebook.panel.beginning import source_line
from ring_notebook.notebook.record.run_view import RankView, RunView
from ring_notebook.notebook.style import ranks

__all__ = ["counted", "in_loop", "sentence"]

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


def in_loop(view: RunView) -> str:
    """Since when ranks in the same pass over a loop have called different numbers of collectives; empty if not."""
    passes: dict[str, dict[int, dict[int, int]]] = {}
    lines: dict[str, int] = {}
    for rank in view.ranks:
        loop = rank.status.extra.get("loop") if rank.status and not rank.ended else None
        if loop:
            passes.setdefault(loop["name"], {})[rank.rank] = {int(step): int(calls) for step, calls in loop["marks"]}
            lines[loop["name"]] = int(loop["line"])
    for name, by_rank in passes.items():
        common = sorted(set.intersection(*(set(marks) for marks in by_rank.values())))
        alike = [len({marks[step] for marks in by_rank.values()}) == 1 for step in common]
        # Alike at first: loops that differ from their beginning on are of a program that means it.
        if common and alike[0] and not alike[-1]:
            said = counted({rank: marks[common[-1]] for rank, marks in by_rank.items()})
            since = common[alike.index(False) - 1]
            place = f" at line {lines[name]}" if lines[name] else ""
            return f"{said} before step {common[-1]:,} of the loop{place}; they part after step {since:,}"
    return ""


def counted(calls: Mapping[int, int]) -> str:
    """How many collectives the ranks have called: ``101 calls on rank 0, 100 on ranks 1-3``."""
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(calls.items()):
        by_count.setdefault(count, []).append(rank)
    (most, first), *others = by_count.items()
    said = [f"{most:,} call{'s' * (most != 1)} on {ranks(first)}"]
    return ", ".join([*said, *(f"{count:,} on {ranks(members)}" for count, members in others)])


def _has_left_out(other: RankView, waiting: RankView) -> bool:
    if other.ended or other.status is None or (other.status.waiting or {}):
        return False
    return _fact(other, "statement") > _fact(waiting, "statement") >= 0 and _fact(other, "calls") < _fact(
        waiting, "calls"
    )


def _fact(rank: RankView, name: str) -> int:
    value: Any = rank.status.extra.get(name, -1) if rank.status else -1
    return int(value)
