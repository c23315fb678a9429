"""The notebooks that teach run from top to bottom on two engines; what they promise is asserted in their cells."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from notebook.kernel import without_ports

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
SECONDS = 240
SAYS = {
    "09_pipeline_and_model_parallel": ["naive  m=1: idle", "1F1B   m=8: idle", "outputs and gradients agree"],
}


@pytest.mark.parametrize("name", SAYS)
def test_a_notebook(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}, config=without_ports(tmp_path)
    ).execute()
    shown = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert [words for words in SAYS[name] if words not in shown] == []
    assert all(len(cell.source.splitlines()) < 45 for cell in notebook.cells)
