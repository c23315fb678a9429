"""Who waits for whom: what the panel says when no rank has made progress for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any

from ring_notebook.notebook.record.run_view import RankView
from ring_notebook.notebook.style import duration, rank_list

__all__ = ["html", "sentence"]


def sentence(ranks: Sequence[RankView]) -> str:
    """The likely reason in one sentence: which ranks have not come to the collective that others are in."""
    waiting = {rank.rank: found for rank in ranks if (found := _waiting(rank))}
    missing = {one for found in waiting.values() for one in found.get("missing", ())}
    if missing:
        return f"{_ranks(waiting)} wait{_s(waiting)} for {_ranks(missing).lower()}."
    if waiting:
        return f"{_ranks(waiting)} wait{_s(waiting)} in a collective that does not end."
    return f"{_ranks(rank.rank for rank in ranks)} may be stuck outside the collectives of this run."


def html(ranks: Sequence[RankView]) -> str:
    """A notice with a row per rank: where it is and since when. Empty without ranks."""
    if not ranks:
        return ""
    titles = ("rank", "is in", "sequence", "for", "at line", "waits for")
    head = "".join(f"<th>{title}</th>" for title in titles)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in _cells(rank)) for rank in ranks)
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        f"<div class='ring-notice' role='alert'>"
        f"<b>No progress for {duration(min(rank.idle for rank in ranks))}.</b> {escape(sentence(ranks))} "
        "Stop interrupts every rank; if that does not help, use <code>%ring restart</code>."
        f"<table class='ring-table'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _waiting(rank: RankView) -> dict[str, Any]:
    return (rank.status.waiting if rank.status else None) or {}


def _cells(rank: RankView) -> tuple[str, ...]:
    waiting = _waiting(rank)
    line = str(rank.status.line) if rank.status and rank.status.line else "?"
    if not waiting:
        return str(rank.rank), "its own code", "", duration(rank.idle), line, ""
    return (
        str(rank.rank),
        f"{waiting.get('operation')} {waiting.get('name', '')}".strip(),
        str(waiting.get("sequence", "")),
        duration(waiting.get("seconds", rank.idle)),
        line,
        rank_list(waiting.get("missing", ())),
    )


def _ranks(ranks: Iterable[int]) -> str:
    numbers = set(ranks)
    return f"Rank{'s' * (len(numbers) > 1)} {rank_list(numbers)}"


def _s(ranks: Collection[int]) -> str:
    return "s" * (len(ranks) == 1)
