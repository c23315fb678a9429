"""The report of a run that stays in the saved notebook: a page without widgets, and text for terminals."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from shlex import quote
from typing import Any

from IPython.display import HTML

from ring_notebook.machine.energy import energy_text
from ring_notebook.notebook.panel import display_area, headline, hints, labelled_lines, machines, rank_table, waits
from ring_notebook.notebook.panel.charts import svg_chart
from ring_notebook.notebook.panel.charts.chart import Chart, charts, compared, grouped
from ring_notebook.notebook.panel.charts.metric_names import Section, expanded, missing, titles
from ring_notebook.notebook.record.run_files import notebook
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import Printed, RunView, charted_in
from ring_notebook.notebook.record.tags_and_look import Look
from ring_notebook.notebook.style import CSS, shown
from ring_notebook.text.words import first_names, plural, rank_list

MOST_CHARTS = 12  # of metrics, without --plot;
MOST_FOLDED = 36  # others behind a click, of some 20 KB each
MACHINE_SECONDS = 10.0  # a shorter cell without metrics shows no load of the machines
VISIBLE = 50  # last lines of output; a click shows those before them
MOST_PARAMS = 16
MOST_OPEN = 8  # changes of knobs
MOST_PRINTED = 500  # lines of output in the page; all of them are on disk


def mime_bundle(log: RunRecord, plot: Sequence[str] = (), displays: bool = False, error: bool = True) -> dict[str, str]:
    """The report of a run as ``text/html`` and ``text/plain``. ``plot`` names the metrics to chart.

    With ``displays`` it includes the displays of the ranks; otherwise `outputs` shows them. Without ``error`` it leaves
    out why the run has failed, because the cell raises that itself.
    """
    view = log.view()
    page, text = _page(log, view, plot, error), _text(log, view, plot, error)
    if displays and view.displays:
        page += escape(_earlier(log, view))
        text = "\n".join([*filter(None, [text, _earlier(log, view)]), ""])
        for one, after in zip(view.displays, _between(view)[1:], strict=True):
            page += f"<div>{display_area.html([one])}</div>{_output(log, after)}"
            text += display_area.text([one]) + _printed(after)
    return _bundle(page, text)


def under_way(log: RunRecord) -> dict[str, str]:
    """The text in place of a live panel that cannot be drawn, as ``text/html`` and ``text/plain``."""
    text = f"Run {log.title} on {plural(log.size, 'rank')} was in progress when this page last heard of it. "
    text += f"{_HERE}; {_later(log)}"
    return _bundle(f"<div>{escape(text)}</div>", text)


# A page outlives its kernel and the cluster, so its advice must hold whether they run or not.
_ENDS = "a cluster ends with its notebook's kernel, unless it was started with --keep"
_HERE = f"While its cluster runs, %ring attach shows it, here or in another notebook; {_ENDS}"


def _later(log: RunRecord) -> str:
    return f"its records are in {log.directory}; once it has ended, `%ring runs compare {log.run}` shows them"


def last_state(log: RunRecord, plot: Sequence[str] = (), waiting: bool = False) -> dict[str, str]:
    """The run in progress as a picture and as text, for a page without the panel; other pages hide them.

    Before the first step they say what the ranks do. With ``waiting`` a cell waits for the run: a page that is
    opened meanwhile has the panel only with ipykernel 7 and our widgets, else this; a terminal has the text.
    """
    view = log.view()
    doing = () if view.names else waits.beginning(view, log.code_at)
    content = replace(headline.headline(log, view), status="last state seen", left=None)
    shown = _charts(grouped(view, plot, log.look, MOST_CHARTS))
    table = rank_table.html(rank_table.table(view)) if view.names or view.died else ""
    attach, stop = _HERE, ""
    if waiting:
        name = quote(Path(notebook()).name or "NOTEBOOK")
        attach = f"`%ring attach {name}` in another notebook shows and steers it while its cluster runs"
        stop = (
            f"{_ENDS[0].upper()}{_ENDS[1:]}: then %ring attach shows the run here after a restart of the kernel. "
            "While the cell waits for the run, interrupt the kernel (■) to stop it; "
        )
    attach += f"; {_later(log)}"
    page = (
        f"{CSS}{_LAST.replace('RUN', run_class(log))}{svg_chart.CSS * bool(shown)}"
        f"<div class='ring-last {run_class(log)}'>{headline.html(content)}"
        f"<div class='ring-notice'>{escape(stop + attach)}</div>"
        f"{waits.beginning_html(doing)}{shown}{display_area.row(view.media)}"
        f"<div class='ring-rows'>{table}</div>{_output(log, view.output, view.dropped_lines)}</div>"
    )
    return _bundle(page, "\n".join([_text(log, view, plot, error=True), *doing, attach]))


def _bundle(page: str, text: str) -> dict[str, str]:
    """Both without surrogates, which cannot be printed. In the locale C they stand for bytes of a folder's name."""
    return {"text/html": _encodable(page), "text/plain": _encodable(text)}


