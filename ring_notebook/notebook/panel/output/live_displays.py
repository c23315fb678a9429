"""What the ranks display, in the live panel; the page renders it as any output of a notebook."""

from __future__ import annotations

from time import monotonic

from ipywidgets import HTML, Layout, Output, VBox

from ring_notebook.notebook import close_widgets
from ring_notebook.notebook.panel.output import displays_html
from ring_notebook.notebook.record.displays import Displayed
from ring_notebook.notebook.record.run_view import RunView

__all__ = ["Gallery"]

# A server drops what a kernel sends beyond a megabyte a second, and the charts need some of it.
BYTES_PER_SECOND = 400_000


class Gallery:
    """The current displays, each under a label with its ranks. `draw` sends only what has changed."""

    def __init__(self) -> None:
        self._frames: dict[tuple[int, int], _Frame] = {}
        self._due = 0.0
        self.widget = VBox(layout=Layout(display="none", overflow="visible"))

    def draw(self, view: RunView) -> None:
        """Show the displays of ``view``; a plot that changes faster than it can be sent skips states."""
        if monotonic() < self._due:
            return
        sent = 0
        shown = {one.place: one for one in view.displays}
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

    def finish(self, view: RunView) -> None:
        """Show the last state, whatever was sent just before."""
        self._due = 0.0
        self.draw(view)


class _Frame:
    """One display under its label."""

    def __init__(self, one: Displayed) -> None:
        self._shown = one
        self._label = HTML(displays_html.label(one))
        self._output = Output(outputs=(_output(one),))
        self.widget = VBox([self._label, self._output])

    def draw(self, one: Displayed) -> int:
        """Show a newer state; returns the number of bytes that this sends."""
        before, self._shown = self._shown, one
        if one.ranks != before.ranks:
            self._label.value = displays_html.label(one)
        if one.data is before.data:
            return 0
        self._output.outputs = (_output(one),)
        return one.nbytes


def _output(one: Displayed) -> dict[str, object]:
    return {"output_type": "display_data", "data": one.data, "metadata": one.metadata}
