"""Checks the syntax of a cell before it is sent to the ranks, and before a cluster is started for it."""

from __future__ import annotations

import ast
import re
import traceback

from IPython.core.inputtransformer2 import TransformerManager

from ring_notebook.errors import CellSyntaxError
from ring_notebook.notebook.run.failures import brief

_OURS = re.compile(r"\s*(%%ring\w+)")

__all__ = ["check_syntax"]


def check_syntax(source: str, first_line: int) -> None:
    """Raise CellSyntaxError when the cell has a syntax error, with the line number that the notebook shows, or is
    itself a cell with one of our magics, which ranks do not have.
    """
    if nested := _OURS.match(source):
        text = f"{nested[1]} within a cell that already runs on the ranks; remove its line"
        raise brief(CellSyntaxError(text), f"CellSyntaxError: {text}")
    text = "\n" * (first_line - 1) + TransformerManager().transform_cell(source)
    try:
        ast.parse(text, "<cell>")
    except SyntaxError as error:
        lines = "".join(traceback.format_exception_only(error)).rstrip()
        text = lines.replace('File "<cell>"', "Cell").strip()
        raise brief(CellSyntaxError(text), text) from None
