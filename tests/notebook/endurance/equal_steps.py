"""One training that is interrupted, fails and loses ranks again and again: all ranks have made the same steps.

Each step takes the batch whose number is the count of steps made before it, a part for each rank that makes it, so what
a single process does with the same batches in the same order is known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from harness.waiting import LIMIT, until
from ring_notebook.errors import ClusterError, CollectiveAborted, CollectiveMismatch
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.run import Run
from ring_notebook.torch.compression import Compression

__all__ = ["COMPRESSED", "ENDS", "MODEL", "TRAININGS", "Training"]

COMPRESSED = ("int8", "powersgd(2)", "auto")
"""Trainings with less to send between hosts; on one host they are as without."""

MODEL = """
import os, random, threading, time
import torch
from torch import nn
torch.set_num_threads(1)
rank, size = ring.rank(), ring.size()
dtype = torch.float64

def batch(number, rank):
    random = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(6, 8, generator=random, dtype=dtype)
    return x, x.cumsum(1)[:, ::2] + 0.1 * x.square()[:, ::2]

def make():
    torch.manual_seed(0)
    return nn.Linear(8, 4, dtype=dtype)  # one that loses rounding errors again

def loss_of(number, rank):
    x, y = batch(number, rank)
    return nn.functional.mse_loss(model(x), y)

def note(optimizer):
    optimizer.register_step_post_hook(lambda *_: made.append(ring.size()))

def disagree():
    given = torch.distributed.is_initialized()
    torch.distributed.all_reduce(torch.ones(7)) if given else ring.allreduce(torch.ones(7))

def agree():
    made[:] = max(ring.allgather_object(made), key=len)
"""
_STEP = """
def step():
    optimizer.zero_grad()
    loss = loss_of(len(made), rank)
    HERE
    loss.backward()
    HERE
    optimizer.step()
"""
_SGD = "torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)"
_ADAM = "torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)"
_PREPARE = """
if "made" not in globals():
    made, model = [], make()
    optimizer = {optimizer}
    note(optimizer)
model, optimizer = ring.prepare(model, optimizer{options})
agree()
"""


def _prepared(optimizer: str, step: str = _STEP, options: str = "") -> tuple[str, str]:
    return _PREPARE.format(optimizer=optimizer, options=options), step


def _compressed(name: str) -> tuple[str, str]:
    """With gradients that are compressed between hosts: as many as that takes, of float32."""
    wide = """
dtype = torch.float32
draw = batch
def batch(number, rank):
    x, y = draw(number, rank)
    return x, y.repeat(1, 60)
def make():
    torch.manual_seed(0)
    return nn.Linear(8, 240)
"""
    before, step = _prepared(_SGD, options=f", compression=ring.Compression.{name}")
    return wide + before, step


TRAININGS: dict[str, tuple[str, str]] = {
    "sgd": _prepared(_SGD),
    "adam": _prepared(_ADAM),
    "accumulate": _prepared(
        _SGD,
        """
def step():
    for part in range(3):
        optimizer.zero_grad()
        x, y = batch(len(made), rank)
        loss = nn.functional.mse_loss(model(x[part::3]), y[part::3])
        HERE
        loss.backward()
        HERE
        optimizer.step()
""",
        ", accumulate=3",
    ),
    "synchronize": _prepared(
        _SGD,
        """
def step():
    optimizer.zero_grad()
    loss_of(len(made), rank).backward()
    HERE
    optimizer.synchronize()
    HERE
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    with optimizer.skip_synchronize():
        optimizer.step()
