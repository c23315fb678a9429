"""A training in which one process is killed; a program, run on every rank as ``killed.py WHO WHEN elastic|plain``.

WHO is a rank, "agent" (of the second host) or "supervisor"; WHEN is "start", "collective", "between" or "end".
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

import ring_notebook.torch as hvd

who, when, kind = sys.argv[1:]
me = int(os.environ["RING_RANK"])
killer = {"supervisor": 0, "agent": 2}.get(who) if not who.isdigit() else int(who)


def kill() -> None:
    if who.isdigit():
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)  # until this rank ends with it


def perhaps(moment: str) -> None:
    if (me, when) == (killer, moment):
        kill()


def add(total: float) -> float:
    """A sum over all ranks; in the third step the killer is killed while it waits for another one in it."""
    if total >= 3 * hvd.size() and when == "collective" and hvd.size() == 4:
        if me == killer:
            threading.Timer(0.3, kill).start()
        elif me == (killer + 1) % 4:
            time.sleep(1.0)
    return total + hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


perhaps("start")
hvd.init()
state = hvd.elastic.TorchState(total=0.0)


def train(state: hvd.elastic.TorchState) -> None:
    while state.total < 24:
        if state.total == 12:
            perhaps("between")
        state.total = add(state.total)
        state.commit()


(hvd.elastic.run(train) if kind == "elastic" else train)(state)
hvd.barrier()
perhaps("end")
os.write(1, b"rank %d of 4 ended as one of %d\n" % (me, hvd.size()))
