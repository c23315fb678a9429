"""The cells on the pages for users of other libraries train as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ring_notebook.notebook.cluster.cluster import Cluster

PAGES = sorted((Path(__file__).parents[3] / "docs").glob("from-*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_our_cell_trains(cluster: Cluster, page: Path) -> None:
    cells = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (ours,) = (cell for cell in cells if cell.startswith("%%ringtrain\n"))
    before = cells[0] if len(cells) == 3 else ""  # what both begin with
    cluster.run(before + ours.removeprefix("%%ringtrain\n")).wait()
    assert cluster.pull("loss", rank=1).item() < 0.1
