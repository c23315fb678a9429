"""The default group of one cell, and that of the next."""

from __future__ import annotations

import re
import sys

import pytest

from harness.programs import RINGRUN, ran

pytestmark = pytest.mark.usefixtures("forked_ranks")
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


@pytest.mark.slow
def test_functions_of_torch_take_that_of_this_cell() -> None:
    done = ran([sys.executable, "-W", "ignore", "-c", TWICE])
    assert done.returncode == 0, done.stderr


WAIT_FOR_EACH_OTHER = """
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
if rank == 2:
    raise ValueError("boom")
dist.recv(torch.ones(1), 1 - rank)
"""


@pytest.mark.slow
def test_a_script_whose_ranks_stay_in_gloo() -> None:
    """C++ that looks at no signal: the supervisor ends them, and the job fails as the rank did that raised."""
    ringrun = [*RINGRUN, "-np", "3"]
    done = ran([*ringrun, sys.executable, "-c", WAIT_FOR_EACH_OTHER])
    assert done.returncode == 1, done.stderr
    assert "ValueError: boom" in done.stderr
    assert re.search(r"rank 2 on \S+ failed first: exit code 1", done.stderr.splitlines()[-1]), done.stderr
