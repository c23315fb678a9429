"""The first hour of a newcomer as one notebook: each cell beside what a person should see under it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from playwright.sync_api import expect

from browser.lab import NotebookPage, Open, Picture


@dataclass(frozen=True)
class Step:
    """A cell, the texts that its output shows, in this order, and texts that it does not show."""

    cell: str
    shows: tuple[str, ...] = ()
    never: tuple[str, ...] = ("Traceback", "Error")


TRAINS = """%%ringtrain --name kept
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.ones(64, 4)), 8)
model, optimizer, loader = ring.prepare(model, optimizer, loader)
saved = ring.checkpoint(model, optimizer, loader, every="4 steps", keep=3, best="val_loss")
for epoch in saved.epochs(2):
    for (batch,) in ring.track(loader):
        loss = model(batch).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        ring.log(loss=loss, samples=8)
        saved.step()
    ring.log(val_loss=loss.item())
"""
STEPS = (
    Step("%load_ext ring_notebook\n%ring start -n 2", ("Started 2 engines",)),
    Step("ring.rank()", ("%%ringtrain",), ("is not defined",)),
    Step(
        "ring.prepare?",
        ("Signature:", "ring.prepare(", "Make a single-process training loop data parallel"),
        ("not found",),
    ),
    Step(
        "%%ringtrain --name two-models\n"
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "G, D = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)\n"
        "g, d = torch.optim.SGD(G.parameters(), 0.1), torch.optim.Adam(D.parameters())\n"
        "loader = torch.utils.data.DataLoader(TensorDataset(torch.ones(32, 2)), 4)\n"
        "G, D, g, d, loader = ring.prepare(G, D, g, d, loader)\n"
        "step, rate = 0, 0.1\n"
        "for (batch,) in ring.track(loader):\n"
        "    step += 1\n"
        "    loss = D(G(batch)).mean()\n"
        "    g.zero_grad(); d.zero_grad(); loss.backward(); g.step(); d.step()\n"
        "    ring.log(loss=loss, **{f'metric_{n:02}': n for n in range(4)})\n",
        (
            "ok",
            "two-models",
            "2 ranks",
            "rate 0.1",
            "loss",
            "metric_00",
            "metric_01",
            "metric_02",
            "metric_03",
            "memory",
        ),
        ("Traceback", "Error", "step 0", "takes from 2 to 3 positional"),
    ),
    Step(
        "%%ringtrain --name too-fast\n"
        "import math\n"
        "for step in ring.track(range(60)):\n"
        "    ring.log(loss=math.nan if step > 40 else 1 / (step + 1))\n",
        ("▲ loss is NaN on ranks 0-1 since step 41",),
        ("Traceback", "samples/s"),
    ),
    Step(
        "%%ringtrain\n"
        "import matplotlib.pyplot as plt\n"
        "figure, axes = plt.subplots(figsize=(3, 1))\n"
        "display(figure); plt.close(figure)\n"
        "print('printed after the figure')\n"
        "7 * 6",
        ("[0-1]", "[0-1] printed after the figure", "[0-1] 42"),
    ),
    Step(
        "%%ringtrain\nfor n in range(60): print('line', n)", ("10 earlier lines", "line 10", "line 59"), ("line 9\n",)
    ),
    Step(
        "%%ringtrain --name floods\nfor n in range(20_000): print('line', n, 'of rank', ring.rank())",
        ("39,950 earlier lines", "line 19999 of rank"),
    ),
    Step("data = [1, 2, 3]\n%ring push data", ("Pushed data to 2 ranks.",)),
    Step(
        "%%ringtrain --background --name broken\nimport time\ntime.sleep(1)\n{}['missing_key']",
        ("failed", "broken", "Cell, line 4", "KeyError: 'missing_key'", "ranks 0-1: same"),
        ("Stop",),
    ),
    Step("%%ringtrain --background --name before\nimport time\ntime.sleep(3)\nprint('first')", ("before",)),
    Step("%%ringtrain --name after\nprint('ran after it')", ("ok", "after", "[0-1] ran after it")),
    Step(TRAINS, ("ok", "val_loss"), ("Traceback", "Error", "Resumed")),
    Step(
        TRAINS.replace("kept", "kept --resume").replace("epochs(2)", "epochs(3)"),
        ("ok", "Resumed after step 8, in epoch 2"),
    ),
    Step(
        "%%ringtrain --name straggler --timeline\n"
        "import time, torch\n"
        "for step in range(60):\n"
        "    time.sleep(0.1 if ring.rank() == 1 else 0.02)\n"
        "    ring.allreduce(torch.ones(1))\n"
        "    ring.log(loss=1 / (step + 1))\n",
        (
            "rank 1 is",
            "slower in sleeping or waiting outside of collectives; the others wait",
            "Rank 1 is",
            "slower in sleeping or waiting outside of collectives; the others wait",
            "asleep",
            "waiting",
            "others waited for it",
        ),
    ),
    Step("%ring runs", ("name", "curve", "loss", "straggler", "kept", "broken", "too-fast", "two-models")),
    Step("%ring runs --sort loss", ("two-models", "too-fast")),  # NaN is last
    Step("%ring runs --sort nothing", ("no run has a column 'nothing'",), ("Traceback",)),
    Step("%ring plot loss kept straggler", ()),
)


def completes(notebook: NotebookPage, cell: int) -> None:
    """Tab lists each name of `ring` once, before the kernel has imported a framework."""
    notebook.cell(cell).locator(".cm-content").click()
    notebook.page.keyboard.insert_text("%%ringtrain\nring.allred")
    notebook.page.keyboard.press("Tab")
    names = notebook.page.locator(".jp-Completer-item code")
    names.first.wait_for()
    assert [name for name in names.all_inner_texts() if name.endswith("allreduce")] == ["ring.allreduce"]
    notebook.page.keyboard.press("Escape")


@pytest.mark.slow
def test_the_first_hour(open_notebook: Open, picture: Picture) -> None:
    notebook = open_notebook("newcomer.ipynb", *(step.cell for step in STEPS), "")
    for index, step in enumerate(STEPS):
        if index == 1:
            completes(notebook, len(STEPS))
        notebook.complete(index)
        output = notebook.output(index)
        for text in step.shows:
            expect(output).to_contain_text(text, use_inner_text=True)
        said, place = output.inner_text(), 0
        for text in step.shows:
            place = said.find(text, place)
            assert place >= 0, f"no {text!r} there, in the order of {step.shows}: {said}"
        assert not [text for text in step.never if text in said], said
        picture(notebook, index, f"newcomer-{index}")
