"""A cell that is run again and again in one notebook: nothing piles up behind its panels, and the file stays small."""

from __future__ import annotations

import nbformat
import pytest

from notebook.kernel import Notebook

# Long enough for a panel with charts, output and a figure of each rank.
CELL = """%%ringtrain
import time, matplotlib.pyplot as plt
for step in range(3):
    ring.log(loss=step, samples=1)
    print("step", step)
plt.plot([1, ring.rank()])
plt.show()
time.sleep(0.5)
"""
HOLDS = """
import gc, psutil
from ipywidgets.widgets.widget import _instances
kernel = psutil.Process()
gc.collect()
print(len(_instances), kernel.memory_info().rss >> 20, kernel.num_fds(), kernel.num_threads())
"""


@pytest.mark.slow
def test_panels_leave_nothing_behind(notebook: Notebook) -> None:
    for _ in range(4):
        notebook.run(CELL)
    widgets, memory, descriptors, threads = map(int, notebook.text(HOLDS).split())
    for _ in range(5):
        outputs = notebook.run(CELL)
    after = list(map(int, notebook.text(HOLDS).split()))
    # Widgets of one run stay for pages that are opened later; they differ by what its last redraw came to.
    assert after[0] <= widgets + 40
    assert after[1] <= memory + 12
    assert after[2] <= descriptors + 16
    assert after[3] <= threads + 2
    cell = nbformat.v4.new_code_cell(CELL, outputs=[nbformat.from_dict(output) for output in outputs])
    assert len(nbformat.writes(nbformat.v4.new_notebook(cells=[cell]))) < 200_000
