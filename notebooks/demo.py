"""Runs the quickstart on a real cluster without a browser, and says what came of it: `make demo`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

from ring_notebook.notebook.panel.report import mime_bundle
from ring_notebook.notebook.record.run_log import RunLog

NOTEBOOK = Path(__file__).with_name("01_quickstart.ipynb")
SECONDS = 300  # for one cell, on a machine that is busy with other things
# The kernel and this program talk over sockets in a folder of this user's, not over ports that others reach.
PRIVATE = Config({"KernelManager": {"transport": "ipc"}})


def announce(cell: NotebookNode, cell_index: int) -> None:
    """Show what is about to run: the first line of the cell."""
    if cell.cell_type == "code":
        print(f"[{cell_index}] {cell.source.splitlines()[0]}", flush=True)


def main() -> None:
    """Execute the notebook; a cell that fails ends the program with its traceback."""
    with tempfile.TemporaryDirectory(prefix="ring-demo-") as runs:
        os.environ["RING_RUNS_DIR"] = runs  # for the kernel: the runs of a demo are nobody's to keep
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        NotebookClient(notebook, config=PRIVATE, timeout=SECONDS, on_cell_execute=announce).execute()
        *_, directory = sorted(Path(runs).iterdir())  # the newest, which trains
        print("\n" + mime_bundle(RunLog.load(directory))["text/plain"] + "\n")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    print(said[said.index("test accuracy here") :])
    print("Next: `make lab` opens this notebook in JupyterLab, where you can watch the curves grow.")


if __name__ == "__main__":
    main()
