"""A rank of a job in an allocation: what it sums, and which programs stand above it."""

from __future__ import annotations

import os
import socket
import sys
import time

import psutil
import torch

import ring_notebook.torch as hvd

hvd.init()
total = float(hvd.allreduce(torch.full((100_000,), float(hvd.rank() + 1)), op=hvd.Sum)[0])
above = [parent.name() for parent in psutil.Process().parents()]
print(f"{hvd.rank()} of {hvd.size()} on {socket.gethostname()}: {total}, above {above}", flush=True)  # noqa: T201
if sys.argv[1:] == ["fail"] and hvd.rank() == hvd.size() - 1:
    raise RuntimeError("on purpose")
if sys.argv[1:] == ["die"] and hvd.rank() == hvd.size() - 1:
    os.kill(os.getpid(), 9)
if sys.argv[1:] == ["fail"]:
    hvd.barrier()  # the others learn of it where they wait for the rank that failed
elif sys.argv[1:] == ["train"]:
    while True:
        hvd.allreduce(torch.ones(100_000))
elif sys.argv[1:]:
    time.sleep(600)
