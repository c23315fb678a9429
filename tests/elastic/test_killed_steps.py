"""A rank of torch.distributed that is killed at any moment of a step: the job ends soon and says which one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.programs import ringrun

PROGRAM = """
import os, random, sys, threading, warnings
warnings.simplefilter("ignore")
import ring_notebook.torch as ring
from ranks.process_group import test_endings as endings

ring.init()
ring.process_group()
step = getattr(endings, sys.argv[1])()
step()
if ring.rank() == 1:
    moment = random.Random(int(sys.argv[2])).random() * 0.05
    threading.Timer(moment, os.kill, (os.getpid(), 9)).start()
while True:
    step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ddp", "fsdp2", "pipeline"])
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_is_killed(place: str, seed: int) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = ringrun("-np", "3", "python", "-c", PROGRAM, place, str(seed), env=env, timeout=270)
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert "SIGKILL" in done.stderr or "signal 9" in done.stderr, done.stderr
