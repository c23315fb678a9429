"""`%ring free` in a real kernel: what a failed cell has left is freed, and what variables hold is listed."""

from __future__ import annotations

from notebook.kernel import Notebook

CELL = """%%ringtrain
import gc, sys, torch, weakref

class Watched(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1 << 20))

kept = torch.ones(3 << 18)
model = torch.nn.Linear(512, 512, bias=False)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 512)).sum().backward()
optimizer.step()

def fails():
    global watch
    large = Watched()
    large.others = [large]  # only a collection frees a circle
    watch = weakref.ref(large)
    raise ValueError("boom")

fails()
"""
ALIVE = "%%ringtrain --out alive\nring.log(1, alive=float(watch() is not None))"


def test_frames_of_a_failed_cell_are_freed_and_variables_listed(notebook: Notebook) -> None:
    """By counting on an object of a frame: what the debugger needs is kept until then."""
    assert notebook.error(CELL)[0] == "ValueError"
    assert "Watched()" in notebook.text("%ring debug -c 'p large'")
    text = notebook.text("%ring free")
    assert "freed: rank 0: 4.0 MiB, rank 1: 4.0 MiB" in text, text
    held = {row[1]: row[3] for row in (line.split() for line in text.splitlines()) if len(row) == 5 and row[0] == "1"}
    assert held["kept"] == "3.0"
    assert held["model"] == "2.0", "with its gradients"
    assert held["optimizer"] == "2.0", "without the weights"
    assert "left no exception to debug" in notebook.error("%ring debug -t 1")[1]
    notebook.text(ALIVE)
    assert notebook.text("{row.values['alive'] for row in alive.metrics}") == "{0.0}"


def test_the_next_cell_frees_them_by_itself(notebook: Notebook) -> None:
    assert notebook.error(CELL)[0] == "ValueError"
    notebook.text(ALIVE)
    assert notebook.text("{row.values['alive'] for row in alive.metrics}") == "{0.0}"
