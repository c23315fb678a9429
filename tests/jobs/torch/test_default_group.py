"""The default group of one cell, and that of the next."""

from __future__ import annotations

import subprocess
import sys

TWICE = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ring_notebook.torch as ring

for backend in ("ring", "gloo"):
    ring.init()
    ring.process_group(backend)
    DistributedDataParallel(torch.nn.Linear(2, 1))  # imports what keeps the default group of that moment
    from torch.distributed.nn import functional
    assert functional.all_reduce(torch.ones(2)).tolist() == [1, 1]
    ring.shutdown()
"""


def test_functions_of_torch_take_that_of_this_cell() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TWICE], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
