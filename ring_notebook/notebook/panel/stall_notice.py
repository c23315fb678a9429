"""The notice of a stalled run: which ranks wait in which collective, and for which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ring_notebook.notebook.panel.beginning import source_line
from ring_notebook.notebook.record.run_view import RankView
from ring_notebook.notebook.style import duration, rank_list, ranks

__all__ = ["html", "sentence"]


MOST_ROWS = 8


def sentence(stalled: Sequence[RankView], source: str = "", first_line: int = 1) -> str:
    """How long and why: which ranks have not called the collective that others wait in, and where they are instead."""
    waiting = {rank.rank: found for rank in stalled if (found := _waiting(rank))}
    missing = {one for found in waiting.values() for one in found.get("missing", ())}
    begin = f"{'stuck' if waiting else 'no progress'} for {duration(min(rank.idle for rank in stalled))}: "
    waits = f"{ranks(waiting)} wait{'s' * (len(waiting) == 1)}"
    if missing:
        text = f"{waits} for {ranks(missing)} in {_operation(next(iter(waiting.values())))}"
        absent = next((rank for rank in stalled if rank.rank in missing and not _waiting(rank)), None)
        place = _place(absent, source, first_line) if absent else ""
        return begin + text + (f"; {ranks([absent.rank])} is {place}" if absent and place else "") + _calls(stalled)
    if waiting:
        return f"{begin}{waits} in {_operation(next(iter(waiting.values())))}, which does not end{_calls(stalled)}"
    places = {_place(rank, source, first_line) for rank in stalled}
    where = f" {places.pop()}" if len(places) == 1 else ", outside of collectives"
    return f"{begin}{ranks(rank.rank for rank in stalled)}{where}"


def _operation(waiting: dict[str, Any]) -> str:
    name = waiting.get("name")
    return f"{waiting.get('operation')} '{name}'" if name else str(waiting.get("operation"))


def _place(rank: RankView, source: str, first_line: int) -> str:
    line = rank.status.line if rank.status else 0
    text = source_line(source, first_line, line)
    return f"at line {line}{f': {text}' if text else ''}" if line else ""


def _calls(stalled: Sequence[RankView]) -> str:
    """Where the ranks have called different numbers of collectives: how many the most and the least, and where."""
    calls = {rank.rank: int(found) for rank in stalled if (found := _fact(rank, "calls")) is not None}
    if len(set(calls.values())) < 2:
        return ""
    most, least = max(calls, key=calls.__getitem__), min(calls, key=calls.__getitem__)
    line = next((rank.status.line for rank in stalled if rank.rank == most and rank.status), 0)
    where = f"; the last differs at line {line}" if line else ""
    return f". {calls[most]:,} calls on rank {most}, {calls[least]:,} on rank {least}{where}"


def _fact(rank: RankView, name: str) -> Any:
    return rank.status.extra.get(name) if rank.status else None


def html(stalled: Sequence[RankView], source: str = "", first_line: int = 1) -> str:
    """The notice for a page, with a row for the ranks that do the same, the first of them. Empty without ranks."""
    if not stalled:
        return ""
    titles = ("rank", "is in", "calls", "for", "at line", "waits for")
    head = "".join(f"<th>{title}</th>" for title in titles)
    alike: dict[tuple[str, str, str, str], list[RankView]] = {}
    for rank in stalled:
        alike.setdefault(_cells(rank, source, first_line), []).append(rank)
    rows = ""
    for (what, call, line, missing), who in [*alike.items()][:MOST_ROWS]:
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


def _cells(rank: RankView, source: str, first_line: int) -> tuple[str, str, str, str]:
    """What a rank is in, how many collectives it has called, the line, and whom it waits for."""
    waiting = _waiting(rank)
    number = rank.status.line if rank.status else 0
    line = f"{number}: {source_line(source, first_line, number)}" if number else "?"
    calls = _fact(rank, "calls")
    called = "" if calls is None else f"{calls:,}"
    if not waiting:
        return "code outside of collectives", called, line, ""
    return (
        f"{waiting.get('operation')} {waiting.get('name', '')}".strip(),
        called,
        line,
        rank_list(waiting.get("missing", ())),
    )
