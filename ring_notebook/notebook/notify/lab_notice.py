"""A notice in JupyterLab's notification center, through its own command and `ipylab`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from IPython.core.getipython import get_ipython

from ring_notebook.notebook import close_widgets

_COMMAND = "apputils:notify"
_MOST = 140  # characters of a notification


def available() -> bool:
    """Whether this process is the kernel of a front end that may be JupyterLab."""
    return hasattr(get_ipython(), "kernel") and find_spec("ipylab") is not None


def show(text: str, kind: str) -> None:
    """Show ``text`` until somebody dismisses it; ``kind`` is ``success``, ``warning`` or ``error``.

    Callable from any thread, also while a cell blocks. Does nothing where there is no such front end, and one that
    does not know the command ignores it.
    """
    if not available():
        return
    from ipylab import JupyterFrontEnd

    app: Any = JupyterFrontEnd()
    message = text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
    app.commands.execute(_COMMAND, {"message": message, "type": kind, "options": {"autoClose": False}})
    close_widgets.close(app)
