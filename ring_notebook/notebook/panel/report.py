"""The report of a run that stays in the saved notebook: a page without widgets, and text for terminals."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from IPython.display import HTML

from ring_notebook.notebook.panel import hints, rank_table
from ring_notebook.notebook.panel.charts.curves import MOST_LINES, Curves, many, per_rank
from ring_notebook.notebook.panel.charts.svg_chart import line_chart
from ring_notebook.notebook.panel.output import displays_html, labelled_lines
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.style import CSS, STATUS_COLORS, duration, first_names, plural, rank_list, whole

__all__ = ["alert", "compare", "figure", "headline", "lint", "mime_bundle", "outputs", "under_way"]

LONG_ENOUGH = 1.0  # seconds, for shares of a run's time to mean something
MOST_CHARTS = 12  # of metrics, where --plot names none
VISIBLE = 10  # of the last lines of output, those before them behind a click
MOST_PRINTED = 200  # lines of output in the page; the whole of it is on disk


def mime_bundle(log: RunRecord, plot: Sequence[str] = (), displays: bool = False) -> dict[str, str]:
    """The report of a run as ``text/html`` and ``text/plain``. ``plot`` names the metrics to chart.

    With ``displays`` it includes what the ranks have displayed; otherwise `outputs` shows that.
    """
    view = log.view()
    page, text = _page(log, view, plot), _text(log, view, plot)
    if displays and view.displays:
        page += f"<div>{displays_html.html(view.displays)}</div>{escape(_earlier(log, view))}"
        text = "\n".join(filter(None, [text, displays_html.text(view.displays) + _earlier(log, view)]))
    return {"text/html": page, "text/plain": text}


def under_way(log: RunRecord) -> dict[str, str]:
    """The text in place of a live panel that cannot be drawn, as ``text/html`` and ``text/plain``."""
    text = (
        f"Run {log.name or log.run} on {plural(log.size, 'rank')} was in progress when this notebook was saved. "
        f"%ring attach shows it, here or in another notebook; its records are in {log.directory}"
    )
    return {"text/html": f"<div>{escape(text)}</div>", "text/plain": text}


def outputs(log: RunRecord) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the ranks have displayed as outputs of a notebook (data, metadata), each after a label with its ranks."""
    view = log.view()
    bundles: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for one in view.displays:
        ranks = {"text/html": displays_html.label(one), "text/plain": f"[{rank_list(one.ranks)}]"}
        bundles += [(ranks, {}), (one.data, one.metadata)]
    return [({"text/plain": note}, {}) for note in [_earlier(log, view)] if note] + bundles


def _earlier(log: RunRecord, view: RunView) -> str:
    """Where to find the displays that are too old to be shown; empty when all are shown."""
    return f"{view.dropped} earlier displays: see Run.displays, or {log.directory}" if view.dropped else ""


def figure(log: RunRecord, names: Sequence[str] = ()) -> HTML:
    """Charts of the named metrics, of all without names.

    Raises KeyError that lists the metrics of the run when one is not among them.
    """
    view = log.view()
    for name in names:
        if name not in view.curves:
            raise KeyError(f"run {log.run} has no metric {name!r}; it logged: {first_names(view.charted) or 'none'}")
    return HTML(CSS + _charts(view, names or view.charted[:MOST_CHARTS]) + _uncharted(view, names))


def compare(logs: Sequence[RunRecord], names: Sequence[str] = ()) -> HTML:
    """Runs laid over one another: a chart per metric with the mean over ranks of each run."""
    views = {label: log.view() for label, log in zip(_labels(logs), logs, strict=True)}
    shared = names or tuple(dict.fromkeys(name for view in views.values() for name in view.charted))
    charts = []
    for name in shared:
        curves = {run: view.curves[name] for run, view in views.items() if name in view.curves}
        charts.append(_image(name, many(curves), "step"))
    rates = {run: view.throughput for run, view in views.items() if view.throughput}
    if rates:
        charts.append(_image("samples/s per rank", many(rates), "seconds", from_zero=True))
    return HTML(f"{CSS}<div class='ring-charts'>{''.join(charts)}</div>")


def _labels(logs: Sequence[RunRecord]) -> list[str]:
    """The label of each run in a legend: its name or time of day; both, or a number, where that is not unique."""
    times = [time.strftime("%H:%M:%S", time.localtime(log.started)) for log in logs]
    short = [log.name or now for log, now in zip(logs, times, strict=True)]
    longer = [
        one if short.count(one) == 1 else f"{log.name} {now}".strip()
        for one, log, now in zip(short, logs, times, strict=True)
    ]
    return [one if longer.count(one) == 1 else f"{one} #{index}" for index, one in enumerate(longer, start=1)]


def alert(trouble: str) -> str:
    """A red notice for a page; empty without ``trouble``."""
    return f"<div class='ring-notice ring-alert' role='alert'>{escape(trouble)}</div>" if trouble else ""


def lint(log: RunRecord) -> hints.Lint:
    """The hints for the cell of a run."""
    return hints.Lint(log.source, log.options.get("first_line", 1), gpus=bool(log.environment.get("gpus")))


def headline(log: RunRecord, view: RunView) -> list[str]:
    """The parts of the first line: name, ranks, time, throughput, and the most that the run can have gained."""
    parts = [log.name or log.run, _on_ranks(log, view), duration(view.elapsed)]
    if view.samples_per_s:
        parts.append(f"{whole(view.samples_per_s)} samples/s")
    return [*parts, *_bound(log, view)]


