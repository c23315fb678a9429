"""Ranks of one parent, with torchrun's variables, find each other; others do not find them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ring_notebook.rank.agent_rendezvous import AgentRendezvous

PROGRAM = """
import os, sys
from ring_notebook.rank.agent_rendezvous import AgentRendezvous
found = AgentRendezvous.take()
assert AgentRendezvous.take() is None
if found.rank == 0:
    found.send_card([1, 2, 3])
else:
    assert found.receive_card() == [1, 2, 3]
LEAVE
found.wait_for_all()
print("together")
"""


def started(rank: int, size: int, program: str, **more: str) -> subprocess.Popen[str]:
    env = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "a job",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **more,
    }
    return subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    said = [rank.communicate(timeout=100) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


def test_ranks_of_two_jobs() -> None:
    """The second is a restart of the first, which has not quite ended."""
    program = PROGRAM.replace("LEAVE", "")
    jobs = [[started(rank, 3, program, TORCHELASTIC_RESTART_COUNT=count) for rank in range(3)] for count in ("0", "1")]
    for job in jobs:
        assert [(code, said) for code, said, _ in ended(job)] == [(0, "together\n")] * 3


def test_a_rank_that_exits() -> None:
    program = PROGRAM.replace("LEAVE", "if found.rank == 1: sys.exit(7)")
    codes, _, errors = zip(*ended([started(rank, 3, program) for rank in range(3)]), strict=True)
    assert codes == (1, 7, 1)
    assert "rank 0 failed to initialize under torchrun: another rank that torchrun started has exited" in errors[0]
    assert "rank 2 failed to initialize under torchrun: another rank" in errors[2]


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TORCHELASTIC_RUN_ID": "a", "GROUP_WORLD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "4"},
        {
            "TORCHELASTIC_RUN_ID": "a",
            "GROUP_WORLD_SIZE": "1",
            "RANK": "0",
            "WORLD_SIZE": "2",
            "RING_TORCHRUN_RANK": "9",
        },
    ],
    ids=["not of torchrun", "several hosts", "a child"],
)
def test_no_rendezvous(env: dict[str, str]) -> None:
    assert AgentRendezvous.take(env) is None


def test_a_script(tmp_path: Path) -> None:
    """`torchrun --standalone train.py`, where the script says backend "ring" and nothing else of ours."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('ring')\n"
        "tensor = torch.ones(1)\n"
        "dist.all_reduce(tensor)\n"
        "assert tensor.item() == dist.get_world_size() == 2\n"
        "if dist.get_rank() == 1: raise ValueError('boom')\n"
        "dist.barrier()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
