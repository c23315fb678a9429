"""Cells that train logical ranks."""

from __future__ import annotations

from notebook.kernel import Notebook

CELL = """%%ringtrain --logical 4 -n RANKS --out run_on_RANKS
import torch

torch.manual_seed(ring.rank())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.arange(96.0).reshape(24, 4) / 96, batch_size=2, shuffle=True)
model, optimizer, loader = ring.prepare(model, optimizer, loader)
for x in loader:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    ring.log(loss=loss)
"""
COMPARED = """
def rows(run):
    return sorted((row.values["logical_rank"], row.step, row.values["loss"]) for row in run.metrics)

assert [row[:2] for row in rows(run_on_1)] == [(rank, step) for rank in range(4) for step in range(3)], rows(run_on_1)
assert rows(run_on_1) == rows(run_on_2), (rows(run_on_1), rows(run_on_2))
"""


def test_losses_are_the_same_on_one_rank_and_on_two(notebook: Notebook) -> None:
    for ranks in ("1", "2"):
        notebook.text(CELL.replace("RANKS", ranks))
    notebook.text(COMPARED)
    said = notebook.text("%%ringtrain --logical 4\nring.log(loss=1.0)")
    assert "--logical 4 had no effect: the cell has not called ring.prepare" in said
