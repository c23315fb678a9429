"""Cells whose ranks step alone."""

from __future__ import annotations

from notebook.kernel import Notebook

CELL = """%%ringtrain --sync-every 3 --out run
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(7):
    optimizer.zero_grad()
    model(torch.ones(2, 4) * (1 + ring.rank())).sum().backward()
    optimizer.step()
    ring.log(step, loss=1.0)
"""
RECORDED = """
rows = [row.values for row in run.metrics if row.rank == 1]
assert [name for name in rows[1]] == ["loss"], rows[1]
last = rows[-1]
assert last["sync/distance"] > 0, last
assert abs(last["sync/MB_every_step"] - 6 * 40e-6) + abs(last["sync/MB"] - 2 * 40e-6) < 1e-9, last
"""
UNEQUAL = """%%ringtrain
assert len({*ring.allgather_object(model.weight.detach().numpy().tobytes())}) == 2
assert optimizer.state_dict()["outer"]["position"] == 1
optimizer.sync()
assert len({*ring.allgather_object(model.weight.detach().numpy().tobytes())}) == 1
model, optimizer = ring.prepare(model, optimizer, sync_every=1)
assert not hasattr(optimizer, "sync")
"""


def test_a_line_of_the_magic_makes_ranks_step_alone(notebook: Notebook) -> None:
    assert "The weights of the ranks differ" in notebook.text(CELL)
    notebook.text(RECORDED)
    notebook.text("%%ringtrain\nkept = optimizer")
    notebook.text(CELL)
    notebook.text(RECORDED)  # under the same name
    assert "weights" not in notebook.text(UNEQUAL)


def test_a_line_of_the_magic_that_no_optimizer_takes(notebook: Notebook) -> None:
    said = notebook.text("%%ringtrain --sync-every 50\nring.log(loss=1.0)")
    assert "--sync-every 50 had no effect: no optimizer of the cell" in said
