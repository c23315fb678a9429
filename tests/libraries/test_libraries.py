"""Libraries over torch.distributed, as their documentation shows them: in a cell, again, after a failure, in a script.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ring_notebook.notebook.cluster.cluster import Cluster

LIMIT = 300
"""Seconds for a script, on a busy machine: to import Lightning alone takes seconds."""
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
# A language model of bytes, on Python's own sources.
HUGGING_FACE = """
import argparse, inspect, tempfile, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

text = torch.tensor(list(inspect.getsource(argparse).encode())[: 32 * 33]).view(32, 33)
data = [{"input_ids": row, "labels": row} for row in text]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=33, n_embd=16, n_layer=1, n_head=2))

class Own(Trainer):
    def compute_loss(self, *args, **options):
        FAIL
        return super().compute_loss(*args, **options)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-2, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )
    assert arguments.world_size == 2, arguments.world_size
    trainer = Own(model=model, args=arguments, train_dataset=data)
    trainer.train()
assert trainer.state.global_step == 4
weights = trainer.accelerator.gather(model.transformer.wte.weight.detach().flatten()).view(2, -1)
assert torch.equal(weights[0], weights[1])
"""
CHECKPOINT = (
    DATA
    + """
import os, shutil, torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group("ring")

def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def state(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}

model, optimizer = made(0)
model(inputs).sum().backward()
optimizer.step()
folder = os.environ["CHECKPOINT"]
for _ in range(1):
    FAIL
checkpoint.save(state(model, optimizer), checkpoint_id=folder)
other, its_optimizer = made(1)
loaded = state(other, its_optimizer)
checkpoint.load(loaded, checkpoint_id=folder)
set_state_dict(other, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
for one, two in zip(model.parameters(), other.parameters()):
    assert torch.equal(one.full_tensor(), two.full_tensor())
"""
)
pytest.importorskip("accelerate", reason="lives in an environment of its own: make test-libraries")
pytest.importorskip("lightning", reason="lives in an environment of its own: make test-libraries")
pytest.importorskip("transformers", reason="lives in an environment of its own: make test-libraries")
LIBRARIES = {
    "accelerate": ACCELERATE,
    "fabric": FABRIC,
    "trainer": TRAINER,
    "hugging_face": HUGGING_FACE,
    "checkpoint": CHECKPOINT,
}
STARTS = [(name, ["ring_notebook.launch.cli", "--no-prefix", "-np", "2", sys.executable]) for name in LIBRARIES]
STARTS.append(("checkpoint", ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]))
FAILS = "import os\n    if int(os.environ['RANK']) == 1: raise ValueError('boom')"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CHECKPOINT", str(tmp_path_factory.mktemp("checkpoint")))
        with Cluster(n=2) as started:
            yield started


@pytest.mark.parametrize("name", LIBRARIES)
def test_in_a_cell(cluster: Cluster, name: str) -> None:
    cell = LIBRARIES[name]
    works = cell.replace("FAIL", "pass")
    assert cluster.run(works).wait().status == "ok"
    assert cluster.run(works).wait().status == "ok"
    indent = next(line for line in cell.splitlines() if "FAIL" in line).split("FAIL")[0]
    with pytest.raises(ValueError, match="boom"):
        cluster.run(cell.replace("FAIL", FAILS.replace("    if", f"{indent}if"))).wait()
    assert cluster.run(works).wait().status == "ok"


@pytest.mark.parametrize(("name", "starter"), STARTS, ids=lambda value: value if isinstance(value, str) else value[0])
def test_in_a_script(name: str, starter: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LIBRARIES[name].replace("FAIL", "pass"))
    command = [sys.executable, "-m", *starter, str(script)]
    env = os.environ | {"CHECKPOINT": str(tmp_path / "saved")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.parametrize("name", ["accelerate", "fabric", "trainer", "hugging_face"])
def test_in_a_batch_script(name: str, tmp_path: Path) -> None:
    """Slurm's batch script is task 0 of as many as the job has, and that is not what its ranks are."""
    script = tmp_path / "train.py"
    script.write_text(LIBRARIES[name].replace("FAIL", "pass"))
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    hosts = {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2"}
    command = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", sys.executable, str(script)]
    env = os.environ | batch | task | hosts
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)
    assert done.returncode == 0, done.stderr[-5000:]


def test_accelerate_on_our_backend(cluster: Cluster) -> None:
    """Where there is a default group, accelerate takes that."""
    works = ACCELERATE.replace("FAIL", "pass").replace("accelerator = ", "ring.process_group()\naccelerator = ")
    for _ in range(2):
        cluster.run(works + "assert torch.distributed.get_backend() == 'ring'\n").wait()


def test_hugging_face_on_fewer_ranks(cluster: Cluster) -> None:
    """What accelerate below it keeps for the life of a process is that of this run."""
    trains = HUGGING_FACE.split("assert trainer.state")[0].replace("FAIL", "pass")
    cluster.run(trains).wait()
    cluster.run(trains.replace("world_size == 2", "world_size == 1"), n=1).wait()
