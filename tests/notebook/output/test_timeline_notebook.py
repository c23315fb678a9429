"""The notebook that teaches the timeline runs from top to bottom, and each of its figures is one that it measured."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from notebook.kernel import without_ports
from ring_notebook.notebook.run.timeline import MIME

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "05_timeline.ipynb"


def test_it_runs_and_its_figures_are_measured(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]
    NotebookClient(
        notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}, config=without_ports(tmp_path)
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    data = [output.data for output in outputs if "data" in output]
    assert len([one for one in data if MIME in one]) == 3
    assert any("Rank 1 is" in one.get("text/html", "") for one in data)
    waited = re.search(r"rank 0 waited ([\d.]+) s of ([\d.]+) s, rank 1 ([\d.]+) s", said)
    assert waited
    assert float(waited[1]) > float(waited[3])
    assert re.search(r"[\d.]+ ms one after the other, [\d.]+ ms overlapped", said)
    assert re.search(r"[\d.]+ ms alone, [\d.]+ ms fused: [\d.]+x", said)
    assert len(nbformat.writes(notebook)) < 1_500_000
