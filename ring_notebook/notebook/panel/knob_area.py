"""The knobs of a live panel: a slider, a switch or a list for each, and the button that pauses the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from html import escape
from time import monotonic
from typing import Any

from ipywidgets import (
    HTML,
    Button,
    Checkbox,
    Dropdown,
    FloatLogSlider,
    FloatSlider,
    FloatText,
    HBox,
    IntSlider,
    IntText,
    Layout,
    VBox,
)

from ring_notebook.errors import RingError
from ring_notebook.notebook.panel.busy_kernel import answer_while_busy
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.protocol.knobs import Range, Value

Steer = Callable[[str, Mapping[str, Any]], object]
"""Makes a change: "set" with values of knobs by name, "pause" or "resume"."""
_DECADES_BELOW, _DECADES_ABOVE = 3, 2  # of the first value, on the slider of a knob without limits
_STEPS = 1000  # of a slider
_SECONDS_TO_TAKE = 3.0  # for which a slider shows a choice that the ranks have not taken yet


class KnobArea:
    """The knobs of one run. `draw` shows ``widget``, and ``button``, which pauses the run, when they work."""

    def __init__(self, steer: Steer | None) -> None:
        self._steer = steer
        self._knobs: dict[str, Any] = {}
        self._chosen: dict[str, tuple[Value, float]] = {}
        self._drawing = False
        self._paused = False
        layout = Layout(width="86px", height="24px", flex="0 0 auto", display="none")
        self.button = Button(description="Pause", icon="pause", layout=layout)
        self.button.on_click(self._on_pause)
        answer_while_busy(self.button)
        self._row = HBox(layout=Layout(flex_flow="row wrap", grid_gap="0 18px", width="100%"))
        self._row.add_class("ring-knobs")
        self._said = HTML()
        self.widget = VBox([self._row, self._said], layout=Layout(width="100%", display="none"))

    def draw(self, view: RunView) -> None:
        """Show the knobs of the run and their present values."""
        if self._steer is None:
            return
        steps = any(rank.status and rank.status.extra.get("points") for rank in view.ranks)
        if steps or view.knobs or view.paused:
            self.button.layout.display = None
        self._draw_button(view.paused)
        new = [name for name in view.knobs if name not in self._knobs]
        for name in new:
            self._add(name, view.knobs[name].range)
        if new:
            self.widget.layout.display = None
            self._row.children = tuple(self._knobs.values())
        self._drawing = True
        try:
            for name, knob in view.knobs.items():
                self._show(name, knob.value, view.paused)
        finally:
            self._drawing = False

    def _draw_button(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            self.button.description, self.button.icon = ("Resume", "play") if paused else ("Pause", "pause")
            self.button.disabled = False
        self.button.tooltip = "All ranks continue" if paused else "All ranks wait at the end of the same step"

    def _show(self, name: str, value: Value, paused: bool) -> None:
        widget = self._knobs[name]
        chosen, since = self._chosen.get(name, (value, 0.0))
        if chosen != value and (paused or monotonic() - since < _SECONDS_TO_TAKE):
            return  # no step has taken it yet
        self._chosen.pop(name, None)
        if widget.value != value and not _is_near(widget, value):
            if isinstance(widget, FloatLogSlider):
                widget.min, widget.max = min(widget.min, _power(value)), max(widget.max, _power(value))
            widget.value = value

    def _add(self, name: str, range_: Range) -> None:
        widget = self._knobs[name] = _made(name, range_)
        widget.tooltip = f"{name}: takes {range_.described()}"
        answer_while_busy(widget)
        widget.observe(lambda change: self._on_change(name, change["new"]), "value")

    def _on_change(self, name: str, value: Any) -> None:
        if not self._drawing:
            self._chosen[name] = (value, monotonic())
            self._say(self._made_change("set", {name: value}))

    def _on_pause(self, _button: Button) -> None:
        self.button.disabled = not self._paused
        if said := self._made_change("resume" if self._paused else "pause", {}):
            self.button.disabled = False
            self._say(said)

    def _made_change(self, action: str, values: Mapping[str, Any]) -> str:
        """Make a change; returns why it was refused, or nothing."""
        assert self._steer is not None
        try:
            self._steer(action, values)
        except RingError as error:
            self._chosen.clear()
            return str(error)
        return ""

    def _say(self, text: str) -> None:
        self._said.value = f"<div class='ring-notice ring-alert' role='alert'>{escape(text)}</div>" if text else ""


def _made(name: str, range_: Range) -> Any:
    style = {"description_width": "auto"}
    wide = Layout(flex="1 1 255px", max_width="300px", height="26px")  # two in a row on a page of 700 pixels
    first, low, high = range_.first, range_.low, range_.high
    if range_.choices:
        narrow = Layout(width="auto", height="26px")
        return Dropdown(options=list(range_.choices), value=first, description=name, style=style, layout=narrow)
    if isinstance(first, bool):
        return Checkbox(first, description=name, indent=False, layout=Layout(width="auto", height="26px"))
    common = {"description": name, "continuous_update": False, "style": style, "layout": wide}
    if isinstance(first, int):
        if low is None or high is None:
            return IntText(first, description=name, style=style, layout=Layout(width="170px", height="26px"))
        return IntSlider(first, min=math.ceil(low), max=math.floor(high), **common)
    assert isinstance(first, float)
    if range_.log or ((low is None or high is None) and first > 0 and (low is None or low <= 0)):
        least = _power(low) if low else _power(first) - _DECADES_BELOW
        most = _power(high) if high is not None else _power(first) + _DECADES_ABOVE
        return FloatLogSlider(first, min=least, max=most, step=(most - least) / _STEPS, readout_format=".3g", **common)
    if low is None or high is None:
        return FloatText(first, description=name, style=style, layout=Layout(width="170px", height="26px"))
    return FloatSlider(first, min=low, max=high, step=(high - low) / _STEPS, readout_format=".3g", **common)


def _power(value: Value) -> float:
    return math.log10(value) if isinstance(value, int | float) and value > 0 else -9.0


def _is_near(widget: Any, value: Value) -> bool:
    """Whether the readout of the widget already shows the value, so that a schedule does not move it each step."""
    return isinstance(value, float) and f"{widget.value:.3g}" == f"{value:.3g}"
