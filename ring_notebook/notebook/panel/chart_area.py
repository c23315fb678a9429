"""The charts of a live panel, and the buttons that choose how they look."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from html import escape
from time import monotonic
from typing import TYPE_CHECKING, Any

from ipywidgets import (
    HTML,
    Button,
    Dropdown,
    FloatSlider,
    GridBox,
    HBox,
    Label,
    Layout,
    Text,
    ToggleButton,
    VBox,
    Widget,
)

from ring_notebook.notebook import close_widgets
from ring_notebook.notebook.panel import machines
from ring_notebook.notebook.panel.busy_kernel import answer_while_busy
from ring_notebook.notebook.panel.charts.chart import Chart, axes, columns, grouped
from ring_notebook.notebook.panel.charts.metric_names import Section, titles
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.record.tags_and_look import MOST_SMOOTH, Look

if TYPE_CHECKING:
    from ring_notebook.notebook.panel.charts.live_chart import LiveChart

MOST_CHARTS = 6  # of metrics, without --plot; a click on a group, or a search, shows others
CHART_BYTES = 150_000  # per second; charts with many points are drawn less often
MOST_NEW = 12  # charts that are added at once; the others follow, so that the page stays awake


def load_charts() -> type[LiveChart]:
    """Import the charts. The first import takes a moment; the start of a cluster does it in the background."""
    from ring_notebook.notebook.panel.charts.live_chart import LiveChart

    return LiveChart


class ChartArea:
    """The charts of one run. ``area`` and ``buttons`` are widgets; ``look`` is the choice of the reader.

    ``plot``: the metrics to chart, by default the first ones logged. ``expected``: those that the run will log; they
    get empty charts as soon as any metric has a chart. ``on_look`` is called with each new choice.
    """

    def __init__(
        self, plot: Sequence[str], look: Look, on_look: Callable[[Look], None], expected: Collection[str] = ()
    ) -> None:
        self.look = look
        self._expected = expected
        self._plot = tuple(plot)
        self._on_look = on_look
        self._charts: dict[str, LiveChart] = {}
        self._groups: dict[str, _Group] = {}
        self._due = 0.0
        height = "24px"
        self._search = Text(
            look.search, placeholder="search charts", layout=Layout(width="110px", height=height, display="none")
        )
        self._x = Dropdown(
            options=_axes((look.x,)), tooltip="The x axis of metrics", layout=Layout(width="100px", height=height)
        )
        self._smooth = FloatSlider(
            look.smooth,
            min=0,
            max=MOST_SMOOTH,
            step=0.01,
            description="smooth",
            readout_format=".2f",
            tooltip="Exponential average of every curve: the share of the previous value",
            style={"description_width": "auto"},
            layout=Layout(width="180px", height=height),
        )
        self._log = _toggle("log", "Logarithmic scale where no value is negative; zeros are left out", look.log)
        self._machine = _toggle("machine", "Charts of processor, memory, GPU, disk and network", look.machine)
        choices = (self._search, self._x, self._smooth, self._log, self._machine)
        for widget in choices:
            answer_while_busy(widget)
            widget.observe(self._chosen, "value")
        self.buttons = HBox(choices, layout=Layout(display="none", flex_flow="row wrap", justify_content="flex-end"))
        self.buttons.add_class("ring-choices")
        self._none = Label("no metric has these words", layout=Layout(display="none"))
        # A chart has whole pixels: an area that is half a pixel smaller would show a scroll bar.
        self.area = VBox([self._none], layout=Layout(width="100%", overflow="hidden"))

    def draw(self, view: RunView) -> None:
        """Show the run as it is now, unless the last drawing was so large that the page needs more time."""
        if monotonic() < self._due:
            return
        made = grouped(view, self._plot, self.look, MOST_CHARTS, self._expected if view.names else None)
        if self.look.machine:
            made.append((Section("machines", ()), machines.charts(view, self.look)))
        self._none.layout.display = None if self.look.search and not made else "none"
        if not self._charts and not any(drawn for _, drawn in made):
            return
        self._offer(view)
        new = [one.title for _, drawn in made for one in drawn if one.title not in self._charts][MOST_NEW:]
        made = [(section, [one for one in drawn if one.title not in new]) for section, drawn in made]
        sent = sum(self._chart(one.title).draw(one) for _, drawn in made for one in drawn)
        self._due = monotonic() + sent / CHART_BYTES
        self._place(made)

    def _offer(self, view: RunView) -> None:
        """Show the choices that this run has."""
        self.buttons.layout.display = "flex"
        if self.look.search or (not self._plot and len(titles(view.charted)) > MOST_CHARTS):
            self._search.layout.display = None
        options = _axes(dict.fromkeys((*axes(view), self.look.x)))
        if self._x.options != options:
            self._x.unobserve(self._chosen, "value")  # new options take the value away for a moment
            self._x.options = options
            self._x.value = self.look.x
            self._x.observe(self._chosen, "value")

    def _place(self, made: Sequence[tuple[Section, Sequence[Chart]]]) -> None:
        of_class = columns([len(drawn) for _, drawn in made])
        for section, drawn in made:
            if section.group not in self._groups:
                self._groups[section.group] = _Group(section.group, self._group_clicked)
            widgets = [self._charts[one.title].widget for one in drawn]
            self._groups[section.group].show(widgets, of_class, section.more, section.group in self.look.groups)
        children = (self._none, *(self._groups[section.group].widget for section, _ in made))
        if children != self.area.children:
            self.area.children = children
        for title in self._charts.keys() - {one.title for _, drawn in made for one in drawn}:
            close_widgets.close(self._charts.pop(title).widget)

    def _chart(self, title: str) -> LiveChart:
        if title not in self._charts:
            self._charts[title] = load_charts()(self._rank_clicked)
            answer_while_busy(self._charts[title].widget)
        return self._charts[title]

    def _rank_clicked(self, rank: int) -> None:
        self._set(replace(self.look, ranks=self.look.ranks ^ {rank}))

    def _group_clicked(self, group: str) -> None:
        self._set(replace(self.look, groups=self.look.groups ^ {group}))

    def _chosen(self, _change: dict[str, Any]) -> None:
        self._set(
            replace(
                self.look,
                log=self._log.value,
                smooth=self._smooth.value,
                machine=self._machine.value,
                x=self._x.value,
                search=self._search.value.strip(),
            )
        )

    def _set(self, look: Look) -> None:
        self._due = 0.0
        if look != self.look:
            self.look = look
            self._on_look(look)


class _Group:
    """The charts of a group under its name, with a button for the hidden ones."""

    def __init__(self, group: str, on_click: Callable[[str], None]) -> None:
        self._button = Button(tooltip="Show all charts of this group", layout=Layout(width="auto", height="20px"))
        self._button.on_click(lambda _button: on_click(group))
        answer_while_busy(self._button)
        name = HTML(f"<b>{escape(group)}</b>")
        self._head = HBox([name, self._button], layout=Layout(grid_gap="8px", align_items="center"))
        self._named = bool(group)
        # A class sets the columns: a layout would arrive after the charts, which would first be as wide as the page.
        self._grid, self._columns = GridBox(layout=Layout(overflow="hidden")), ""
        self._grid.add_class("ring-charts")
        self.widget = VBox([self._head, self._grid], layout=Layout(width="100%"))

    def show(self, charts: Sequence[Widget], columns: str, more: int, opened: bool) -> None:
        """Show these charts in columns of this class. ``more`` are left out, or none if a reader has ``opened`` all."""
        self._button.description = f"{more:,} more" if more else "fewer"
        self._button.layout.display = None if more or opened else "none"
        self._head.layout.display = None if self._named or more or opened else "none"
        if columns != self._columns:
            self._grid.remove_class(self._columns)
            self._grid.add_class(columns)
            self._columns = columns
        if tuple(charts) != self._grid.children:
            self._grid.children = tuple(charts)


def _axes(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"by {name}", name) for name in names)


def _toggle(word: str, tooltip: str, value: bool) -> ToggleButton:
    button = ToggleButton(value, description=word, tooltip=tooltip, layout=Layout(width="auto", height="24px"))
    button.add_class("ring-toggle")
    return button
