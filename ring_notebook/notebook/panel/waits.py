"""Where ranks are that make no step, in words: before the first step, stalled, or after one rank has left out a call.

Statements at the top level of a cell are executed once and in order. So if a rank waits in a statement for a rank that
is in a later one and has called fewer collectives, that rank has left out a call.

In a loop that `track` counts, ranks may continue for long after one of them has left out a call: its next call meets
the call that the others made a step before. The numbers of calls at the beginning of the same steps show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from ring_notebook.config import config
from ring_notebook.notebook.record.run_view import RankView, RunView
from ring_notebook.notebook.style import duration
from ring_notebook.text.words import first_characters, operation_title, plural, rank_list, ranks

_MOST_PLACES = 4  # lines of the cell, with the ranks that are there
_MOST_ROWS = 8
_MOST_CHARACTERS = 100
_SECONDS = 1.0  # after so long a wait, the states of both ranks are of the same moment


CodeAt = Callable[[int], str]
"""Gives the text of a line of the cell, as `RunRecord.code_at` does."""


def _no_code(_: int) -> str:
    return ""


def beginning(view: RunView, code_at: CodeAt) -> list[str]:
    """Before the first step, a line for each line of the cell at which ranks are, and each package they import there.

    Each says for how long; there is none when all ranks have ended.
    """
    places: dict[tuple[int, str], list[int]] = {}
    since: dict[tuple[int, str], float] = {}
    for rank in view.ranks:
        if rank.ended is None:
            place = (rank.status.line, str(_fact(rank, "importing") or "")) if rank.status else (-1, "")
            places.setdefault(place, []).append(rank.rank)
            since[place] = max(since.get(place, 0.0), rank.idle)
    shown = sorted(places)[:_MOST_PLACES]
    return [f"{_at(*place, places[place], view.size, code_at)} ({duration(since[place])})" for place in shown]


def _at(line: int, package: str, who: list[int], size: int, code_at: CodeAt) -> str:
    where = f"line {line}: {first_characters(code_at(line), _MOST_CHARACTERS)}"
    if package:
        on = plural(size, "rank") if len(who) == size else ranks(who)
        return f"importing {package} on {on}{f', {where}' if line > 0 else ''}"
    if line > 0:
        return f"{ranks(who)} at {where}"
    return f"{ranks(who)}: {'opening the run' if line == 0 else 'the cell is on its way'}"


def beginning_html(lines: Sequence[str]) -> str:
    """These lines for a page; empty without any."""
    return f"<div class='ring-begin'>{''.join(f'<div>{escape(one)}</div>' for one in lines)}</div>" if lines else ""


def stuck(view: RunView) -> tuple[RankView, ...]:
    """All ranks, if none has made progress for RING_STALL_WARNING seconds; empty before the run has begun to train."""
    stalled = view.stuck(config().stall_warning)
    trains = view.names or any(rank.status and rank.status.waiting for rank in stalled)
    return stalled if trains else ()


def stall_sentence(stalled: Sequence[RankView], code_at: CodeAt = _no_code) -> str:
    """How long the run is stuck, and why: which ranks have not called the collective, and where they are."""
    waiting = {rank.rank: found for rank in stalled if (found := _waiting(rank))}
    missing = {one for found in waiting.values() for one in found.get("missing", ())}
    begin = f"{'stuck' if waiting else 'no progress'} for {duration(min(rank.idle for rank in stalled))}: "
    waits = f"{ranks(waiting)} wait{'s' * (len(waiting) == 1)}"
    if missing:
        text = f"{waits} for {ranks(missing)} in {_operation(next(iter(waiting.values())))}"
        absent = next((rank for rank in stalled if rank.rank in missing and not _waiting(rank)), None)
        place = _place(absent, code_at) if absent else ""
        return begin + text + (f"; {ranks([absent.rank])} is {place}" if absent and place else "") + _calls(stalled)
    if waiting:
        return f"{begin}{waits} in {_operation(next(iter(waiting.values())))}, which does not end{_calls(stalled)}"
    places = {_place(rank, code_at) for rank in stalled}
    where = f" {places.pop()}" if len(places) == 1 else ", outside of collectives"
    return f"{begin}{ranks(rank.rank for rank in stalled)}{where}"


def whereabouts(view: RunView, code_at: CodeAt) -> list[str]:
    """Where ranks are when a time limit stops them: who waits for whom if none moved for a second, else their lines."""
    stalled = view.stuck(_SECONDS)
    return [stall_sentence(stalled, code_at)] if any(map(_waiting, stalled)) else beginning(view, code_at)


def _operation(waiting: dict[str, Any]) -> str:
    return operation_title(str(waiting.get("operation")), waiting.get("name") or "")


def _place(rank: RankView, code_at: CodeAt) -> str:
    line = rank.status.line if rank.status else 0
    text = first_characters(code_at(line), _MOST_CHARACTERS)
    return f"at line {line}{f': {text}' if text else ''}" if line else ""


def _calls(stalled: Sequence[RankView]) -> str:
    """If the ranks have called different numbers of collectives: the most, the least, and the line."""
    calls = {rank.rank: int(found) for rank in stalled if (found := _fact(rank, "calls")) is not None}
    if len(set(calls.values())) < 2:
        return ""
    most, least = max(calls, key=calls.__getitem__), min(calls, key=calls.__getitem__)
    line = next((rank.status.line for rank in stalled if rank.rank == most and rank.status), 0)
    where = f"; the last differs at line {line}" if line else ""
    return f". {plural(calls[most], 'call')} on rank {most}, {calls[least]:,} on rank {least}{where}"


def _fact(rank: RankView, name: str) -> Any:
    return rank.status.extra.get(name) if rank.status else None


def stall_html(stalled: Sequence[RankView], code_at: CodeAt = _no_code) -> str:
    """The notice for a page: a row for all ranks that do the same. Empty without ranks."""
    if not stalled:
        return ""
    titles = ("rank", "is in", "calls", "for", "at line", "waits for")
    head = "".join(f"<th>{title}</th>" for title in titles)
    alike: dict[tuple[str, str, str, str], list[RankView]] = {}
    for rank in stalled:
        alike.setdefault(_cells(rank, code_at), []).append(rank)
    rows = ""
    for (what, call, line, missing), who in [*alike.items()][:_MOST_ROWS]:
        since = duration(max(_waiting(rank).get("seconds", rank.idle) for rank in who))
        cells = (rank_list(rank.rank for rank in who), what, call, since, line, missing)
        rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    return (
        "<div class='ring-notice ring-stuck'>"
        "Stop interrupts every rank; <code>%ring restart</code> ends ranks that do not stop."
        f"<table class='ring-table'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _waiting(rank: RankView) -> dict[str, Any]:
    return (rank.status.waiting if rank.status else None) or {}


def _cells(rank: RankView, code_at: CodeAt) -> tuple[str, str, str, str]:
    """The operation that a rank is in, how many it has called, the line, and the ranks it waits for."""
    waiting = _waiting(rank)
    number = rank.status.line if rank.status else 0
    line = f"{number}: {first_characters(code_at(number), _MOST_CHARACTERS)}" if number else "?"
    calls = _fact(rank, "calls")
    called = "" if calls is None else f"{calls:,}"
    if not waiting:
        return "code outside of collectives", called, line, ""
    operation = f"{waiting.get('operation')} {waiting.get('name', '')}".strip()
    return operation, called, line, rank_list(waiting.get("missing", ()))


def left_out(view: RunView, code_at: CodeAt) -> str:
    """Which rank waits for which, with both numbers of calls; empty if no call has been left out."""
    by_number = {rank.rank: rank for rank in view.ranks}
    for rank in view.ranks:
        waiting = {} if rank.ended else _waiting(rank)
        if float(waiting.get("seconds", 0.0)) < _SECONDS:
            continue
        past = [one for one in waiting.get("missing", ()) if one in by_number and _has_left_out(by_number[one], rank)]
        if past:
            own, theirs = _number(rank, "calls"), _number(by_number[past[0]], "calls")
            calls = f"{own:,} calls on {ranks([rank.rank])}, {theirs:,} on {ranks(past)}"
            place = _place(rank, code_at) or "at an unknown line"
            return f"{calls}; the last differs {place}, which {ranks(past)} has left"
    return ""


def left_out_in_loop(view: RunView) -> str:
    """The step since which ranks in the same loop have called different numbers of collectives; empty if none."""
    passes: dict[str, dict[int, dict[int, int]]] = {}
    lines: dict[str, int] = {}
    for rank in view.ranks:
        loop = None if rank.ended else _fact(rank, "loop")
        if loop:
            passes.setdefault(loop["name"], {})[rank.rank] = {int(step): int(calls) for step, calls in loop["marks"]}
            lines[loop["name"]] = int(loop["line"])
    for name, by_rank in passes.items():
        common = sorted(set.intersection(*(set(marks) for marks in by_rank.values())))
        alike = [len({marks[step] for marks in by_rank.values()}) == 1 for step in common]
        # Equal at first: if they differ from the beginning, the program means it.
        if common and alike[0] and not alike[-1]:
            calls = count_calls({rank: marks[common[-1]] for rank, marks in by_rank.items()})
            since = common[alike.index(False) - 1]
            place = f" at line {lines[name]}" if lines[name] else ""
            return f"{calls} before step {common[-1]:,} of the loop{place}; they part after step {since:,}"
    return ""


def count_calls(calls: Mapping[int, int]) -> str:
    """How many collectives the ranks have called: ``101 calls on rank 0, 100 on ranks 1-3``."""
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(calls.items()):
        by_count.setdefault(count, []).append(rank)
    (most, first), *others = by_count.items()
    parts = [f"{most:,} call{'s' * (most != 1)} on {ranks(first)}"]
    return ", ".join([*parts, *(f"{count:,} on {ranks(members)}" for count, members in others)])


def _has_left_out(other: RankView, waiting: RankView) -> bool:
    if other.ended or other.status is None or other.status.waiting:
        return False
    later = _number(other, "statement") > _number(waiting, "statement") >= 0
    return later and _number(other, "calls") < _number(waiting, "calls")


def _number(rank: RankView, name: str) -> int:
    found = _fact(rank, name)
    return -1 if found is None else int(found)
