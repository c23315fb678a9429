"""tqdm on the ranks, in each of its forms: text that ends at 100 %, once, with the rank's label."""

from __future__ import annotations

import re

import pytest

from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.panel.report import mime_bundle

CELL = """from {module} import tqdm, trange
for epoch in trange(2, desc="epoch"):
    for batch in tqdm(range(3), desc="batch", leave=False):
        pass
print("after")
"""


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook", "tqdm.autonotebook"])
def test_bars_end_at_100_percent(cluster: Cluster, module: str) -> None:
    run = cluster.run(CELL.format(module=module)).wait()
    text = mime_bundle(run.log)["text/plain"]
    bars = re.findall(r"^\[0(?:-1)?\] epoch: +(\d+)%\|.*2/2", text, re.MULTILINE)
    assert bars == ["100"], text
    assert "batch" not in text, "a bar with leave=False leaves nothing"
    assert "[0-1] after" in text
    assert not run.displays
