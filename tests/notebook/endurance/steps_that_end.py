"""Cells whose parallel step ends badly on one rank, in every kind of training, and cells that train afterwards.

``END`` stands where the rank ends: in ``step`` of each training a rank leaves the others in another operation.
"""

from __future__ import annotations

import random
import time

from harness.waiting import until
from ring_notebook.errors import ClusterError, CollectiveAborted, CollectiveMismatch
from ring_notebook.notebook.cluster.cluster import Cluster

__all__ = ["ENDS", "TRAININGS", "end_and_train"]

_BEGIN = """
import os, random, threading, time
import torch, torch.distributed as dist
from torch import nn
ring.process_group()
torch.manual_seed(0)
torch.set_num_threads(1)
rank, size = dist.get_rank(), dist.get_world_size()
layers = [nn.Linear(8, 4000), nn.BatchNorm1d(4000), nn.Linear(4000, 4)]
"""
_DDP = _BEGIN + "model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))\n"
_RUNS = "def step(ends=False):\n    if ends: END\n"
TRAININGS = {
    # Buffers are broadcast there.
    "ddp_forward": f"{_DDP}{_RUNS}    model(torch.ones(4, 8)).sum().backward()\n",
    "ddp_backward": f"""{_DDP}
def step(ends=False):
    loss = model(torch.ones(4, 8)).sum()
    if ends: END
    loss.backward()
""",
    "fsdp2": f"""{_BEGIN}
from torch.distributed.fsdp import fully_shard
model = nn.Sequential(*layers)
for layer in model:
    fully_shard(layer)
fully_shard(model)
def step(ends=False):
    loss = model(torch.ones(4, 8)).sum()
    if ends: END
    loss.backward()
""",
    "pipeline": f"""{_BEGIN}
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
schedule = ScheduleGPipe(PipelineStage(nn.Tanh(), rank, size, torch.device("cpu")), 4)
inputs = torch.ones(8, 20_000)
def step(ends=False):
    if ends: END
    schedule.step(inputs) if rank == 0 else schedule.step()
""",
}
_KILLED = "threading.Timer({moment} / 4, os.kill, (os.getpid(), 9)).start()"
ENDS: dict[str, tuple[str, tuple[type[BaseException], ...]]] = {
    "raises": ("raise ValueError('boom')", (ValueError,)),
    "is_killed": (_KILLED, (ClusterError,)),
    "is_interrupted": ("pass", (KeyboardInterrupt,)),
    # The message is for a stage of a pipeline, which waits for one of another size.
    "disagrees": (
        "dist.isend(torch.ones(3), 2); dist.all_reduce(torch.ones(7))",
        (CollectiveMismatch, CollectiveAborted),
    ),
}
"""What rank 1 of three does, and what the run ends with."""


def end_and_train(cluster: Cluster, training: str, end: str, number: int) -> None:
    """Run ``training`` until rank 1 ends as ``end`` says, at a moment that ``number`` gives; then a whole one.

    Fails where a run hangs.
    """
    text, errors = ENDS[end]
    moment = random.Random(number).random() * 0.02
    cell = training.replace("END", text.format(moment=moment))
    cell += f"\nstep()\ntime.sleep({moment} * (rank == 1))\nwhile True: step(rank == 1)\n"
    run = cluster.run(cell)
    if end == "is_interrupted":
        until(lambda: run.done or [status.line > 0 for status in run.log.statuses().values()] == [True] * 3)
        time.sleep(10 * moment)
        run.stop()
    until(lambda: run.done)
    assert isinstance(run.error, (*errors, ClusterError) if run.ended_ranks else errors), run.error
    if end == "is_killed":
        until(lambda: 1 not in cluster.living)
    if end == "is_killed" or run.ended_ranks:  # those wait in Gloo
        cluster.heal()
    again = cluster.run(f"{training.replace('END', 'pass')}\nfor _ in range(3): step()\n")
    until(lambda: again.done)
    assert again.status == "ok", again.error
