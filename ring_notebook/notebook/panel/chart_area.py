"""The charts of a live panel, and the buttons that choose how they look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from ipywidgets import Dropdown, GridBox, HBox, Layout, ToggleButton, Widget

from ring_notebook.notebook.panel import machines
from ring_notebook.notebook.panel.charts.chart import Chart, charts, columns, titles
from ring_notebook.notebook.record.choices import Look
from ring_notebook.notebook.record.run_view import RunView

if TYPE_CHECKING:
    from ring_notebook.notebook.panel.charts.live_chart import LiveChart

MOST_CHARTS = 6  # of metrics, without --plot; a menu shows the others
CHART_BYTES = 150_000  # per second; charts with many points are drawn less often
_OTHERS = "more metrics…"


def load_charts() -> type[LiveChart]:
    """Import the charts. The first import takes a moment; the start of a cluster does it in the background."""
    from ring_notebook.notebook.panel.charts.live_chart import LiveChart

    return LiveChart


class ChartArea:
    """The charts of one run. ``grid`` and ``buttons`` are widgets; ``look`` is the choice of the reader.

    ``plot``: the metrics to chart, by default the first ones logged. ``on_look`` is called with each new choice.
    """

    def __init__(self, plot: Sequence[str], look: Look, on_look: Callable[[Look], None]) -> None:
        self.look = look
        self._plot = tuple(plot)
        self._on_look = on_look
        self._charts: dict[str, LiveChart] = {}
        self._shown: tuple[str, ...] = ()
        self._due = 0.0
        self._log = _toggle("log", "Logarithmic scale where all values are positive", look.log)
        self._smooth = _toggle("smooth", "Exponential average of every curve", look.smooth)
        self._menu = Dropdown(options=[_OTHERS], layout=Layout(width="130px", display="none"))
        self._machine = _toggle("machine", "Charts of processor, memory, GPU, disk and network", look.machine)
        for widget in (self._log, self._smooth, self._machine, self._menu):
            answer_while_busy(widget)
            widget.observe(self._chosen, "value")
        self.buttons = HBox(
            [self._menu, self._log, self._smooth, self._machine], layout=Layout(display="none", flex="0 0 auto")
        )
        # A chart is drawn in whole pixels: in half a pixel less it would have a scroll bar.
        self.grid = GridBox(layout=Layout(width="100%", grid_gap="8px 24px", overflow="hidden"))

    def draw(self, view: RunView) -> None:
        """Show the run as it is now, unless the last drawing was so large that the page needs more time."""
        if monotonic() < self._due:
            return
        every = charts(view, self._names(view), self.look)
        if self.look.machine:
            every += machines.charts(view, self.look)
        made = {chart.title: chart for chart in every}
        if not made:
            return
        sent = sum(self._chart(title).draw(chart) for title, chart in made.items())
        self._due = monotonic() + sent / CHART_BYTES
        self._place(view, made)

    def _names(self, view: RunView) -> list[str]:
        if self._plot:
            return list(self._plot)
        every = titles(view)
        names = list(every[:MOST_CHARTS])
        wanted = self._menu.value
        if wanted in every and wanted not in names:
            names[-1] = wanted
        return names

    def _place(self, view: RunView, made: dict[str, Chart]) -> None:
        shown = tuple(made)
        if shown != self._shown:
            self._shown = shown
            self.grid.layout.grid_template_columns = columns(len(shown))
            self.grid.children = tuple(self._charts[title].widget for title in shown)
            self.buttons.layout.display = "flex"
        others = () if self._plot else titles(view)[MOST_CHARTS:]
        options = (_OTHERS, *others)
        if others and self._menu.options != options:
            value = self._menu.value
            self._menu.options = options
            self._menu.value = value if value in options else _OTHERS
            self._menu.layout.display = None

    def _chart(self, title: str) -> LiveChart:
        if title not in self._charts:
            self._charts[title] = load_charts()(self._rank_clicked)
            answer_while_busy(self._charts[title].widget)
        return self._charts[title]

    def _rank_clicked(self, rank: int) -> None:
        self._set(replace(self.look, ranks=self.look.ranks ^ {rank}))

    def _chosen(self, _change: dict[str, Any]) -> None:
        values = {"log": self._log.value, "smooth": self._smooth.value, "machine": self._machine.value}
        self._set(replace(self.look, **values))

    def _set(self, look: Look) -> None:
        self._due = 0.0
        if look != self.look:
            self.look = look
            self._on_look(look)


def _toggle(word: str, tooltip: str, value: bool) -> ToggleButton:
    button = ToggleButton(value, description=word, tooltip=tooltip, layout=Layout(width="auto", height="24px"))
    button.add_class("ring-toggle")
    return button


def answer_while_busy(widget: Widget) -> None:
    """Let clicks on ``widget`` reach the kernel while a cell blocks its main shell.

    ipykernel 7 sends them to the shell that last used the widget, which is blocked. This sends them to the subshell of
    the front end. Without subshells only an interrupt of the kernel stops the run.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda _data, default: default
