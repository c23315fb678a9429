"""Runs programs of libraries, and scripts of accelerate, each on a new default group: a rank's program."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ring_notebook.torch as ring
from ring_notebook.torch.process_group.default_group import end_groups, forget_accelerate

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from libraries.cpu_devices import Wrapped
from libraries.programs import LEFT_OUT, PEERS, SCRIPTS

__all__ = ["main"]


def run(name: str) -> None:
    """What ``name`` stands for in `PEERS` or `SCRIPTS`."""
    if name.startswith("accelerate's"):
        torch.nn.parallel.DistributedDataParallel = Wrapped  # type: ignore[misc]  # they name GPUs to it
    if name in PEERS:
        exec(compile(PEERS[name].replace("FAIL", "pass"), name, "exec"), {"__name__": "__main__"})
    for module, function, arguments in SCRIPTS.get(name, ()):
        path = f"accelerate.test_utils.scripts.{module}"
        for left_out in LEFT_OUT.get(module, ()):
            setattr(importlib.import_module(path), left_out, lambda: None)
        getattr(importlib.import_module(path), function)(*arguments)
        forget_accelerate_alone()


def forget_accelerate_alone() -> None:
    """What accelerate keeps for the life of a process; the next of its tests finds the default group again."""
    state = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def main(backend: str, passed: str, *names: str) -> None:
    """Run each of ``names``, and write the line of one that has passed on all ranks to the file ``passed``."""
    ring.init()
    for name in names:
        ring.process_group(backend)
        run(name)
        assert not dist.is_initialized() or dist.get_backend() == backend, dist.get_backend()
        ring.barrier()
        if ring.rank() == 0:
            with open(passed, "a") as file:
                print(name, file=file)
        forget_accelerate()
        end_groups()


if __name__ == "__main__":
    main(*sys.argv[1:])
