"""The live panel of a run: widgets that one thread redraws from the run's view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from time import monotonic
from typing import Any, ClassVar

from IPython import get_ipython
from IPython.display import DisplayHandle, display
from ipywidgets import HTML, GridBox, HBox, Layout, VBox

from ring_notebook.notebook import close_widgets
from ring_notebook.notebook.panel import (
    headline,
    hints,
    labelled_lines,
    rank_table,
    report,
    waits,
)
from ring_notebook.notebook.panel.busy_kernel import show_to_later_pages, stop_button
from ring_notebook.notebook.panel.chart_area import MOST_CHARTS, ChartArea
from ring_notebook.notebook.panel.charts import svg_chart
from ring_notebook.notebook.panel.charts.chart import empty
from ring_notebook.notebook.panel.display_area import Gallery
from ring_notebook.notebook.panel.knob_area import KnobArea, Steer
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import SAMPLES, RunView
from ring_notebook.notebook.style import CSS

PERIOD = 0.2  # seconds between redraws
PICTURE_PERIOD = 5.0  # seconds between pictures of the panel for a page without widgets
NOTHING = {"text/html": "", "text/plain": ""}
TEXT_BYTES = 60_000  # per second; a table of many ranks, and output after a clear_output, are drawn less often
CHUNK = 2_000  # characters of output; a chunk is sent again when more output comes
CHUNKS = 60  # full ones; a page with tens of thousands of lines stalls, until its server ends the connection
MOST_LINES = 500  # of one chunk


class Panel:
    """The live view of a run in progress.

    ``plot``: the metrics to chart, by default the first ones logged. The Stop button calls ``stop``, sliders and the
    Pause button ``steer``, also while the cell blocks. ``asks`` returns the open questions of ranks. At the end `close`
    replaces the panel with the still report. With ``apart`` the report leaves out displays and the error of the run,
    because the cell shows them.

    A page that was reloaded during the run shows the panel but cannot replace it. For such pages the panel itself
    becomes the report, until the panel of another run is shown.
    """

    _ended_panels: ClassVar[list[Panel]] = []

    def __init__(
        self,
        log: RunRecord,
        *,
        plot: Sequence[str] = (),
        stop: Callable[[], None] | None = None,
        steer: Steer | None = None,
        asks: Callable[[], str] = str,
        apart: bool = False,
    ) -> None:
        self._log = log
        self._apart = apart
        self._plot = tuple(plot)
        self._asks = asks
        self._lint = report.lint(log)
        self._charts = ChartArea(plot, log.look, log.keep_look, plot or self._lint.metrics)
        self._knobs = KnobArea(steer)
        self._table_due = 0.0
        self._ended = Event()
        self._place: Any = None
        self._picture: Any = None
        self._picture_due = 0.0
        self._redraw = Thread(target=self._loop, name=f"ring-panel-{log.run}", daemon=True)

        self._head, self._alarms = HTML(layout=Layout(flex="1 1 auto")), HTML()
        self._button = stop_button(stop, "Interrupt every rank")
        # Shown until the first step: what the ranks do, and axes in the place of the charts until the page has drawn
        # these, so that it does not jump.
        self._beginning = HTML()
        logged = self._lint.metrics
        expected = empty([*plot, *[SAMPLES] * (SAMPLES in logged)] if plot else logged, log.size)[:MOST_CHARTS]
        self._axes = HTML(svg_chart.grid(expected))
        self._table = HTML(layout=Layout(max_height="230px", overflow="auto"))
        self._notices = HTML()
        self._output = _OutputArea()
        self._gallery, self._media = Gallery(), Gallery(beside=True)
        charts = GridBox([self._axes, self._charts.area], layout=Layout(width="100%", grid_template_columns="100%"))
        charts.add_class("ring-stage")
        # On a narrow page the buttons of the charts are below the status, and Pause and Stop stay where they are.
        choices = HBox(
            [self._head, self._charts.buttons], layout=Layout(flex="1 1 0", min_width="0", flex_flow="row wrap")
        )
        self._box = VBox(
            [
                HTML(f"{CSS}{svg_chart.CSS}<div class='ring-gone'>{report.under_way(log)['text/html']}</div>"),
                HBox(
                    [choices, self._knobs.button, self._button], layout=Layout(align_items="flex-start", width="100%")
                ),
                self._alarms,
                self._knobs.widget,
                self._beginning,
                charts,
                self._media.widget,
                self._table,
                self._notices,
                self._output.widget,
                self._gallery.widget,
            ]
        )
        self._box.add_class("ring-panel")
        self._box.add_class(report.run_class(log))

    def show(self, places: tuple[DisplayHandle, DisplayHandle] | None = None) -> None:
        """Display the panel here, or in two ``places``, for its picture and itself; keep it up to date."""
        for panel in [one for one in Panel._ended_panels if one._log.run != self._log.run]:
            Panel._ended_panels.remove(panel)
            close_widgets.close(panel._box)
        self._draw_text(self._log.view())
        show_to_later_pages()
        # For pages without the widget: a notebook that was saved during the run. Pages with it show no picture.
        picture = report.last_state(self._log, self._plot, self._apart)
        bundle = {**self._box._repr_mimebundle_(), **NOTHING}
        if places is None:
            self._picture, self._place = (display(one, raw=True, display_id=True) for one in (picture, bundle))
        else:
            self._picture, self._place = places
            self._picture.update(picture, raw=True)
            self._place.update(bundle, raw=True)
        self._redraw.start()

    def close(self, still: bool = True) -> None:
        """Stop redrawing and close the widgets. With ``still`` the report replaces them."""
        self._ended.set()
        self._redraw.join()
        ended = still and self._log.status != "running"  # else this kernel has left the run
        left = report.under_way(self._log) if still else NOTHING
        bundle = report.mime_bundle(self._log, self._plot, displays=True) if ended else left
        if self._place is not None:
            shown = report.mime_bundle(self._log, self._plot, error=False) if ended and self._apart else bundle
            self._picture.update(shown, raw=True)
            self._place.update(NOTHING, raw=True)
        live = self._box.children
        self._box.children = [HTML(bundle["text/html"])] if still else []
        for widget in live:
            close_widgets.close(widget)
        Panel._ended_panels.append(self)

    def _loop(self) -> None:
        while not self._ended.wait(PERIOD):
            view = self._log.view()
            self._draw_text(view)
            self._knobs.draw(view)
            try:
                self._charts.draw(view)
            except Exception as error:  # table and Stop button must keep working
                self._log.trouble = f"a chart cannot be drawn: {type(error).__name__}: {error}"
            self._draw_picture()

    def _draw_picture(self) -> None:
        """Renew the picture for pages without the widget, with a hundredth of this thread's time at most."""
        begun = monotonic()
        if begun < self._picture_due or get_ipython() is None or not hasattr(get_ipython(), "kernel"):
            return
        self._picture.update(report.last_state(self._log, self._plot, self._apart), raw=True)
        self._picture_due = monotonic() + max(PICTURE_PERIOD, 100 * (monotonic() - begun))

    def _draw_text(self, view: RunView) -> None:
        stuck = waits.stuck(view)
        content = headline.headline(self._log, view, stuck)
        self._head.value, self._alarms.value = headline.first_row(content), headline.alarms(content, live=True)
        if view.names and monotonic() >= self._table_due:
            self._table.value = rank_table.html(rank_table.table(view))
            self._table_due = monotonic() + len(self._table.value) / TEXT_BYTES
        trouble = report.alert(self._log.trouble) + report.question(self._asks())
        waiting = waits.stall_html(stuck, self._log.code_at)
        begun = bool(view.names or stuck)
        doing = () if begun else waits.beginning(view, self._log.code_at)
        self._beginning.value = waits.beginning_html(doing)
        self._beginning.layout.display = "none" if begun else None
        self._axes.layout.display = "none" if begun and not view.names else None
        self._notices.value = trouble + waiting + hints.html(self._lint.hints(view))
        self._output.add(view)
        self._gallery.draw(view.displays)
        self._media.draw(view.media)


