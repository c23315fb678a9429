"""An elastic training some of whose ranks die; each rank that reaches the end says what became of it.

``python training.py VICTIMS WHEN HOW``: the ranks of VICTIMS ("0,3") end by HOW (a signal's name, "exit",
"leave" with a code of 0, "raise", "agent": that of their host, "cut": the link of their host) at the moment WHEN:
"step" (in the 8th, after two commits of three steps each), "commit" (while the others make the second one), or once
another rank has died in step 8 "restore", "roll call", "open", "reset" and "sync". A fourth argument names a
compression of a model that is large enough for it.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import time

import torch

import ring_notebook.torch as hvd
from ring_notebook.analysis import time_limits
from ring_notebook.core import world
from ring_notebook.rank.rendezvous import Rendezvous

FIRST_TO_DIE = 1
"""Whose death in step 8 makes the moments after it."""

victims = [int(rank) for rank in sys.argv[1].split(",")]
when, how = sys.argv[2:4]
compression = getattr(hvd.Compression, sys.argv[4]) if len(sys.argv) > 4 else hvd.Compression.none
torch.set_num_threads(1)
if how == "cut":
    time_limits.SILENCE = 5
hvd.init()
job_rank = hvd.rank()
torch.manual_seed(job_rank)  # sync makes the models equal
model = torch.nn.Linear(5, 2 if compression is hvd.Compression.none else 240)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
data = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
sampler = hvd.elastic.ElasticSampler(data, seed=3)
even = hvd.add_process_set(range(0, hvd.size(), 2))
starts: list[tuple[int, int]] = []
sums: list[float] = []
resets: list[int] = []


def end() -> None:
    if how == "raise":
        raise ValueError("a bug of this rank")
    if how == "exit":
        os._exit(3)
    if how == "leave":
        sys.exit(0)
    if how in ("agent", "cut"):
        if how == "agent":
            from hosts.killed import kill

            kill("agent", os.getpid())
        else:
            subprocess.run(["ip", "link", "set", "link0", "down"], check=True)
        time.sleep(100)  # until this rank ends with it
    os.kill(os.getpid(), signal.Signals[how])


def perhaps(moment: str) -> None:
    if moment == when and job_rank in victims:
        end()
    if moment == "step" and when not in ("step", "commit") and job_rank == FIRST_TO_DIE:
        os.kill(os.getpid(), signal.SIGKILL)


class State(hvd.elastic.TorchState):
    """One that ends where it is told to."""

    def restore(self) -> None:
        perhaps("restore")
        super().restore()

    def check_host_updates(self) -> None:
        if self.batch == 6 and not resets:
            perhaps("commit")
        super().check_host_updates()

    def sync(self) -> None:
        if resets:
            perhaps("sync")
        super().sync()


def on_reset() -> None:
    resets.append(hvd.size())
    perhaps("reset")
    optimizer.param_groups[0]["lr"] = 0.01 * hvd.size()


@hvd.elastic.run
def train(state):
    starts.append((hvd.size(), state.batch))
    for index in sampler:
        if state.batch == 7:
            perhaps("step")
        optimizer.zero_grad()
        (model(data[index]) - 1.0).square().sum().backward()
        optimizer.step()
        if even.included():
            sums.append(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=even).item() - even.size())
        state.seen = state.seen + hvd.allgather_object(index)
        state.batch += 1
        sampler.record_batch(0, 1)
        if state.batch % 3 == 0:
            state.commit()
    return "trained"


state = State(model, optimizer, sampler=sampler, batch=0, seen=[])
state.register_reset_callbacks([on_reset])
call_roll, open_generation = Rendezvous.assemble, world._open


def assemble(*arguments):
    if starts:
        perhaps("roll call")
    return call_roll(*arguments)


def opened(*arguments):
    if starts:
        perhaps("open")
    return open_generation(*arguments)


Rendezvous.assemble, world._open = assemble, opened
returned = train(state)
hvd.check(model, optimizer)
report = {
    "job_rank": job_rank,
    "rank": hvd.rank(),
    "local_size": hvd.local_size(),
    "returned": returned,
    "starts": starts,
    "seen": state.seen,
    "even": even.ranks,
    "sums": sorted(set(sums)),
    # A line that is longer than a pipe takes at once may have that of another rank in it.
    "weight": [[round(one, 7) for one in row] for row in model.weight[:60].tolist()],
}
# After everything else that ends with the interpreter: none of that may hang without the dead.
atexit.register(lambda: os.write(1, (json.dumps(report) + "\n").encode()))
