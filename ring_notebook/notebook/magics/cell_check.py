"""Checks the syntax of a cell before it is sent to the ranks, and before a cluster is started for it."""

from __future__ import annotations

import ast
import traceback

from IPython.core.inputtransformer2 import TransformerManager

from ring_notebook.errors import CellSyntaxError
from ring_notebook.notebook.run.failures import brief

__all__ = ["check_syntax"]


def check_syntax(source: str, first_line: int) -> None:
    """Raise CellSyntaxError when the cell has one, with the line number that the notebook shows beside it."""
    text = "\n" * (first_line - 1) + TransformerManager().transform_cell(source)
    try:
        ast.parse(text, "<cell>")
    except SyntaxError as error:
        lines = "".join(traceback.format_exception_only(error)).rstrip()
        text = lines.replace('File "<cell>"', "Cell").strip()
        raise brief(CellSyntaxError(text), text) from None