class _OutputArea:
    """The output of the ranks, newest last, in chunks: only the newest chunk is sent again."""

    def __init__(self) -> None:
        self._lines = labelled_lines.Lines()
        self._unfinished = HTML()
        self._unfinished.add_class("ring-lines")
        self._unfinished.layout.flex = "0 0 auto"
        self._cleared = 0
        self._due = 0.0
        # A reversed column, newest first, so that the page keeps the end visible. First come the rows that may still
        # change, which are drawn again each time, then the chunks.
        layout = Layout(max_height="240px", overflow="auto", flex_flow="column-reverse", display="none")
        self._column = self.widget = VBox([self._unfinished], layout=layout)

    def add(self, view: RunView) -> None:
        """Show new output; draw everything again after a rank has called clear_output."""
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
        text = labelled_lines.html(lines[-MOST_LINES:])
        if chunks and len(chunks[0].value) + len(text) < CHUNK:
            chunks[0].value += text
            return
        chunk = HTML(text)
        chunk.add_class("ring-lines")
        chunk.layout.flex = "0 0 auto"
        kept, room = 0, CHUNK * CHUNKS - len(text)
        for old in chunks[: CHUNKS - 1]:
            room -= len(old.value)
            if room < 0:
                break
            kept += 1
        for old in chunks[kept:]:
            close_widgets.close(old)
        self._column.children = (self._unfinished, chunk, *chunks[:kept])
