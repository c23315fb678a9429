"""Figures of matplotlib, where a cell uses it: drawn as pictures, and shown at the latest when the cell has ended.

Nothing here needs matplotlib. IPython brings the backend that draws for notebooks, which is loaded with a cell's first
figure.
"""

from __future__ import annotations

import os
import sys

__all__ = ["prepare", "show"]

_BACKEND = "matplotlib_inline.backend_inline"


def prepare() -> None:
    """Choose the backend for notebooks, unless the user has chosen one. To be called before a cell is executed."""
    os.environ.setdefault("MPLBACKEND", f"module://{_BACKEND}")


def show() -> None:
    """Show the figures that the cell has drawn and not shown, and close them, as a notebook does after a cell."""
    if _BACKEND in sys.modules:
        sys.modules[_BACKEND].flush_figures()
