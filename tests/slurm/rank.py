"""A rank of a job in an allocation: what it sums, which programs stand above it, and what it does then.

``rank.py fail|die|sleep|train|elastic``, or before the sum ``start HOST|first HOST``: ranks of this host do not begin,
or the others do not begin their first sum. They say ``begun`` where somebody may take a host away.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import psutil
import torch

import ring_notebook.torch as hvd
from ring_notebook.api.object_state import ObjectState

how, where = [*sys.argv[1:], "", ""][:2]
here = socket.gethostname()


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if how == "start":
    say("begun")
    time.sleep(600 if here == where else 0)
hvd.init()
if how == "first":
    say("begun")
    time.sleep(0 if here == where else 600)
total = float(hvd.allreduce(torch.full((100_000,), float(hvd.rank() + 1)), op=hvd.Sum)[0])
above = [parent.name() for parent in psutil.Process().parents()]
say(f"{hvd.rank()} of {hvd.size()} on {here}: {total}, above {above}")
if how == "fail" and hvd.rank() == hvd.size() - 1:
    raise RuntimeError("on purpose")
if how == "die" and hvd.rank() == hvd.size() - 1:
    os.kill(os.getpid(), 9)
if how == "fail":
    hvd.barrier()  # the others learn of it where they wait for the rank that failed
elif how == "train":
    while True:
        hvd.allreduce(torch.ones(100_000))
elif how == "elastic":

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        """Until the ranks have become fewer, and then some steps more."""
        while state.steps < 50:
            hvd.allreduce(torch.ones(100_000))
            state.steps += hvd.size() < 4
            state.commit()

    train(ObjectState(steps=0))
    say(f"ended on {here} as one of {hvd.size()}")
elif how:
    time.sleep(600)
