"""The live panel of a run: widgets that one thread redraws from the run's view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

from IPython.display import display
from ipywidgets import HTML, Accordion, Button, HBox, Layout, VBox, Widget

from ring_notebook.config import config
from ring_notebook.notebook import close_widgets
from ring_notebook.notebook.panel import hints, rank_table, report, stall_notice
from ring_notebook.notebook.panel.charts.curves import MOST_LINES, per_rank
from ring_notebook.notebook.panel.hints import logs_metrics
from ring_notebook.notebook.panel.output import labelled_lines
from ring_notebook.notebook.panel.output.live_displays import Gallery
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.style import CSS, STATUS_COLORS, duration

if TYPE_CHECKING:
    from ring_notebook.notebook.panel.charts.live_chart import Chart

__all__ = ["Panel", "load_charts"]

RATE = "samples/s"  # the chart that every run with samples has
PERIOD = 0.2  # seconds between redraws
MOST_CHARTS = 3  # of metrics, where --plot names none
TEXT_BYTES = 60_000  # a second: the table of many ranks, and output after a clear_output, are drawn less often
CHUNK = 2_000  # characters of output that may be sent again when a little more comes
CHUNKS = 60


def load_charts() -> type[Chart]:
    """Import bqplot, which takes half a second the first time; a cluster's start does it in the background."""
    from ring_notebook.notebook.panel.charts.live_chart import Chart

    return Chart


class Panel:
    """The live view of a run in progress.

    ``plot`` names the metrics to chart, by default the first ones logged. The Stop button calls ``stop``, also while
    the cell blocks. At the end `close` replaces the panel by the still report, with ``displays`` including what the
    ranks have displayed.

    A page that was reloaded during the run shows the panel but cannot replace it: for such pages the panel itself
    becomes the report, until the panel of another run is shown.
    """

    _ended_panels: ClassVar[list[Panel]] = []

    def __init__(
        self,
        log: RunRecord,
        *,
        plot: Sequence[str] = (),
        stop: Callable[[], None] | None = None,
        displays: bool = True,
    ) -> None:
        self._log = log
        self._displays = displays
        self._plot = tuple(plot)
        self._stop = stop
        self._charts: dict[str, Chart] = {}
        self._lint = report.lint(log)
        self._table_due = 0.0
        self._ended = Event()
        self._place: Any = None
        self._redraw = Thread(target=self._loop, name=f"ring-panel-{log.run}", daemon=True)

        self._head = HTML(layout=Layout(flex="1 1 auto"))
        size = Layout(width="110px", visibility="visible" if stop else "hidden")
        self._button = Button(description="Stop", icon="stop", tooltip="Interrupt every rank", layout=size)
        self._button.on_click(self._on_stop)
        _answer_while_busy(self._button)
        # Space for charts and table from the start, so that what is below them does not jump.
        self._expected = bool(plot) or logs_metrics(log.source)
        height = "237px" if self._expected else None
        self._chart_row = HBox(layout=Layout(flex_flow="row wrap", width="100%", min_height=height))
        self._table = HTML(layout=Layout(max_height="230px", overflow="auto"))
        self._notices = HTML()
        self._output = _OutputArea()
        self._gallery = Gallery()
        self._box = VBox(
            [
                HTML(CSS),
                HBox([self._head, self._button], layout=Layout(align_items="center", width="100%")),
                self._chart_row,
                self._table,
                self._notices,
                self._output.widget,
                self._gallery.widget,
            ]
        )
        self._box.add_class("ring-panel")

    def show(self) -> None:
        """Display the panel in the current cell and keep it up to date."""
        for panel in [one for one in Panel._ended_panels if one._log.run != self._log.run]:
            Panel._ended_panels.remove(panel)
            close_widgets.close(panel._box)
        self._draw_text(self._log.view())
        # Shown where the widget is not alive: in a notebook that is saved during the run, or opened elsewhere.
        bundle = {**self._box._repr_mimebundle_(), **report.under_way(self._log)}
        self._place = display(bundle, raw=True, display_id=True)
        self._redraw.start()

    def close(self, still: bool = True) -> None:
        """Stop redrawing and close the widgets; with ``still`` the report replaces them."""
        self._ended.set()
        self._redraw.join()
        ended = still and self._log.status != "running"  # else this kernel has left the run
        left = report.under_way(self._log) if still else {"text/plain": ""}
        bundle = report.mime_bundle(self._log, self._plot) if ended else left
        if self._place is not None:
            complete = report.mime_bundle(self._log, self._plot, displays=True) if ended and self._displays else bundle
            self._place.update(complete, raw=True)
        live = [widget for widget in self._box.children if widget is not self._gallery.widget]
        self._box.children = [HTML(bundle["text/html"]), self._gallery.widget] if still else []
        if still:
            self._gallery.finish(self._log.view())
        for widget in live if still else (*live, self._gallery.widget):
            close_widgets.close(widget)
        Panel._ended_panels.append(self)

    def _loop(self) -> None:
        while not self._ended.wait(PERIOD):
            view = self._log.view()
            self._draw_text(view)
            try:
                for name in self._plot or view.charted[:MOST_CHARTS]:
                    self._chart(name, "step").draw(per_rank(view.curves.get(name, {})))
                if any(len(points.x) for points in view.throughput.values()):
                    self._chart(RATE, "seconds", from_zero=True).draw(per_rank(view.throughput))
            except Exception as error:  # table and Stop button must keep working
                self._log.trouble = f"a chart cannot be drawn: {type(error).__name__}: {error}"

    def _chart(self, name: str, xlabel: str, from_zero: bool = False) -> Chart:
        if name not in self._charts:
            self._charts[name] = load_charts()(name, xlabel, from_zero)
            self._chart_row.children = tuple(one.figure for one in self._charts.values())
        return self._charts[name]

    def _draw_text(self, view: RunView) -> None:
        self._head.value = _head(self._log, view)
        if (view.names or self._expected) and monotonic() >= self._table_due:
            self._table.value = rank_table.html(rank_table.table(view), colors=view.size <= MOST_LINES)
            self._table_due = monotonic() + len(self._table.value) / TEXT_BYTES
        trouble = report.alert(self._log.trouble)
        waiting = stall_notice.html(view.stuck(config().stall_warning))
        self._notices.value = trouble + waiting + hints.html(self._lint.hints(view))
        self._output.add(view)
        self._gallery.draw(view)

    def _on_stop(self, _button: Button) -> None:
        self._button.description = "Stopping…"
        if self._stop:
            self._stop()


