"""The table of ranks, one row each: as cells, as HTML and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from statistics import median_low

from ring_notebook.notebook.record.run_view import RankView, RunView
from ring_notebook.notebook.style import STATUS_COLORS, ago, number, rank_color, whole

__all__ = ["Table", "html", "table", "text", "work"]

SLOW = 0.85  # a rank is slow when the usual one works less than this share of what it does
TEXT_ROWS = 16
MOST_METRICS = 12  # columns


@dataclass(frozen=True)
class Table:
    """Column titles, the cells of each rank (first its number and status), and the ranks that the others wait for."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    stragglers: frozenset[int]


def table(view: RunView, still: bool = False) -> Table:
    """The rows of a run. ``still`` leaves out the columns of a run in progress."""
    shares = {
        title: {rank.rank: _share(view, rank, fact) for rank in view.ranks}
        for title, fact in (("communication", "communication"), ("waiting for data", "data_wait"))
    }
    shares = {title: by_rank for title, by_rank in shares.items() if any(by_rank.values())}
    shown = view.charted[:MOST_METRICS]
    more = len(view.charted) - len(shown)
    columns = ["rank", "status", "step", *shown, *[f"and {more:,} more metrics"] * (more > 0)]
    columns += ["samples/s"] * bool(view.throughput) + list(shares) + ["last record"] * (not still)
    rows = []
    for rank in view.ranks:
        cells = [str(rank.rank), status_of(rank, still), str(rank.step)]
        cells += [number(rank.last[name]) if name in rank.last else "" for name in shown]
        cells += [""] * (more > 0)
        if view.throughput:
            cells.append(whole(rank.samples_per_s) if rank.samples_per_s else "")
        cells += [f"{by_rank[rank.rank]:.0%}" for by_rank in shares.values()]
        if not still:
            cells.append("" if rank.ended else ago(rank.quiet))
        rows.append(tuple(cells))
    return Table(tuple(columns), tuple(rows), _stragglers(work(view)))


def work(view: RunView) -> dict[int, float]:
    """The share of its time that each rank spends outside of collectives; empty when it called none."""
    shares = {rank.rank: _share(view, rank, "communication") for rank in view.ranks}
    return {rank: 1 - share for rank, share in shares.items()} if any(shares.values()) else {}


def _stragglers(work: Mapping[int, float]) -> frozenset[int]:
    """The ranks that the others wait for, by the share of time that each spends outside of collectives.

    Ranks in lockstep all have the same samples/s; the slow rank is the one that hardly waits.
    """
    if len(work) < 2:
        return frozenset()
    usual = median_low(work.values())
    return frozenset(rank for rank, share in work.items() if usual < SLOW * share)


def status_of(rank: RankView, still: bool = False) -> str:
    """What a rank is doing, or how it ended, in one word."""
    if rank.ended:
        return rank.ended.status
    if still:
        return "lost"
    return "waiting" if rank.status and rank.status.waiting else "running"


def _share(view: RunView, rank: RankView, fact: str) -> float:
    """The share of its time that a rank spent on ``fact``, 0 to 1."""
    facts = rank.ended.summary if rank.ended else rank.status.extra if rank.status else {}
    seconds = rank.ended.seconds if rank.ended else view.elapsed
    return min(float(facts.get(fact, 0.0)) / seconds, 1.0) if seconds > 0 else 0.0


def html(content: Table, colors: bool) -> str:
    """The table for a page. ``colors`` marks each rank with the color of its line."""
    head = "".join(f"<th>{escape(column)}</th>" for column in content.columns)
    rows = []
    for rank, cells in enumerate(content.rows):
        swatch = f"<span style='color:{rank_color(rank)}'>■</span> " if colors else ""
        slow = " <b title='the others wait for this rank'>slow</b>" if rank in content.stragglers else ""
        color = STATUS_COLORS.get(cells[1], "inherit")
        first = f"<td>{swatch}{cells[0]}{slow}</td><td style='color:{color}'>{cells[1]}</td>"
        rows.append("<tr>" + first + "".join(f"<td>{escape(cell)}</td>" for cell in cells[2:]) + "</tr>")
    return f"<table class='ring-table'><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def text(content: Table) -> str:
    """The table for a terminal; a long one is cut in its middle."""
    lines = [content.columns, *content.rows]
    if len(lines) > TEXT_ROWS + 1:
        half = TEXT_ROWS // 2
        dots = tuple("..." for _ in content.columns)
        lines = [*lines[: half + 1], dots, *lines[-half:]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
