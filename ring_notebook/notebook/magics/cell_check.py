"""Checks the syntax of a cell before it is sent to the ranks, and before a cluster is started for it."""

from __future__ import annotations

import ast
import re
import traceback

from IPython.core.inputtransformer2 import TransformerManager

from ring_notebook.errors import CellSyntaxError
from ring_notebook.notebook.run.failures import brief

_OURS = re.compile(r"^\s*get_ipython\(\)\.run_(line|cell)_magic\('(ring\w*|local)'", re.MULTILINE)

__all__ = ["check_syntax"]


def check_syntax(source: str, first_line: int) -> None:
    """Raise CellSyntaxError when the cell has a syntax error, with the line number that the notebook shows, or uses
    one of our magics, which ranks do not have.
    """
    text = "\n" * (first_line - 1) + TransformerManager().transform_cell(source)
    if ours := _OURS.search(text):
        kind, name = ours.groups()
        advice = "remove its line" if kind == "cell" else "give it a cell of its own"
        said = f"{'%%' if kind == 'cell' else '%'}{name} within a cell that runs on the ranks; {advice}"
        raise brief(CellSyntaxError(said), f"CellSyntaxError: {said}")
    try:
        ast.parse(text, "<cell>")
    except SyntaxError as error:
        lines = "".join(traceback.format_exception_only(error)).rstrip()
        text = lines.replace('File "<cell>"', "Cell").strip()
        raise brief(CellSyntaxError(text), text) from None
