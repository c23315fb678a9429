"""The table of ranks, one row each, and of logical ranks: as cells, as HTML and as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from math import ceil

from ring_notebook.analysis.time_breakdown import SHARES, shares
from ring_notebook.notebook.colors import PHASE_COLORS, PHASE_WORDS, RED, STATUS_COLORS, rank_color
from ring_notebook.notebook.panel import machines
from ring_notebook.notebook.panel.charts.chart import RATE
from ring_notebook.notebook.record.run_view import LOGICAL, RankView, RunView
from ring_notebook.notebook.style import duration, number, whole
from ring_notebook.text.words import shortened

MOST_COLORS = 8  # ranks with a color each
TEXT_ROWS = 16
SILENT = 5.0  # seconds without a record until the table says so
MOST_METRICS = 6  # columns,
# Pixels, as in the style sheet: per character in a cell, a title and the legend; between columns; of other parts.
_CHARACTER, _BOLD, _SMALL = 6.9, 7.2, 6.2
_BESIDE, _BESIDE_NARROW, _BAR_NARROW = 9.0, 7.0, 84.0
_SPARKS, _SWATCH, _SLOW = 54.0, 14.0, 32.0
_NO_SPARKS, _NARROW_PAGE = 1100, 760  # pixels of pages without sparklines, and with another legend
_STEP = 25  # pixels: rounded, so that columns do not fold whenever a number gets a digit
SAID = 0.15  # the smallest share of time with room for its number in the bar


@dataclass(frozen=True)
class Table:
    """Column titles, the cells of each rank (first its number and status), and the ranks that the others wait for.

    Where a rank carries several logical ranks, their rows are below it, with what they have logged. ``bars`` show on a
    page where the time of each rank went; empty if no rank has reported it. ``folds``: columns that a page without
    room for all leaves out, the last one first, because a chart shows them too.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    stragglers: frozenset[int]
    bars: tuple[str, ...] = ()
    folds: tuple[str, ...] = ()


def table(view: RunView, still: bool = False) -> Table:
    """The rows of a run. ``still`` leaves out the columns of a run in progress."""
    parts = shares([rank.spent for rank in view.ranks])
    compute = parts.pop("compute", None)  # what the other parts leave
    more = len(view.charted) - MOST_METRICS
    metrics = view.charted[:MOST_METRICS] if more > 1 else view.charted  # a single one takes no more room than "1 more"
    more = len(view.charted) - len(metrics)
    silent = not still and not view.paused and any(rank.quiet > SILENT and not rank.ended for rank in view.ranks)
    columns = ["rank", "status", "step", *[RATE] * bool(view.throughput), *parts, *["silent for"] * silent]
    titles = [title for name, title in machines.COLUMNS.items() if view.loads.get(name)]
    rest = [f"and {more:,} more metrics"] * (more > 0)
    columns += [*metrics, *rest, *titles]
    folds = (*metrics, *rest, *[RATE] * bool(view.throughput))
    slow = view.slow
    late = frozenset(slow.ranks if slow else ())
    # Of very many ranks the page shows the first ones, so slow ranks come first.
    shown_ranks = sorted(view.ranks, key=lambda rank: rank.rank not in late) if view.size > TEXT_ROWS else view.ranks
    rows, bars = [], []
    died = view.died
    whole_bar = {"compute": compute, **parts} if compute else parts
    several = len(view.logical) > view.size
    of_machines = machines.cells(view)
    for rank in shown_ranks:
        cells = [str(rank.rank), status_of(rank, still, died), _step(rank)]
        if view.throughput:
            cells.append(whole(rank.samples_per_s) if rank.samples_per_s else "")
        cells += [f"{by_rank[rank.rank]:.0%}" for by_rank in parts.values()]
        if silent:
            cells.append("" if rank.ended or rank.quiet < SILENT else duration(rank.quiet))
        cells += [*_last(rank.last, metrics), *[""] * (more > 0), *of_machines[rank.rank]]
        rows.append(tuple(cells))
        bars.append(_bar(tuple((word, of[rank.rank]) for word, of in whole_bar.items())))
        carried = [one for one, carrier in view.logical.items() if carrier == rank.rank] if several else []
        for one in carried:
            newest = {name: view.newest[name][one] for name in view.in_turns if one in view.newest[name]}
            behind = ["" for _ in columns[len(columns) - len(titles) - (more > 0) :]]
            before = ["" for _ in columns[1 : len(columns) - len(titles) - (more > 0) - len(metrics)]]
            rows.append((f"{LOGICAL} {one}", *before, *_last(newest, metrics), *behind))
            bars.append("")
    return Table(tuple(columns), tuple(rows), late, tuple(bars) if parts else (), folds)


