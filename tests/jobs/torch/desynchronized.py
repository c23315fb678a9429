"""Trainings on Gloo in which rank 1 parts from rank 0 in its third step, as ``CASE`` says; "none" in no way.

A program for ``ringrun``, and the text of a cell.
"""

import os
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

warnings.simplefilter("ignore")  # torch's own, of its newer parts
CASE = os.environ.get("CASE", "none")
STEPS, PARTS_AT = 4, 2


def parts(step: int) -> bool:
    return step == PARTS_AT and dist.get_rank() == 1


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def sharded() -> None:
    """FSDP2."""
    narrow = CASE == "another dtype" and dist.get_rank() == 1
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if narrow else torch.float32))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = torch.zeros(())
        if not (CASE == "skips a forward" and parts(step)):
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if CASE == "is killed" and parts(step):
            os.kill(os.getpid(), signal.SIGKILL)
        if CASE == "leaves the loop" and parts(step):
            break
        mean = loss.detach()
        dist.all_reduce(mean)
        note(step, mean / dist.get_world_size())


def tensor_parallel() -> None:
    """Matrices divided over the ranks by DTensor."""
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        torch.manual_seed(step)
        rows = 4 if CASE == "another shape" and parts(step) else 8
        if CASE == "another collective" and parts(step):
            dist.broadcast(torch.ones(3), 1)
        if CASE == "sleeps" and parts(step):
            time.sleep(1000)
        loss = model(torch.randn(rows, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(step, loss)


def two_groups() -> None:
    """Each rank has a part in two groups, as of two dimensions of a mesh."""
    groups = [dist.new_group(), dist.new_group()]
    for step in range(STEPS):
        turned = CASE == "another order of two groups" and parts(step)
        values = torch.ones(2)
        for group in reversed(groups) if turned else groups:
            dist.all_reduce(values, group=group)
        note(step, values.sum())


def pipeline() -> None:
    """Two stages and four microbatches, sent and received without waiting."""
    rank, microbatches = dist.get_rank(), 4
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(step)
        if rank == 0:
            outputs = [stage(part) for part in torch.randn(microbatches, 8, 16)]
            gradients = [torch.empty(8, 16) for _ in outputs]
            sends = [dist.isend(output.detach(), 1) for output in outputs]
            for output, gradient in zip(outputs, gradients, strict=True):
                dist.recv(gradient, 1)
                output.backward(gradient)
            for one in sends:
                one.wait()
        else:
            inputs = [torch.empty(8, 16, requires_grad=True) for _ in range(microbatches)]
            receives = [dist.irecv(one.detach(), 0) for one in inputs]
            for number, (one, receive) in enumerate(zip(inputs, receives, strict=True)):
                receive.wait()
                if CASE == "raises" and parts(step):
                    raise ValueError("boom")
                loss = stage(one).square().mean()
                loss.backward()
                if not (CASE == "one microbatch less" and parts(step) and number == microbatches - 1):
                    dist.send(one.grad, 0)
            note(step, loss)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()


LOSSES: list[float] = []


def note(step: int, loss: torch.Tensor) -> None:
    LOSSES.append(loss.item())


TRAININGS = {
    "skips a forward": sharded,
    "another dtype": sharded,
    "is killed": sharded,
    "leaves the loop": sharded,
    "another collective": tensor_parallel,
    "another shape": tensor_parallel,
    "sleeps": tensor_parallel,
    "another order of two groups": two_groups,
    "raises": pipeline,
    "one microbatch less": pipeline,
}

dist.init_process_group("gloo")
for training in [TRAININGS[CASE]] if CASE in TRAININGS else dict.fromkeys(TRAININGS.values()):
    training()
if CASE == "none":
    sys.stdout.write(f"losses {LOSSES}\n")
