"""Runs side by side: what was set and changed, what came out, their charts, and how their cells differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from html import escape
from typing import Any, NamedTuple

from ring_notebook.notebook.colors import GREY, STATUS_COLORS
from ring_notebook.notebook.panel import display_area, headline
from ring_notebook.notebook.panel.charts import svg_chart
from ring_notebook.notebook.panel.charts.chart import Chart, compared, results
from ring_notebook.notebook.panel.charts.curves import many
from ring_notebook.notebook.panel.charts.metric_names import titles
from ring_notebook.notebook.panel.report import labels
from ring_notebook.notebook.record.run_record import RunRecord, inherited
from ring_notebook.notebook.record.run_view import charted_in
from ring_notebook.notebook.style import CSS, number, shown, whole
from ring_notebook.notebook.table import Listing
from ring_notebook.protocol.records import SET, Change
from ring_notebook.text.words import plural

_MOST_CHANGES = 3  # of one knob, in the cell of a table
_CONTEXT = 2  # lines of a cell around those that differ
_COLORS = {"+": STATUS_COLORS["ok"], "-": STATUS_COLORS["failed"], "@": GREY}


class Origin(NamedTuple):
    """The run that a branch continues, and the step at which it does."""

    log: RunRecord
    step: int


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. ``origins``: by id of a branch, the runs that it continues, the nearest first.

    A branch has their hyper-parameters, and their changes of knobs until it begins.
    """

    logs: Sequence[RunRecord]
    origins: Mapping[str, Sequence[Origin]]

    def __repr__(self) -> str:
        titles = labels(self.logs)
        parts = [self.settings(), self.outcome(), *(f"{one}\n" for one in self.diffs(titles))]
        return "\n\n".join(map(str, parts)).rstrip()

    def _repr_html_(self) -> str:
        names = labels(self.logs)
        views = {label: log.view() for label, log in zip(names, self.logs, strict=True)}
        known = charted_in(views.values())
        made = compared(views, titles(known), self.logs[0].look)
        if rates := {label: view.throughput for label, view in views.items() if view.throughput}:
            made.append(Chart("samples/s per rank", "mean", "seconds", many(rates, order=names), from_zero=True))
        beside = "".join(
            f"<div style='min-width:0'>{headline.html(headline.headline(log, view))}"
            f"{display_area.row(view.media)}</div>"
            for log, view in zip(self.logs, views.values(), strict=True)
        )
        columns = "display:grid;gap:8px 24px;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr))"
        tables = "".join(
            f"<div style='overflow-x:auto'>{one._repr_html_()}</div>" for one in (self.settings(), self.outcome())
        )
        diffs = "".join(map(_diff_html, self.diffs(names)))
        return (
            f"{CSS}{svg_chart.CSS}{tables}"
            f"<div class='ring-report' style='{columns}'>{beside}</div>{svg_chart.grid(made)}{diffs}"
        )

    def settings(self) -> Listing:
        """A row for each hyper-parameter that differs, as set and as changed by knobs, and a column for each run.

        For a single run: all hyper-parameters.
        """
        given = [self._set(log) for log in self.logs]
        facts = {
            "ranks": [str(log.size) for log in self.logs],
            "branch of": [" ".join(headline.branch_of(log)).removeprefix("branch of ") for log in self.logs],
        }
        facts |= {
            name: [one.get(name, "") for one in given] for name in dict.fromkeys(key for one in given for key in one)
        }
        if len(self.logs) == 1:
            rows = [[name, *values] for name, values in facts.items() if any(values)]
            return Listing(("set", *labels(self.logs)), rows)
        differ = [[name, *values] for name, values in facts.items() if len(set(values)) > 1]
        cells = "They ran the same cell." if len({log.source for log in self.logs}) == 1 else "Their cells differ."
        note = cells if differ else f"No hyper-parameter differs. {cells}"
        return Listing(("differs", *labels(self.logs)), differ or [["", *("" for _ in self.logs)]], note)

    def outcome(self) -> Listing:
        """How the runs ended: a row for each result that one of them has, and a column for each run."""
        found = [outcome(log, charted_in(one.view() for one in self.logs)) for log in self.logs]
        names = dict.fromkeys(name for one in found for name in one)
        rows = [[name, *(one[name][1] if name in one else "" for one in found)] for name in names]
        return Listing(("result", *labels(self.logs)), rows)

    def diffs(self, titles: Sequence[str]) -> list[str]:
        """Unified diffs from the cell of the first run to each other run's cell; none for the same cell."""
        first, *others = [log.source.splitlines() for log in self.logs]
        return [
            "\n".join(unified_diff(first, other, titles[0], title, n=_CONTEXT, lineterm=""))
            for other, title in zip(others, titles[1:], strict=True)
            if other != first
        ]

    def _set(self, log: RunRecord) -> dict[str, str]:
        """The hyper-parameters of a run as text, with its own and inherited changes."""
        params, changes, first = log.own_params, changes_of(log), log
        for origin in self.origins.get(log.run, ()):
            params, first = {**origin.log.own_params, **params}, origin.log
            changes = [*(one for one in changes_of(origin.log) if one.step <= origin.step), *changes]
        params = {**inherited(first.options), **params}  # where the run that this one continues was deleted
        text = {name: shown(value) for name, value in params.items()}
        for name in dict.fromkeys(name for one in changes for name in one.values):
            taken = [f"{shown(one.values[name])} from step {one.step:,}" for one in changes if name in one.values]
            if len(taken) > _MOST_CHANGES:
                taken = [f"{plural(len(taken), 'change')}, the last to {taken[-1]}"]
            text[name] = ", then ".join([*([text[name]] if name in text else []), *taken])
        return text


def outcome(log: RunRecord, metrics: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """The results of a run by name, without missing ones, each as a value to sort by and as text."""
    view = log.view()
    found: dict[str, tuple[Any, str]] = {"status": (log.status, log.status)}
    if error := str(log.summary.get("error", "")).partition("\n")[0]:
        found["error"] = (error, error)
    found["seconds"] = (view.elapsed, f"{view.elapsed:.1f}")
    if view.samples_per_s:
        found["samples/s"] = (view.samples_per_s, whole(view.samples_per_s))
    for name in metrics:
        if name in view.curves:
            newest, best = results(view, name)
            found[name] = (newest, number(newest))
            if best is not None:
                found[f"best {name}"] = (best[1], f"{number(best[1])} (step {best[0]:,.0f})")
    return found


def changes_of(log: RunRecord) -> list[Change]:
    return [one for one in log.changed() if one.action == SET]


def _diff_html(diff: str) -> str:
    lines = diff.splitlines()
    shown = "\n".join(
        f"<span style='color:{_COLORS.get(line[:1], 'inherit')}'>{escape(line) or ' '}</span>" for line in lines
    )
    return (
        f"<details open><summary>{escape(lines[1][4:])} beside {escape(lines[0][4:])}: the cell</summary>"
        f"<pre style='overflow-x:auto;font-size:12px'>{shown}</pre></details>"
    )
