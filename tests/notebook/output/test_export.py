"""What was exported from a notebook does under ringrun what the cell did."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran
from ring_notebook.notebook.cluster.cluster import Cluster

SETUP = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
"""
CELL = """
!true
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = ring.prepare(model, optimizer, loader)
for (x,) in ring.track(loader):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    ring.log(loss=loss)
final = float(sum(p.sum() for p in model.parameters()))
print(f"rank {ring.rank()} of {ring.size()}: {final:.9f}")
"""


@pytest.mark.parametrize("options", [{}, {"sync_every": 2}, {"logical": 4}], ids=str)
def test_ringrun_trains_the_same(cluster: Cluster, tmp_path: Path, options: dict[str, int]) -> None:
    cluster.run(SETUP, options={"setup": True}).wait()
    run = cluster.run(CELL, options=options).wait()
    made = run.export(tmp_path / "train.py")
    assert made.missing == ()
    done = ran([*RINGRUN, "--no-prefix", "-np", "2", "python", "train.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    final = cluster.pull("final")
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank} of 2: {final:.9f}" for rank in range(2)]
    assert "loss" in done.stdout  # what is logged is printed by rank 0