def _on_ranks(log: RunRecord, view: RunView) -> str:
    """How many ranks, and which of the cluster where the cell was for some."""
    ranks = log.options.get("ranks")
    count = plural(view.size, "rank")
    if isinstance(ranks, list) and ranks and all(isinstance(rank, int) for rank in ranks):
        return f"{count} ({rank_list(ranks)} of the cluster)"
    return count


def _bound(log: RunRecord, view: RunView) -> list[str]:
    """The largest possible speedup over one rank, of a run that trains or has ended well.

    It is the sum of the ranks' shares of time outside of communication: what ranks gain that compute as fast as one
    rank alone would. Shared memory bandwidth makes them slower, which only `%%ringscale` measures. Nothing is said of
    ranks that share cores.
    """
    trained = log.status in ("running", "ok") and view.elapsed >= LONG_ENOUGH and any(r.samples for r in view.ranks)
    about = log.environment
    own_cores = bool(about.get("gpus")) or view.size <= about.get("cores", 0) * len(about.get("hosts", ()))
    if not (trained and own_cores and view.size > 1 and (work := rank_table.work(view))):
        return []
    return [f"at most {sum(work.values()):.2g}x one rank, by the time in communication"]


def _page(log: RunRecord, view: RunView, plot: Sequence[str]) -> str:
    color = STATUS_COLORS.get(log.status, "inherit")
    name, *rest = (escape(part) for part in headline(log, view))
    notice = "".join(f"<div class='ring-notice'>{escape(one)}</div>" for one in _notices(log, view, plot))
    content = rank_table.table(view, still=True)
    logged = rank_table.html(content, colors=view.size <= MOST_LINES) if view.names else ""
    return (
        f"{CSS}<div class='ring-report'><div class='ring-head'>"
        f"<span style='color:{color}'>● {log.status}</span><b>{name}</b>"
        f"{''.join(f'<span>{part}</span>' for part in rest)}</div>"
        f"{alert(_trouble(log))}{notice}"
        f"{_charts(view, plot or view.charted[:MOST_CHARTS])}{_uncharted(view, plot)}"
        f"<div class='ring-rows'>{logged}</div>"
        f"{hints.html(lint(log).hints(view))}{_output(log, view)}</div>"
    )


def _notices(log: RunRecord, view: RunView, plot: Sequence[str]) -> list[str]:
    """What is wrong: the run's error, and metrics in ``plot`` that were not logged."""
    missing = [name for name in plot if name not in view.names]
    logged = first_names(view.charted)
    note = f"--plot {', '.join(missing)}: not logged; the run logged {logged or 'no metrics'}."
    return [*filter(None, [log.summary.get("error", "")]), *([note] if missing and log.summary else [])]


def _trouble(log: RunRecord) -> str:
    """Why the records of the run are not complete, or not where they should be."""
    return str(log.trouble or log.summary.get("trouble", ""))


def _uncharted(view: RunView, plot: Sequence[str]) -> str:
    more = 0 if plot else len(view.charted) - MOST_CHARTS
    return f"<div>{more:,} more metrics: --plot NAME, or Run.plot(NAME), charts them</div>" if more > 0 else ""


def _charts(view: RunView, names: Sequence[str]) -> str:
    charts = [_image(name, per_rank(view.curves[name]), "step") for name in names if name in view.curves]
    if any(len(points.x) > 1 for points in view.throughput.values()):
        charts.append(_image("samples/s", per_rank(view.throughput), "seconds", from_zero=True))
    return f"<div class='ring-charts'>{''.join(charts)}</div>" if charts else ""


def _image(title: str, curves: Curves, xlabel: str, from_zero: bool = False) -> str:
    # As an image: front ends remove inline SVG from notebooks that are not trusted.
    data = base64.b64encode(line_chart(title, curves, xlabel, from_zero).encode()).decode()
    return f"<img alt='{escape(title, quote=True)} over {xlabel}' src='data:image/svg+xml;base64,{data}'>"


def _output(log: RunRecord, view: RunView) -> str:
    lines = labelled_lines.Lines().take(view.output, last=True)
    if not lines:
        return ""
    where = f"<div>Earlier lines are in {escape(str(log.directory))}</div>" if len(lines) > MOST_PRINTED else ""
    before, visible = labelled_lines.split_last(lines[-MOST_PRINTED:], VISIBLE)
    hidden = plural(labelled_lines.count(lines) - labelled_lines.count(visible), "earlier line")
    earlier = (
        f"<details><summary>{hidden}</summary>"
        f"{where}<div class='ring-lines'>{labelled_lines.html(before)}</div></details>"
    )
    return f"{earlier if before else ''}<div class='ring-lines'>{labelled_lines.html(visible)}</div>"


def _text(log: RunRecord, view: RunView, plot: Sequence[str]) -> str:
    parts = [", ".join([log.status, *headline(log, view)])]
    parts += [_trouble(log), *_notices(log, view, plot)]
    if view.names:
        parts.append(rank_table.text(rank_table.table(view, still=True)))
    parts += map(hints.text, lint(log).hints(view))
    parts.append(labelled_lines.text(labelled_lines.Lines().take(view.output, last=True)[-MOST_PRINTED:]).rstrip("\n"))
    return "\n".join(part for part in parts if part)
