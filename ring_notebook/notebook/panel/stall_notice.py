"""The notice of a stalled run: which ranks wait in which collective, and for which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ring_notebook.notebook.record.run_view import RankView
from ring_notebook.notebook.style import duration, rank_list, ranks

__all__ = ["html", "sentence"]


def sentence(stalled: Sequence[RankView]) -> str:
    """The likely reason in one sentence: which ranks have not called the collective that others wait in."""
    waiting = {rank.rank: found for rank in stalled if (found := _waiting(rank))}
    missing = {one for found in waiting.values() for one in found.get("missing", ())}
    waits = f"{ranks(waiting).capitalize()} wait{'s' * (len(waiting) == 1)}"
    if missing:
        return f"{waits} for {ranks(missing)}."
    if waiting:
        return f"{waits} in a collective that does not end."
    return f"{ranks(rank.rank for rank in stalled).capitalize()} may be stuck outside of collectives."


def html(stalled: Sequence[RankView]) -> str:
    """The notice for a page, with a row per rank. Empty without ranks."""
    if not stalled:
        return ""
    titles = ("rank", "is in", "sequence", "for", "at line", "waits for")
    head = "".join(f"<th>{title}</th>" for title in titles)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in _cells(rank)) for rank in stalled)
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        f"<div class='ring-notice' role='alert'>"
        f"<b>No progress for {duration(min(rank.idle for rank in stalled))}.</b> {escape(sentence(stalled))} "
        "Stop interrupts every rank; <code>%ring restart</code> ends ranks that do not stop."
        f"<table class='ring-table'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _waiting(rank: RankView) -> dict[str, Any]:
    return (rank.status.waiting if rank.status else None) or {}


def _cells(rank: RankView) -> tuple[str, ...]:
    waiting = _waiting(rank)
    line = str(rank.status.line) if rank.status and rank.status.line else "?"
    if not waiting:
        return str(rank.rank), "code outside of collectives", "", duration(rank.idle), line, ""
    return (
        str(rank.rank),
        f"{waiting.get('operation')} {waiting.get('name', '')}".strip(),
        str(waiting.get("sequence") or ""),
        duration(waiting.get("seconds", rank.idle)),
        line,
        rank_list(waiting.get("missing", ())),
    )
