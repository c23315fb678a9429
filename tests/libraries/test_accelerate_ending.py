"""accelerate's training when a rank raises, is killed, stopped or disagrees: no cell hangs, and the next one trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from notebook.endurance.steps_that_end import ENDS, end_and_train
from ring_notebook.notebook.cluster.cluster import Cluster

pytest.importorskip("accelerate", reason="lives in an environment of its own: make test-libraries")
TIMES = {"ring": 20, "gloo": 5}
TRAINING = """
import os, threading, time
import torch, torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
{group}
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
assert dist.get_backend() == "{backend}"
rank, size = accelerator.process_index, accelerator.num_processes
torch.manual_seed(0)
inputs = torch.randn(36, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, data)
def step(ends=False):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        if ends: END
        accelerator.backward(loss)
        optimizer.step()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(n=3) as started:
        # An interrupt of the import would leave half of it, as in any Python.
        started.run("import accelerate, torch.utils.data").wait()
        yield started


@pytest.mark.parametrize("backend", ["ring", "gloo"])
@pytest.mark.parametrize("end", ENDS)
def test_nobody_hangs_and_the_next_cell_trains(cluster: Cluster, backend: str, end: str) -> None:
    """On our backend, and on Gloo, which accelerate takes by itself."""
    training = TRAINING.format(backend=backend, group="ring.process_group()" if backend == "ring" else "")
    for number in range(TIMES[backend]):
        end_and_train(cluster, training, end, number)