""",
    ),
    "scaler": _prepared(
        _SGD,
        """
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
def step():
    optimizer.zero_grad()
    loss = loss_of(len(made), rank)
    HERE
    scaler.scale(loss).backward()
    HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    # With history_size=5 and a new batch for each step, rounding errors grow from 1e-14 to 1e-2 within 200 steps.
    "lbfgs": _prepared(
        "torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=2)",
        """
def step():
    def closure():
        optimizer.zero_grad()
        loss = loss_of(len(made), rank)
        HERE
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    ),
    # After a backward pass that has raised torch needs a new wrapper.
    "ddp": _prepared(
        _SGD, f"model, optimizer = ring.prepare(model, optimizer, strategy='ddp')\n{_STEP}", ', strategy="ddp"'
    ),
    "adasum": _prepared(_SGD, options=", op=ring.Adasum"),
    **{name: _compressed(name) for name in COMPRESSED},
}
"""What makes model and optimizer, unless they are there, and what defines a step. Ranks end at ``HERE``."""

_LOOP = """
ends = random.Random(SEED)
who, when, place = ends.randrange(size), ends.randrange(3, 40), ends.randrange(2)
begun = len(made)
def here():
    global places
    places += 1
    if rank == who and END: raise ValueError("boom")
places = 0
while len(made) - begun < STEPS: step()
"""
_FIND = """
kept = optimizer.state_dict()
state = {f"{key} {name}": value for key, entry in kept["state"].items() for name, value in entry.items()}
found = {
    "made": list(made),
    "options": [{key: value for key, value in group.items() if key != "params"} for group in kept["param_groups"]],
    "weights": [p.detach().clone() for p in model.parameters()],
    "state": {
        key: torch.as_tensor(value) for key, value in state.items()
        if isinstance(value, (torch.Tensor, int, float))
    },
}
"""
ENDS: dict[str, tuple[str, tuple[type[BaseException], ...]]] = {
    "is interrupted": ("False", (KeyboardInterrupt,)),
    "raises": ("places > when", (ValueError,)),
    "is killed": ("", ()),
    "disagrees": ("places > when and disagree()", (CollectiveMismatch, CollectiveAborted)),
}
"""The condition on which a rank raises, and what the run ends with; what kills a rank is in `Training.lose`."""


class Training:
    """One of `TRAININGS` on a cluster."""

    def __init__(self, cluster: Cluster, name: str, seed: int = 0) -> None:
        self.cluster, self.name = cluster, name
        self.ranks: Sequence[int] = range(2 if name == "adasum" else cluster.n)  # it takes a power of two
        """Those that train."""
        self.random = random.Random(seed)
        self.prepare()

    def prepare(self) -> None:
        """Make what a rank lacks, on all ranks."""
        self.cluster.run(MODEL + TRAININGS[self.name][0], ranks=self.ranks).wait()

    def run(self, end: str = "", steps: int = 10**9) -> str:
        """Train until ``end`` happens at a moment drawn by the seed, or for so many steps; what the ranks printed.

        A rank that is killed is healed.
        """
        if end == "is killed":
            self.lose(self.random.choice(self.ranks))
            self.cluster.heal()
            self.prepare()
            return ""
        condition, errors = ENDS[end] if end else ("False", ())
        run = self._begin(condition, steps)
        if end == "is interrupted":
            begun = [True] * len(self.ranks)
            until(lambda: run.done or [status.line > 0 for status in run.log.statuses().values()] == begun)
            time.sleep(self.random.random() * 0.1)
            run.stop()
        self._end(run, LIMIT)
        if errors:
            assert isinstance(run.error, errors), run.error
        else:
            assert run.status == "ok", run.error
        return "".join(piece.text for piece in run.log.view().output)

    def lose(self, rank: int, kills: str = "os.kill(os.getpid(), 9)", limit: float = LIMIT) -> None:
        """Train until this rank executes ``kills``, which the cluster notices within ``limit`` seconds."""
        moment = self.random.random() * 0.1
        before = f"if rank == {self.ranks.index(rank)}: threading.Timer({moment}, lambda: {kills}).start()"
        living = len(self.cluster.living)
        run = self._begin("False", 10**9, before)
        self._end(run, limit)
        assert isinstance(run.error, ClusterError), run.error
        until(lambda: len(self.cluster.living) < living)

    def _begin(self, condition: str, steps: int, before: str = "") -> Run:
        loop = _LOOP.replace("END", condition).replace("SEED", str(self.random.random())).replace("STEPS", str(steps))
        body = TRAININGS[self.name][1].replace("HERE", "here()")
        return self.cluster.run(f"{body}\n{before}\n{loop}", ranks=self.ranks)

    @staticmethod
    def _end(run: Run, limit: float) -> None:
        until(lambda: run.done, limit, run.describe)

    def states(self) -> list[dict[str, Any]]:
        """Of each rank: the steps it has made, its weights and the state of its optimizer."""
        self.cluster.run(_FIND, ranks=self.ranks).wait()
        return [self.cluster.pull("found", rank) for rank in self.ranks]

    def check(self) -> int:
        """All ranks have made the same steps, and end where one process ends with the same batches; how many steps."""
        states = self.states()
        first = states[0]
        counts = [len(state["made"]) for state in states]
        assert counts == counts[:1] * len(counts), f"steps made, by rank: {counts}"
        for rank, state in enumerate(states[1:], 1):
            assert state["options"] == first["options"]
            for a, b in zip(state["weights"], first["weights"], strict=True):
                assert torch.equal(a, b), f"rank {rank} has other weights after {len(first['made'])} steps"
            if self.name != "adasum":  # each rank has its own
                assert state["state"].keys() == first["state"].keys()
                for key, value in state["state"].items():
                    assert torch.equal(value, first["state"][key]), f"rank {rank} has another {key}"
        return len(first["made"])

    def check_against_one_process(self) -> None:
        """The weights are those of one process that was given the same batches in the same order of steps."""
        if self.name in ("adasum", "powersgd(2)"):  # no process does the same alone
            return
        states = self.states()
        sizes = states[0]["made"]
        alone: dict[str, Any] = {}

        class Ring:
            rank = staticmethod(lambda: 0)
            size = staticmethod(lambda: 1)
            prepare = staticmethod(lambda model, optimizer, **_: (model, optimizer))
            allgather_object = staticmethod(lambda value: [value])
            Compression = Compression

        alone["ring"] = Ring
        exec(MODEL + TRAININGS[self.name][0], alone)

        def loss_of(number: int, _: int) -> Any:
            pairs = [alone["batch"](number, rank) for rank in range(sizes[number])]
            x, y = (torch.cat(part) for part in zip(*pairs, strict=True))
            return torch.nn.functional.mse_loss(alone["model"](x), y)

        alone["loss_of"] = loss_of
        step = TRAININGS["sgd"][1] if self.name in ("accumulate", "synchronize", "scaler") else TRAININGS[self.name][1]
        exec(step.replace("HERE", "pass"), alone)
        threads = torch.get_num_threads()
        for _ in sizes:
            alone["step"]()
        torch.set_num_threads(threads)
        for mine, theirs in zip(alone["model"].parameters(), states[0]["weights"], strict=True):
            error = 0.01 if theirs.dtype == torch.float32 else 1e-4  # of what is rounded once for each end
            torch.testing.assert_close(theirs, mine.detach(), rtol=1e-3, atol=error)