def _step(rank: RankView) -> str:
    """The newest known step. A rank that was killed did not send its last half second of records, maybe none at all."""
    known = f"≥{rank.step}" if rank.last else "?"
    return known if rank.ended and rank.ended.status == "died" else str(rank.step)


def _last(newest: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [number(newest[name]) if name in newest else "" for name in names]


# When the table is drawn again, a fifth of a second later, most rows and bars are the same: they are cached.
@lru_cache(maxsize=1024)
def _bar(parts: tuple[tuple[str, float], ...]) -> str:
    """Where a rank's time went, as a bar in the colors of a timeline, with the larger shares in numbers."""
    pieces = "".join(
        f"<i style='width:{share:.1%};background:{PHASE_COLORS[SHARES[word]]}' "
        f"title='{PHASE_WORDS[SHARES[word]]}: {share:.0%}'>{f'{share:.0%}' if share >= SAID else ''}</i>"
        for word, share in parts
        if share > 0
    )
    return f"<span class='ring-time'>{pieces}</span>"


def status_of(rank: RankView, still: bool = False, died: bool = False) -> str:
    """What a rank is doing, or how it ended, in a few words; ``died``: a rank of the run has died."""
    if rank.ended:
        return "stopped" if died and rank.ended.status == "aborted" else rank.ended.status
    if still:
        return "stopped" if died else "lost"
    if rank.status and rank.status.extra.get("paused"):
        return "paused"
    return "waiting" if rank.status and rank.status.waiting else "running"


def html(content: Table) -> str:
    """The table for a page; a few ranks are marked with the color of their lines. Bars show the shares of time."""
    columns, bars, late = content.columns, content.bars, {str(one) for one in content.stragglers}
    logical = sum(cells[0].startswith(LOGICAL) for cells in content.rows)
    colors = (logical or len(content.rows)) <= MOST_COLORS
    rows = [
        _row(
            *(columns, content.folds, cells, bars[index] if bars else None, cells[0] in late),
            colors and cells[0].startswith(LOGICAL) == (logical > 0),
        )
        for index, cells in enumerate(content.rows)
    ]
    body = f"{_head(columns, content.folds, bool(bars))}<tbody>{''.join(rows)}</tbody>"
    needs = _needs(content)
    group = "-".join(["ring-w", *(str(pixels) for one in needs for pixels in one)])
    loads = sum(name in machines.COLUMNS.values() for name in columns)
    return (
        f"{_folding(group, needs, loads)}<div class='ring-fit'><table class='ring-table {group}'>{body}</table></div>"
    )


def _needs(content: Table) -> tuple[tuple[int, int], ...]:
    """The least widths of a page that shows a column, for each of ``folds``: in the narrow and in the wide layout.

    In pixels, without sparklines. The wide layout has the legend of the bars in a title.
    """
    short = shortened(content.columns)
    characters = {}
    for index in _layout(content.columns)[1]:
        name = content.columns[index]
        longest = max((len(_BLOCKS.sub("", row[index])) for row in content.rows), default=0)
        characters[name] = max(len(short[name]) * _BOLD, longest * _CHARACTER)
    legend = len(re.sub("<[^>]*>", "", _legend(content.columns)).replace("&nbsp;", " ")) * _SMALL
    made = []
    for beside, bar in ((_BESIDE_NARROW, _BAR_NARROW), (_BESIDE, legend)):
        need = _SWATCH + _SLOW * bool(content.stragglers) + (bar + beside) * bool(content.bars)
        need += sum(pixels + beside for name, pixels in characters.items() if name not in content.folds)
        needs = []
        for name in content.folds:
            need += characters[name] + beside
            needs.append(ceil(need / _STEP) * _STEP)
        made.append(needs)
    return tuple(zip(*made, strict=True))


@lru_cache(maxsize=64)
def _folding(group: str, needs: tuple[tuple[int, int], ...], loads: int) -> str:
    """The rules for columns that a page of some width has no room for."""
    rules = []
    for place, (narrow, wide) in enumerate(needs):
        hidden = f"{{ .{group} .ring-fold-{place} {{ display: none; }} }}"
        sparks = wide + loads * _SPARKS
        for above, below in ((0, min(narrow, _NARROW_PAGE)), (_NARROW_PAGE, wide), (_NO_SPARKS, sparks)):
            if above < below:
                rules.append(f"@container ({above}px < width <= {below}px) {hidden}")
    return f"<style>{' '.join(rules)}</style>" if rules else ""


@lru_cache(maxsize=1024)
def _row(
    columns: tuple[str, ...],
    folds: tuple[str, ...],
    cells: tuple[str, ...],
    bar: str | None,
    slow: bool,
    color: bool,
) -> str:
    """The row of a rank for a page; ``color`` marks it with the color of its line."""
    rank = cells[0]
    swatch = f"<span style='color:{rank_color(int(rank.rpartition(' ')[2]))}'>■</span> " if color else ""
    mark = " <b class='ring-slow' title='the others wait for this rank'>slow</b>" if slow else ""
    place, kept = _layout(columns)
    made = [f"<td>{swatch}{rank}{mark}</td>"]
    made += [f"<td style='color:{STATUS_COLORS.get(cells[1], 'inherit')}'>{cells[1]}</td>"]
    made += [_cell(cells[column], _folds(columns[column], folds)) for column in kept[2:]]
    if bar is not None:
        made.insert(place, f"<td>{bar}</td>")
    return f"<tr>{''.join(made)}</tr>"


@lru_cache(maxsize=16)
def _head(columns: tuple[str, ...], folds: tuple[str, ...], bars: bool) -> str:
    """The titles. A narrow page has no room in them for the legend of the bars, and shows it above."""
    place, kept = _layout(columns)
    short = shortened(columns)
    heads = [
        f"<th{_folds(name, folds)} title='{escape(name, quote=True)}'>{escape(short[name])}</th>"
        for name in (columns[index] for index in kept)
    ]
    if bars:
        heads.insert(place, f"<th class='ring-legend'>{_legend(columns)}</th>")
    words = f"<caption style='display:none'>{_legend(columns)}</caption>" if bars else ""
    return f"{words}<thead><tr>{''.join(heads)}</tr></thead>"


@lru_cache(maxsize=16)
def _layout(columns: tuple[str, ...]) -> tuple[int, list[int]]:
    """The position of the bars on a page, and the columns that they do not replace."""
    place = next((index for index, column in enumerate(columns) if column in SHARES), len(columns))
    return place, [index for index, column in enumerate(columns) if column not in SHARES]


def _folds(column: str, folds: tuple[str, ...]) -> str:
    return f" class='ring-fold-{folds.index(column)}'" if column in folds else ""


def _cell(text: str, folds: str) -> str:
    """A cell. The sparkline of a load comes before its newest number."""
    blocks = _BLOCKS.match(text)
    if not blocks:
        return f"<td{folds} style='color:{RED}'>{text}</td>" if text in _BROKEN else f"<td{folds}>{escape(text)}</td>"
    return f"<td class='ring-load'><span>{blocks[0]}</span>{escape(text[blocks.end() :])}</td>"


_BLOCKS = re.compile("[▁-█]+")
_BROKEN = ("nan", "inf", "-inf")


def _legend(columns: tuple[str, ...]) -> str:
    """The legend of the bars, with rare parts only if the run has them."""
    return " ".join(
        f"<span style='color:{PHASE_COLORS[phase]}' title='{PHASE_WORDS[phase]}'>■</span>&nbsp;<span>{word}</span>"
        for word, phase in SHARES.items()
        if word not in ("asleep", "off core", "bubble") or word in columns
    )


def text(content: Table) -> str:
    """The table for a terminal; the middle of a long one is left out."""
    lines = [content.columns, *content.rows]
    if len(lines) > TEXT_ROWS + 1:
        half = TEXT_ROWS // 2
        dots = tuple("..." for _ in content.columns)
        lines = [*lines[: half + 1], dots, *lines[-half:]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
