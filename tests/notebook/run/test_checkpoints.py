"""Checkpoints of a cell: in the folder of its run, in the list of runs, continued by `--resume` on fewer ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from notebook.kernel import Notebook

# Twelve samples a step, four steps an epoch, whatever the number of ranks. It stops in the middle of the second epoch.
CELL = """
import torch
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
inputs = torch.randn(48, 3, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :2])
loader = torch.utils.data.DataLoader(data, batch_size=12 // ring.size(), shuffle=True)
model, optimizer, loader = ring.prepare(model, optimizer, loader, strategy=STRATEGY)
saved = ring.checkpoint(model, optimizer, loader, every="3 steps", folder=FOLDER)
for epoch in saved.epochs(3):
    for x, y in ring.track(loader):
        if saved.steps == LAST:
            raise SystemExit
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        ring.log(loss=loss, epoch=epoch)
        saved.step()
found = [p.full_tensor().tolist() if hasattr(p, "full_tensor") else p.tolist() for p in model.parameters()]
if ring.rank() == 0:
    print("Trained", saved.steps)
"""


def cell(line: str, strategy: str | None, last: int = -1, folder: str | None = None) -> str:
    source = CELL.replace("STRATEGY", repr(strategy)).replace("LAST", str(last)).replace("FOLDER", repr(folder))
    return f"%%ringtrain {line}{source}"


CURVES = """
from ring_notebook.notebook.panel.charts.chart import axes, over
views = first.log.view(), again.log.view()
for axis in "step", "samples", "epoch":
    assert all(axis in axes(view) for view in views), axis
    whole, rest = (over(view, axis, "loss")[0].x.tolist() for view in views)
    assert (len(rest), whole[6:]) == (6, rest), (axis, whole, rest)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "place"), [(None, ""), ("fsdp", ""), (None, "{}/own"), (None, "local://{}/remote")]
)
def test_a_training_continues_on_one_rank(notebook: Notebook, strategy: str | None, place: str, tmp_path: Path) -> None:
    """With checkpoints in the folder of the run, in another one, and at a URL."""
    folder = place.format(tmp_path) or None
    name = f"{strategy}-{place}"
    assert "has a checkpoint" in notebook.error(cell(f"--resume --name none-{name}", strategy, folder=folder))[1]
    assert "Trained 12" in notebook.text(cell("--out first", strategy, folder=folder))
    notebook.run("%ring pull found\nwhole = found")
    notebook.run(cell(f"--name {name}", strategy, last=8, folder=folder))
    listed = notebook.text("%ring runs --all")
    assert re.search(rf"^{re.escape(name)} .* step 6 {f'in {folder} ' if folder else ''}", listed, re.MULTILINE), listed
    text = notebook.text(cell(f"--name {name} --resume -n 1 --out again", strategy, folder=folder))
    assert "Resumed after step 6, in epoch 1, from " in text
    assert "Trained 12" in text
    assert "had no effect" not in text
    text = notebook.text(f"%%ringtrain --name {name} --resume\nring.log(loss=1.0)")
    assert "--resume had no effect: the cell has not called ring.checkpoint" in text
    notebook.run("%ring pull found")
    notebook.text("import numpy\nfor a, b in zip(whole, found): numpy.testing.assert_allclose(a, b, rtol=1e-9)")
    notebook.text(CURVES)
    if "://" in place:
        kind, why = notebook.error(cell(f"--name {name} --resume", strategy))
        assert f"pass folder='{folder}" in f"{kind}{why}"
