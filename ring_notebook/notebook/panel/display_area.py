"""Displays of the ranks: in the live panel as outputs that the page renders, elsewhere as HTML and text."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from time import monotonic

from ipywidgets import HTML, Layout, Output, VBox

from ring_notebook.notebook import close_widgets
from ring_notebook.notebook.colors import GREY, rank_color
from ring_notebook.notebook.record.displays import Displayed
from ring_notebook.text.words import rank_list

# A server drops messages of a kernel above a megabyte per second, and the charts need some of it.
BYTES_PER_SECOND = 400_000


class Gallery:
    """Displays under labels with their ranks, below or ``beside`` each other. `draw` sends only what has changed."""

    def __init__(self, beside: bool = False) -> None:
        self._frames: dict[tuple[int, int], _Frame] = {}
        self._due = 0.0
        flow = {"flex_flow": "row wrap", "grid_gap": "4px 20px"} if beside else {}
        self.widget = VBox(layout=Layout(display="none", overflow="visible", **flow))

    def draw(self, displays: Iterable[Displayed]) -> None:
        """Show these displays. A plot that changes faster than it can be sent skips states."""
        if monotonic() < self._due:
            return
        sent = 0
        shown = {one.place: one for one in displays}
        for place, one in shown.items():
            if place in self._frames:
                sent += self._frames[place].draw(one)
            else:
                self._frames[place] = _Frame(one)
                sent += one.nbytes
        for place in self._frames.keys() - shown.keys():
            close_widgets.close(self._frames.pop(place).widget)
        children = tuple(self._frames[place].widget for place in shown)
        if children != self.widget.children:
            self.widget.children = children
            self.widget.layout.display = None if children else "none"
        self._due = monotonic() + sent / BYTES_PER_SECOND


class _Frame:
    """One display under its label."""

    def __init__(self, one: Displayed) -> None:
        self._shown = one
        self._label = HTML(label(one))
        self._output = Output(outputs=(_output(one),))
        self.widget = VBox([self._label, self._output])
        if one.logged is not None and one.logged.kind == "image":
            self.widget.add_class("ring-pixels")

    def draw(self, one: Displayed) -> int:
        """Show a newer state; returns the number of bytes sent."""
        before, self._shown = self._shown, one
        if label(one) != label(before):
            self._label.value = label(one)
        if one.data is before.data:
            return 0
        self._output.outputs = (_output(one),)
        return one.nbytes


def _output(one: Displayed) -> dict[str, object]:
    return {"output_type": "display_data", "data": one.data, "metadata": one.metadata}


_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def label(one: Displayed) -> str:
    """The label with the ranks that show it, for a page."""
    color = rank_color(one.ranks[0]) if len(one.ranks) == 1 else GREY
    about = "" if one.logged is None else f" {_about(one)}"
    return f"<span style='color:{color};font:12px monospace'>[{rank_list(one.ranks)}]</span>{escape(about)}"


def _about(one: Displayed) -> str:
    return f"{one.logged.name} · step {one.logged.step:,}" if one.logged is not None else ""


def row(displays: Iterable[Displayed]) -> str:
    """Displays of `ring.log` beside each other, for a page; empty without any."""
    shown = "".join(f"<div style='max-width:100%;overflow:auto'>{html([one])}</div>" for one in displays)
    return f"<div class='ring-media' style='display:flex;flex-wrap:wrap;gap:4px 20px'>{shown}</div>" if shown else ""


def html(displays: Iterable[Displayed]) -> str:
    return "".join(f"<div>{label(one)}<div>{_body(one)}</div></div>" for one in displays)


def text(displays: Iterable[Displayed]) -> str:
    return "".join(
        f"[{rank_list(one.ranks)}] {' '.join(filter(None, [_about(one), _plain(one)]))}\n" for one in displays
    )


def _body(one: Displayed) -> str:
    """The richest form that any page shows without a renderer."""
    for mime in _PICTURES:
        if mime in one.data:
            return _image(one, mime, one.data[mime])
    if "image/svg+xml" in one.data:
        return _image(one, "image/svg+xml", base64.b64encode(one.data["image/svg+xml"].encode()).decode())
    if "text/html" in one.data:
        return str(one.data["text/html"])
    return f"<pre>{escape(_plain(one))}</pre>"


def _image(one: Displayed, mime: str, data: str) -> str:
    about = one.metadata.get(mime, {})
    size = "".join(f" {name}='{int(about[name])}'" for name in ("width", "height") if name in about)
    size += " style='image-rendering:pixelated'" if one.logged is not None and one.logged.kind == "image" else ""
    return f"<img alt='{escape(_plain(one), quote=True)}'{size} src='data:{mime};base64,{data.strip()}'>"


def _plain(one: Displayed) -> str:
    return str(one.data.get("text/plain") or ", ".join(one.data))