class _OutputArea:
    """What the ranks print, newest last, in chunks, so that only the newest chunk is sent again."""

    def __init__(self) -> None:
        self._lines = labelled_lines.Lines()
        self._unfinished = HTML()
        self._unfinished.add_class("ring-lines")
        self._unfinished.layout.flex = "0 0 auto"
        self._cleared = 0
        self._due = 0.0
        # Newest first in a reversed column, so that the page keeps the end visible: rows that may still change, which
        # are drawn again each time, then the chunks.
        layout = Layout(max_height="240px", overflow="auto", flex_flow="column-reverse")
        self._column = VBox([self._unfinished], layout=layout)
        self.widget = Accordion([self._column], titles=["Output"], selected_index=0)
        self.widget.layout.display = "none"

    def add(self, view: RunView) -> None:
        """Show what is new since the last call; draws everything again when a rank has called clear_output."""
        if monotonic() < self._due:
            return
        if view.cleared != self._cleared:
            self._cleared = view.cleared
            self._due = monotonic() + sum(len(piece.text) for piece in view.output) / TEXT_BYTES
            self._lines = labelled_lines.Lines()
            old, self._column.children = self._column.children[1:], (self._unfinished,)
            for chunk in old:
                close_widgets.close(chunk)
        lines = self._lines.take(view.output)
        self._unfinished.value = labelled_lines.html(self._lines.unfinished())
        if lines or self._unfinished.value:
            self.widget.layout.display = None
        if not lines:
            return
        chunks = self._column.children[1:]
        text = labelled_lines.html(lines)
        if chunks and len(chunks[0].value) + len(text) < CHUNK:
            chunks[0].value += text
            return
        chunk = HTML(text)
        chunk.add_class("ring-lines")
        chunk.layout.flex = "0 0 auto"
        for old in chunks[CHUNKS - 1 :]:
            close_widgets.close(old)
        self._column.children = (self._unfinished, chunk, *chunks[: CHUNKS - 1])


def _head(log: RunRecord, view: RunView) -> str:
    name, *facts = (escape(part) for part in report.headline(log, view))
    parts = [f"<span style='color:{STATUS_COLORS['running']}'>● running</span>", f"<b>{name}</b>", *facts]
    if view.progress is not None:
        left = f", {duration(view.left)} left" if view.left is not None else ""
        bar = f"<span class='ring-bar'><i style='width:{view.progress:.1%}'></i></span>"
        parts.append(f"<span>{bar}{view.progress:.0%}{left}</span>")
    return f"<div class='ring-head'>{''.join(f'<span>{part}</span>' for part in parts)}</div>"


def _answer_while_busy(widget: Widget) -> None:
    """Let clicks on ``widget`` reach the kernel while a cell blocks its main shell.

    ipykernel 7 sends them to the shell that last used the widget, which is the blocked one; this sends them to the
    front end's subshell. Where there are no subshells, only an interrupt of the kernel stops the run.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda _data, default: default
