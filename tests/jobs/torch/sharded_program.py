"""A training whose ranks all write its checkpoints: ``python sharded_program.py KIND FOLDER WHAT``.

WHAT is "write", which makes three steps, the last of which is kept; "read", which resumes; "die", where a rank is
killed while it writes the second one, and "survive", where the others go on. Each rank prints a digest of the whole
weights and moments, and the samples that it has had until then; what resumes also those that are left.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import ring_notebook.torch as ring
from harness.adapted import Adapted

VICTIM = 1
SAMPLES, BATCH = 72, 12


def made(kind: str) -> tuple[Any, Any]:
    torch.manual_seed(3)
    first: nn.Module = nn.Linear(5, 24)
    model: Any = nn.Sequential(Adapted(first, 6) if kind == "adapters" else first, nn.Tanh(), nn.Linear(24, 10))
    if kind == "adapters":
        model.peft_config = {}
    if kind == "tensor":
        ring.process_group()
        mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")
        model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, foreach=False)
    if kind == "tensor":
        return model, optimizer
    prepared: tuple[Any, Any] = ring.prepare(model, optimizer, strategy="fsdp" if "fsdp" in kind else None)
    return prepared


def digest(model: Any, optimizer: Any) -> str:
    sums = hashlib.sha256()
    moments = [one for state in optimizer.state_dict()["state"].values() for one in state.values()]
    for one in [*model.parameters(), *moments]:
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        sums.update(whole.detach().numpy().tobytes())
    return sums.hexdigest()


def killed_while_writing() -> None:
    """Half of the file is there, and then the rank is not."""

    def write(self: Any, plan: Any, planner: Any) -> Any:
        with self.fs.create_stream(f"{self.path}/__{VICTIM}_0.distcp", "wb") as file:
            file.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    FileSystemWriter.write_data = write  # type: ignore[method-assign]


kind, folder, what = sys.argv[1:4]
torch.set_num_threads(1)
ring.init()
job_rank = ring.rank()
model, optimizer = made(kind)
loader = ring.prepare(DataLoader(range(SAMPLES), batch_size=BATCH // ring.size(), shuffle=True))  # type: ignore[arg-type]
saved = ring.checkpoint(
    model, optimizer, loader, folder=folder, every="3 steps", background=kind != "fsdp", resume=what == "read"
)
samples: list[int] = []


def step() -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 5)).square().sum().backward()
    optimizer.step()
    saved.step()


@ring.elastic.run
def survive(state: Any) -> None:
    while state.steps < 8:
        if state.steps == 5 and job_rank == VICTIM:
            killed_while_writing()
        step()
        saved.wait()
        state.steps += 1
        state.commit()


def report() -> None:
    print(json.dumps({"digest": digest(model, optimizer), "steps": saved.steps}), flush=True)  # noqa: T201
    print("samples", json.dumps(samples), flush=True)  # noqa: T201


if what == "read":
    report()
    for number, batch in enumerate(loader):
        samples += batch.tolist()
        if number == 0:
            step()
    print("samples", json.dumps(samples), flush=True)  # noqa: T201
    sys.exit()
if what == "survive":
    survive(ring.elastic.TorchState(model, optimizer, steps=0))
else:
    for number, batch in zip(range(6 if what == "die" else 3), loader, strict=False):
        samples += batch.tolist()
        if number == 5 and job_rank == VICTIM:
            killed_while_writing()
        step()
        saved.wait()
        if number == 2:
            report()
