"""A line in the output of a cell that changes later."""

from __future__ import annotations

from html import escape

from IPython.display import DisplayHandle, display


def place() -> DisplayHandle:
    """An empty display in the output of the current cell, to fill later."""
    made: DisplayHandle = display({"text/plain": ""}, raw=True, display_id=True)
    return made


class Note:
    """A line in the output of the cell that makes it, which `tell` replaces later, from any thread."""

    def __init__(self) -> None:
        self._shown = ""
        self._display = place()

    def tell(self, text: str) -> None:
        """Replace the line by ``text``."""
        if text != self._shown:
            self._shown = text
            page = escape(text).replace("\n", "<br>")
            self._display.update({"text/plain": text, "text/html": f"<p>{page}</p>"}, raw=True)
