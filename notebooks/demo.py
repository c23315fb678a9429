"""Runs notebooks on a real cluster without a browser; by itself the quickstart, and says what came of it: `make demo`.

Notebooks of the workshop have an exercise: a cell with blanks (``...``). `fill_in` puts its solution there, which is
folded in the notebook.
"""

from __future__ import annotations

import ast
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

from ring_notebook.notebook.panel.report import mime_bundle
from ring_notebook.notebook.record.run_log import RunLog

HERE = Path(__file__).parent
SECONDS = 300  # for one cell, on a machine that is busy with other things
SOLUTION = re.compile(r"<details>\s*<summary>Solution</summary>\s*```python\n(.*?)```", re.DOTALL)


def tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    """The code cells with a tag: ``exercise``, ``check`` (says what is still wrong) or ``measured`` (shows a dict)."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def solutions(notebook: NotebookNode) -> list[str]:
    """What to write into each exercise cell: the folded code of the markdown cells."""
    texts = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return [code.rstrip() for code in SOLUTION.findall(texts)]


def fill_in(notebook: NotebookNode) -> None:
    """Put the solutions into the exercise cells."""
    for cell, code in zip(tagged(notebook, "exercise"), solutions(notebook), strict=True):
        cell.source = code


def measured(notebook: NotebookNode) -> dict[str, Any]:
    """What a notebook that has been executed has measured, by name."""
    (cell,) = tagged(notebook, "measured")
    shown = [output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result"]
    found: dict[str, Any] = ast.literal_eval(shown[-1])
    return found


def execute(
    notebook: NotebookNode,
    runs: str,
    announce: Callable[..., None] | None = None,
    read: Callable[..., None] | None = None,
) -> None:
    """Execute all cells, in place, with the records of runs in the folder ``runs``.

    nbclient calls ``announce`` before each cell, and ``read`` behind it. Raises nbclient's CellExecutionError, with the
    traceback, for a cell that fails.
    """
    os.environ["RING_RUNS_DIR"] = runs  # for the kernel
    # The kernel and this program talk over sockets in a folder of this user's, not over ports that others reach.
    private = Config({"KernelManager": {"transport": "ipc"}})
    NotebookClient(
        notebook,
        config=private,
        timeout=SECONDS,
        coalesce_streams=True,
        on_cell_execute=announce,
        on_cell_executed=read,
    ).execute()


def first_line(cell: NotebookNode, cell_index: int) -> None:
    """Show what is about to run."""
    if cell.cell_type == "code":
        print(f"[{cell_index}] {cell.source.splitlines()[0]}", flush=True)


def main() -> None:
    """Execute the quickstart; a cell that fails ends the program with its traceback."""
    with tempfile.TemporaryDirectory(prefix="ring-demo-") as runs:  # the runs of a demo are nobody's to keep
        notebook = nbformat.read(HERE / "01_quickstart.ipynb", as_version=4)
        fill_in(notebook)
        execute(notebook, runs, first_line)
        logs = [RunLog.load(directory) for directory in sorted(Path(runs).iterdir())]
        print("\n" + mime_bundle(next(log for log in logs if log.name == "digits"))["text/plain"] + "\n")
    print("\n".join(f"{name}: {value}" for name, value in measured(notebook).items()))
    print("Next: `make lab` opens this notebook in JupyterLab, where you can watch the curves grow.")


if __name__ == "__main__":
    main()
