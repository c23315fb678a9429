"""The runs of a sweep: a row for each in one table, and one chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.display import display

from ring_notebook.notebook import close_widgets
from ring_notebook.notebook.panel.busy_kernel import stop_button
from ring_notebook.notebook.panel.charts import svg_chart
from ring_notebook.notebook.panel.charts.chart import compared
from ring_notebook.notebook.panel.charts.metric_names import expanded, titles
from ring_notebook.notebook.panel.comparison import outcome
from ring_notebook.notebook.panel.panel import NOTHING
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import charted_in
from ring_notebook.notebook.record.tags_and_look import Look
from ring_notebook.notebook.table import Listing
from ring_notebook.text.words import first_names, plural

_METRICS = 3  # of the table, each with its best value; `%ring runs compare` has all
_MOST_ERRORS = 8
WAITS, STOPPED = "waiting", "not begun"


@dataclass
class Trial:
    """One combination of values of a sweep, and its run where it has one.

    ``state`` says why there is none.
    """

    values: Mapping[str, Any]
    title: str
    source: str
    record: RunRecord | None = None
    state: str = WAITS

    @property
    def label(self) -> str:
        """The values, for a legend and the names of runs."""
        return " ".join(f"{name}={text}" for name, text in self.texts.items())

    @property
    def texts(self) -> dict[str, str]:
        """The values as text: all digits, since two runs may differ in the last one."""
        return {
            name: str(value).removesuffix(".0" if isinstance(value, float) else "")
            for name, value in self.values.items()
        }

    @property
    def status(self) -> str:
        """The status of its run, else why there is none."""
        return self.record.status if self.record is not None else self.state


class StopOfSweep:
    """A Stop button, shown above the report until `remove`; a click calls ``stop`` in a thread of the kernel."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._button = stop_button(stop, "Interrupt every run of the sweep")
        self._place = display({**self._button._repr_mimebundle_(), **NOTHING}, raw=True, display_id=True)

    def remove(self) -> None:
        """Take the button away."""
        self._place.update(NOTHING, raw=True)
        close_widgets.close(self._button)


class SweepReport:
    """The runs of a sweep as a table and a chart, as they are at this moment. ``plot`` names the metrics to chart."""

    def __init__(self, trials: Sequence[Trial], plot: Sequence[str] = ()) -> None:
        self.trials = list(trials)
        self._plot = tuple(plot)

    @property
    def runs(self) -> list[RunRecord]:
        """The records of those runs that have begun, in the order of the table."""
        return [one.record for one in self.trials if one.record is not None]

    def table(self) -> Listing:
        """A row for each run: its values, how it ended, the newest and the best values of the first metrics.

        The first errors are below it, each once with the runs that it has ended: no column is wide enough.
        """
        rows: list[dict[str, tuple[Any, str]]] = []
        errors: dict[str, list[str]] = {}
        known = titles(charted_in(log.view() for log in self.runs))[:_METRICS]
        for trial in self.trials:
            row = {name: (value, trial.texts[name]) for name, value in trial.values.items()}
            row["status"] = (trial.status, trial.status)
            rows.append(row | (outcome(trial.record, known) if trial.record is not None else {}))
            if "error" in rows[-1]:
                errors.setdefault(rows[-1]["error"][1], []).append(trial.label)
        wanted = [*self.trials[0].values, "status", *(text for name in known for text in (name, f"best {name}"))]
        wanted += ["seconds", "samples/s"]
        columns = [name for name in wanted if any(name in row for row in rows)]
        keys = {name: [row.get(name, (None, ""))[0] for row in rows] for name in columns}
        texts = [[row.get(name, (None, ""))[1] for name in columns] for row in rows]
        statuses = [one.status for one in self.trials]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        lines = [counts, *(f"{first_names(who)}: {error}" for error, who in errors.items())][: 1 + _MOST_ERRORS]
        more = len(errors) - _MOST_ERRORS
        lines += [f"and {plural(more, 'other error')}; `%ring runs compare` has all"] * (more > 0)
        return Listing(columns, texts, "\n".join(lines), keys)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        views = {one.label: one.record.view() for one in self.trials if one.record is not None}
        known = charted_in(views.values())
        names = expanded(self._plot, known) if self._plot else titles(known)[:1]
        chart = svg_chart.CSS + svg_chart.grid(compared(views, names, Look())) if names else ""
        return f"{self.table()._repr_html_()}{chart}"
