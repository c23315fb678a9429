"""accelerate and Lightning, as their documentation shows them: in a cell, again, after a failure, and in a script.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from ring_notebook.notebook.cluster.cluster import Cluster

DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
inputs = torch.randn(32, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
"""
ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2, accelerator.state
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    FAIL
    optimizer.step()
weights = accelerator.gather(model.module.weight.detach().flatten()).view(2, -1)
assert torch.equal(weights[0], weights[1])
"""
)
FABRIC = (
    DATA
    + """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
assert fabric.world_size == 2
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
for x, y in fabric.setup_dataloaders(DataLoader(data, batch_size=4)):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    fabric.backward(loss)
    FAIL
    optimizer.step()
weights = fabric.all_gather(model.module.weight.detach().flatten())
assert torch.equal(weights[0], weights[1])
"""
)
TRAINER = (
    DATA
    + """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        x, y = batch
        FAIL
        return torch.nn.functional.mse_loss(self.layer(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
assert trainer.world_size == 2
trainer.fit(Model(), DataLoader(data, batch_size=4))
assert trainer.global_step == 4
"""
)
pytest.importorskip("accelerate", reason="lives in an environment of its own: make test-libraries")
pytest.importorskip("lightning", reason="lives in an environment of its own: make test-libraries")
LIBRARIES = {"accelerate": ACCELERATE, "fabric": FABRIC, "trainer": TRAINER}
FAILS = "import os\n    if int(os.environ['RANK']) == 1: raise ValueError('boom')"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(n=2) as started:
        yield started


@pytest.mark.parametrize("name", LIBRARIES)
def test_in_a_cell(cluster: Cluster, name: str) -> None:
    cell = LIBRARIES[name]
    works = cell.replace("FAIL", "pass")
    assert cluster.run(works).wait().status == "ok"
    assert cluster.run(works).wait().status == "ok"
    indent = next(line for line in cell.splitlines() if "FAIL" in line).split("FAIL")[0]
    with pytest.raises((ValueError, RuntimeError), match=r"boom|closed by peer|reset by peer"):
        cluster.run(cell.replace("FAIL", FAILS.replace("    if", f"{indent}if"))).wait()
    assert cluster.run(works).wait().status == "ok"


@pytest.mark.parametrize("name", LIBRARIES)
def test_in_a_script(name: str) -> None:
    code = LIBRARIES[name].replace("FAIL", "pass")
    command = [sys.executable, "-m", "ring_notebook.launch.cli", "-np", "2", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_accelerate_on_our_backend(cluster: Cluster) -> None:
    """Where there is a default group, accelerate takes that."""
    works = ACCELERATE.replace("FAIL", "pass").replace("accelerator = ", "ring.process_group()\naccelerator = ")
    for _ in range(2):
        cluster.run(works + "assert torch.distributed.get_backend() == 'ring'\n").wait()
