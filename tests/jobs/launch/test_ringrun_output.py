"""What ringrun prints of its ranks, with real jobs: whose line it is, the cause last, a file for each rank."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran

SCRIPT = """
import sys, time
from ring_notebook.api.basics import init, rank
from ring_notebook.api.basics import barrier
init()
print("out", rank(), flush=True)
barrier()
if rank() == 1:
    raise ValueError("batch 7")
barrier()
"""


def ringrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran([*RINGRUN, *arguments])


@pytest.mark.parametrize(
    "how", [[], ["--elastic", "--min-np", "2"], ["--mpi-args=-genv UNUSED 1"]], ids=["ours", "elastic", "mpiexec"]
)
def test_a_job_that_fails(how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines have their ranks, tracebacks are whole, and the cause is the last thing said; each rank has its files."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    done = ringrun("-np", "2", "--output-dir", "out", *how, "train.py")
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[1] out 1"]
    said = done.stderr.splitlines()
    assert said[-1].startswith("ringrun: rank 1 on ")
    assert said[-1].endswith("failed first: exit code 1, ValueError: batch 7 at train.py:9")
    whose = [line[:4] for line in said if line.startswith("[")]
    assert len([1 for one, two in pairwise(whose) if one != two]) == 1, "tracebacks are mixed"
    assert (tmp_path / "out/rank.1/stdout").read_text() == "out 1\n"
    assert "ValueError: batch 7" in (tmp_path / "out/rank.1/stderr").read_text()
    assert "stopped because rank 1 raised ValueError: batch 7" in (tmp_path / "out/rank.0/stderr").read_text()


SLOW = """
import time
import ring_notebook.torch as ring
import torch
ring.init()
began = time.monotonic()
for _ in ring.track(range(10**6)):
    time.sleep(0.02 * ring.rank())
    if ring.allreduce(torch.tensor(time.monotonic() - began), op=ring.Max) > 5:
        break
    ring.log(loss=1.0)
"""


def test_the_rank_that_the_others_wait_for_is_told_at_the_end(forked_ranks: None) -> None:
    done = ringrun("-np", "2", sys.executable, "-c", SLOW)
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ringrun: rank 1 is ")
    assert re.search(r"x slower in sleeping or waiting outside of collectives; the others wait [5-9]\d%", last), last


def test_lines_without_prefix_and_with_times() -> None:
    done = ringrun("-np", "2", "--no-prefix", "-prefix-timestamp", "echo", "a")
    times, words = zip(*(line.rsplit(" ", 1) for line in done.stdout.splitlines()), strict=True)
    assert words == ("a", "a")
    assert all(time == datetime.fromisoformat(time).isoformat(" ", "milliseconds") for time in times)


@pytest.mark.slow
def test_ranks_by_host_and_cores() -> None:
    code = "import os; print(os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])"
    done = ringrun("--ppn", "2", "-H", "localhost:7", "--cpus-per-rank", "1", "python", "-c", code)
    assert sorted(done.stdout.splitlines()) == ["[0] 2 1", "[1] 2 1"], done.stderr