def _encodable(text: str) -> str:
    try:
        return text.encode(errors="surrogateescape").decode(errors="replace")
    except UnicodeEncodeError:  # a cell has printed half a character
        return text.encode(errors="replace").decode()


def run_class(log: RunRecord) -> str:
    """The class of a page's elements that show this run."""
    return f"ring-run-{re.sub(r'[^a-zA-Z0-9-]', '-', log.run)}"


# A page shows the panel or its last state. JupyterLab says "model not found" in the place of a panel whose kernel has
# ended, or is busy while the page opens.
_LAST = """<style>
:is(.jp-OutputArea, .cell_container):has(.ring-panel.RUN) .ring-last.RUN { display: none; }
.jp-OutputArea-child:has(.ring-last.RUN) + .jp-OutputArea-child:not(:has(.ring-panel, .ring-report)) { display: none; }
</style>"""


def outputs(log: RunRecord) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Displays of the ranks as outputs of a notebook (data, metadata), each after a label with its ranks.

    What a rank has printed after a display is below it.
    """
    view = log.view()
    bundles: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for one, after in zip(view.displays, _between(view)[1:], strict=True):
        ranks = {"text/html": display_area.label(one), "text/plain": f"[{rank_list(one.ranks)}]"}
        bundles += [(ranks, {}), (one.data, one.metadata)]
        if after:
            bundles.append(
                ({"text/html": f"{CSS}{_output(log, after)}", "text/plain": _printed(after).rstrip("\n")}, {})
            )
    return [({"text/plain": note}, {}) for note in [_earlier(log, view)] if note] + bundles


def _between(view: RunView) -> list[list[Printed]]:
    """What the ranks have printed before the first display, between it and the second, and so on.

    What a rank prints is below its own last display, because ranks do not keep step.
    """
    parts: list[list[Printed]] = [[] for _ in range(len(view.displays) + 1)]
    for piece in view.output:
        shown = [one.printed.get(piece.rank, math.inf) < piece.number for one in view.displays]
        parts[max((place for place, before in enumerate(shown, start=1) if before), default=0)].append(piece)
    return parts


def _printed(output: Sequence[Printed]) -> str:
    """What ranks have printed, for a terminal."""
    return labelled_lines.text(labelled_lines.Lines().take(output, last=True)[-MOST_PRINTED:])


def _earlier(log: RunRecord, view: RunView) -> str:
    """Where to find displays that are too old to be shown; empty if all are shown."""
    return f"{view.dropped} earlier displays: see Run.displays, or {log.directory}" if view.dropped else ""


def figure(logs: Sequence[RunRecord], names: Sequence[str] = (), look: Look | None = None) -> HTML:
    """Charts of the named metrics; without names, of the first ones. Of several runs each chart has the mean of each.

    ``loss+val_loss`` is one chart of both, and ``grad/*`` are all that begin so. Raises KeyError, with a list of the
    metrics, for an unknown name.
    """
    views = {label: log.view() for label, log in zip(labels(logs), logs, strict=True)}
    known = charted_in(views.values())
    for name in missing(names, known):
        which = " and ".join(log.run for log in logs)
        raise KeyError(f"run {which} has no metric {name!r}; it logged: {first_names(known) or 'none'}")
    chosen = look or logs[0].look
    if len(views) > 1:
        shown = svg_chart.grid(compared(views, expanded(names or titles(known), known), chosen))
    elif names:
        shown = svg_chart.grid(charts(views.popitem()[1], names, chosen))
    else:
        (view,) = views.values()
        made = grouped(view, (), chosen, MOST_CHARTS)
        shown = _charts(made) + _folded(view, made, chosen)
    return HTML(CSS + svg_chart.CSS + shown)


def labels(logs: Sequence[RunRecord]) -> list[str]:
    """The label of each run in a legend: its name, with the time of day or a number if names are equal."""
    times = [time.strftime("%H:%M:%S", time.localtime(log.started)) for log in logs]
    short = [log.title for log in logs]
    longer = [one if short.count(one) == 1 else f"{one} {now}" for one, now in zip(short, times, strict=True)]
    return [one if longer.count(one) == 1 else f"{one} #{index}" for index, one in enumerate(longer, start=1)]


def alert(trouble: str) -> str:
    """A red notice for a page; empty without ``trouble``."""
    return f"<div class='ring-notice ring-alert' role='alert'>{escape(trouble)}</div>" if trouble else ""


def question(text: str) -> str:
    """A notice with the questions of ranks; empty without ``text``."""
    return f"<div class='ring-notice' role='status'>{escape(text)}</div>" if text else ""


def lint(log: RunRecord) -> hints.Lint:
    """The hints for the cell of a run."""
    return hints.Lint(log.source, log.first_line, gpus=bool(log.environment.get("gpus")))


def _page(log: RunRecord, view: RunView, plot: Sequence[str], error: bool) -> str:
    notice = "".join(_notice(one) for one in _notices(log, view, plot, error))
    told = view.names or view.died
    table = rank_table.html(rank_table.table(view, still=True)) if told else ""
    made = grouped(view, plot, log.look, MOST_CHARTS)
    shown = _charts(made)
    machine = _machine(log, view)
    style = CSS + svg_chart.CSS * bool(shown or machine)
    return (
        f"{style}<div class='ring-report'>{headline.html(headline.headline(log, view))}"
        f"{_params(log)}{alert(_trouble(log))}{notice}{_changes(view)}{shown}"
        f"{'' if plot else _folded(view, made, log.look)}"
        f"{display_area.row(view.media)}"
        f"<div class='ring-rows'>{table}</div>{machine}"
        f"{hints.html(lint(log).hints(view))}{_output(log, _between(view)[0], view.dropped_lines)}</div>"
    )


def _params(log: RunRecord) -> str:
    """The first hyper-parameters, in a line."""
    listed = [f"{name} {shown(value)}" for name, value in list(log.params.items())[:MOST_PARAMS]]
    return f"<div class='ring-params'>{escape(' · '.join(listed))}</div>" if listed else ""


def _changes(view: RunView) -> str:
    """What users have changed while the run was in progress, a line each, behind a click where there are many."""
    lines = changes_text(view)
    if not lines:
        return ""
    each = "".join(f"<div>{escape(line)}</div>" for line in lines)
    opened = " open" * (len(lines) <= MOST_OPEN)
    return f"<details{opened}><summary>{plural(len(lines), 'change')} of the run</summary>{each}</details>"


def changes_text(view: RunView) -> list[str]:
    """A line for each change of knobs, pause and resume: ``step 120: lr = 0.05 (alice, %ring set)``."""
    made = []
    for one in view.changes:
        what = ", ".join(f"{name} = {shown(value)}" for name, value in one.values.items())
        made.append(f"step {one.step}: {what or one.action} ({one.who})")
    return made


def _machine(log: RunRecord, view: RunView) -> str:
    """The load of the machines, behind a click; open if it was open in the live panel.

    Empty for a short cell without metrics: its report would become many times as long.
    """
    if not view.names and view.elapsed < MACHINE_SECONDS:
        return ""
    shown = svg_chart.grid(machines.charts(view, log.look))
    energy = view.energy
    if energy.joules is None and (why := energy_text(energy)):
        shown += f"<div>{escape(why)}</div>"
    return f"<details{' open' * log.look.machine}><summary>Machine</summary>{shown}</details>" if shown else ""


def _notices(log: RunRecord, view: RunView, plot: Sequence[str], error: bool) -> list[str]:
    """What is wrong: the run's error, if wanted, and metrics in ``plot`` that were not logged."""
    lacking = missing(plot, view.names)
    logged = first_names(view.charted)
    note = f"--plot {', '.join(lacking)}: not logged; the run logged {logged or 'no metrics'}."
    reason = str(log.summary.get("shown") or log.summary.get("error", "")) if error else ""
    return [*filter(None, [reason]), *([note] if lacking and log.summary else [])]


def _notice(text: str) -> str:
    lines = " ring-lines" if "\n" in text else ""  # the error has several lines, as a traceback
    return f"<div class='ring-notice{lines}'>{escape(text)}</div>"


def _trouble(log: RunRecord) -> str:
    """Why the records of the run are incomplete, or in another place."""
    return str(log.trouble or log.summary.get("trouble", ""))


def _charts(made: Sequence[tuple[Section, Sequence[Chart]]]) -> str:
    """The charts of a page, each group but the first under its name."""
    heads = (f"<b>{escape(section.group)}</b>" if section.group else "" for section, _ in made)
    counts = [len(drawn) for _, drawn in made]
    return "".join(head + svg_chart.grid(drawn, counts) for head, (_, drawn) in zip(heads, made, strict=True) if drawn)


def _folded(view: RunView, made: Sequence[tuple[Section, Sequence[Chart]]], look: Look) -> str:
    """The other metrics, each behind a click on its name, which a search of the page finds; empty without any."""
    there = {name for section, _ in made for name in section.shown}
    rest = [name for name in titles(view.charted) if name not in there]
    if not rest:
        return ""
    each = "".join(
        f"<details><summary>{escape(one.title)} {escape(one.note)}</summary>{svg_chart.grid([one])}</details>"
        for one in charts(view, rest[:MOST_FOLDED], look)
    )
    left = len(rest) - MOST_FOLDED
    others = f"<div>{plural(left, 'other')}: <code>%ring plot NAME</code> charts one</div>" if left > 0 else ""
    name = plural(len(rest), "more metric")
    return f"<details><summary>{name}</summary><div class='ring-folded'>{each}</div>{others}</details>"


def _output(log: RunRecord, output: Sequence[Printed], dropped_lines: int = 0) -> str:
    lines = labelled_lines.Lines().take(output, last=True)
    if not lines:
        return ""
    kept = lines[-MOST_PRINTED:]
    before, visible = labelled_lines.split_last(kept, VISIBLE)
    count = dropped_lines + labelled_lines.count(lines) - labelled_lines.count(visible)
    command = f"<code>%ring runs output {escape(log.run if ' ' in log.title else log.title)}</code>"
    where = f"<div>The last lines of them; {command} writes all to a file</div>"
    earlier = (
        f"<details><summary>{plural(count, 'earlier line')}</summary>"
        f"{where if dropped_lines or kept != lines else ''}"
        f"<div class='ring-lines'>{labelled_lines.html(before)}</div></details>"
    )
    return f"{earlier if count else ''}<div class='ring-lines'>{labelled_lines.html(visible)}</div>"


def _text(log: RunRecord, view: RunView, plot: Sequence[str], error: bool) -> str:
    parts = [headline.text(headline.headline(log, view))]
    parts += [_trouble(log), *_notices(log, view, plot, error), *changes_text(view)[-MOST_OPEN:]]
    if view.names or view.died:
        parts.append(rank_table.text(rank_table.table(view, still=log.status != "running")))
    parts += map(hints.text, lint(log).hints(view))
    parts.append(display_area.text(view.media).rstrip("\n"))
    parts.append(_printed(_between(view)[0]).rstrip("\n"))
    return "\n".join(part for part in parts if part)
