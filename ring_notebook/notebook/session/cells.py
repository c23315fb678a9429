"""Which cells run on the ranks, also without a magic (`%ring default on`), and whether they can: their syntax.

`%%local` keeps a cell in the notebook's own process.
"""

from __future__ import annotations

import ast
import re
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.errors import CellSyntaxError
from ring_notebook.notebook.run.failures import brief
from ring_notebook.text.parsing import parse

_LOCAL = re.compile(r"\s*%%local\s*$")
_STAYS = re.compile(r"\s*(%ring\b|%(re)?load_ext\b|%autoreload\b|#|$)")  # lines that do not send a cell to the ranks


class DefaultCells:
    """An input transformer: while ``enabled()``, a cell without a magic of its own becomes a `%%ringtrain` cell."""

    has_side_effects = False

    def __init__(self, shell: InteractiveShell, enabled: Callable[[], bool]) -> None:
        self._shell = shell
        self._enabled = enabled

    def __call__(self, lines: list[str]) -> list[str]:
        if lines and _LOCAL.match(lines[0]):
            return ["\n", *lines[1:]]  # a blank line, so that line numbers stay those of the cell
        if self._enabled() and runs_on_ranks("".join(lines)) and not self._internal():
            # Not `%%ringtrain` as text, which would count as a line of the cell.
            return [f"get_ipython().run_cell_magic('ringtrain', '--first-line 1', {''.join(lines)!r})\n"]
        return lines

    def _internal(self) -> bool:
        """Whether a front end sent this code for itself, as variable inspectors do, and not a user as a cell."""
        parent: dict[str, Any] = getattr(self._shell, "get_parent", dict)()
        content: dict[str, Any] = parent.get("content", {})
        return bool(content.get("silent", False)) or not content.get("store_history", True)


def runs_on_ranks(cell: str) -> bool:
    """Whether a cell has anything to run on ranks: no cell magic of its own, and not only `%ring` lines."""
    first = next((line for line in cell.splitlines() if line.strip()), "")
    return not first.lstrip().startswith("%%") and not all(_STAYS.match(line) for line in cell.splitlines())


_OURS = re.compile(r"^\s*get_ipython\(\)\.run_(line|cell)_magic\('(ring\w*|local)'", re.MULTILINE)


def check_syntax(source: str, first_line: int) -> None:
    """Raise CellSyntaxError when the cell has a syntax error, with the line number that the notebook shows, or uses
    one of our magics, which ranks do not have.
    """
    text = "\n" * (first_line - 1) + TransformerManager().transform_cell(source)
    if ours := _OURS.search(text):
        kind, name = ours.groups()
        advice = "remove its line" if kind == "cell" else "give it a cell of its own"
        message = f"{'%%' if kind == 'cell' else '%'}{name} within a cell that runs on the ranks; {advice}"
        raise brief(CellSyntaxError(message), f"CellSyntaxError: {message}")
    try:
        tree = parse(text, "<cell>")
        with warnings.catch_warnings(), suppress(RecursionError, MemoryError):
            warnings.simplefilter("ignore")  # the ranks warn
            compile(tree, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)  # stray `return`
    except SyntaxError as error:
        if error.text is None and error.lineno:
            error.text = text.splitlines()[error.lineno - 1]
        lines = "".join(traceback.format_exception_only(error)).rstrip()
        text = lines.replace('File "<cell>"', "Cell").strip()
        raise brief(CellSyntaxError(text), text) from None
