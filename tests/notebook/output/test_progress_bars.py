"""Progress of tqdm and rich on the ranks: text that ends at 100 %, once, with the rank's label; and widgets."""

from __future__ import annotations

import re
import time
from pathlib import Path

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


def test_rich_draws_in_place_and_takes_nothing_back(cluster: Cluster, tmp_path: Path) -> None:
    cell = """import pathlib, time
from rich.progress import Progress
print("before")
with Progress() as progress:
    first, second = progress.add_task("first", total=5), progress.add_task("second", total=10)
    for step in range(10):
        progress.update(first, advance=0.5)
        progress.update(second, advance=1)
        time.sleep(0.1)
        if step == 5:
            print("meanwhile")
            while not pathlib.Path(SEEN).exists():
                time.sleep(0.05)
print("after")
"""
    run = cluster.run(cell.replace("SEEN", repr(str(tmp_path / "seen"))))
    seen: set[str] = set()
    while not run.done:
        seen |= set(re.findall(r"second [━╸╺ ]+ +(\d+)%", mime_bundle(run.log)["text/plain"]))
        if seen - {"0", "100"}:
            (tmp_path / "seen").touch()
        time.sleep(0.05)
    text = mime_bundle(run.wait().log)["text/plain"]
    assert seen - {"0", "100"}, "it is seen to move"
    assert len(re.findall(r"first [━ ]+ 100%", text)) == 1, text
    assert len(re.findall(r"second [━ ]+ 100%", text)) == 1
    assert [line for line in ("before", "meanwhile", "after") if f"[0-1] {line}" not in text] == []


def test_a_widget_says_in_a_line_what_to_do(cluster: Cluster) -> None:
    cell = "import ipywidgets\nfrom IPython.display import display\ndisplay(ipywidgets.IntSlider(3))"
    text = mime_bundle(cluster.run(cell).wait().log)["text/plain"]
    assert "[0-1] IntSlider: widgets work in the notebook's own process only" in text
    assert "`%ring push` its value" in text
