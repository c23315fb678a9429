"""Ranks that part in FSDP2, tensor parallelism and pipelines on Gloo: an error names the rank and the cause."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.doc_tables import table
from harness.programs import ran
from harness.waiting import LIMIT, until

pytestmark = pytest.mark.usefixtures("forked_ranks")
PROGRAM = Path(__file__).with_name("desynchronized.py")
RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "-np", "2", sys.executable, str(PROGRAM)]
CASES = {row[1]: row[2:] for row in table("distributed.md", "| Training | Rank 1 |")}
USUAL = "another collective"


def test_there_are_ten() -> None:
    assert len(CASES) == 10
    assert {"none", *CASES} == {"none", *re.findall(r'^    "(.*)": \w+,$', PROGRAM.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one != USUAL)) for one in CASES])
def test_the_rank_and_the_cause_are_named(case: str, tmp_path: Path) -> None:
    """As the table in docs/distributed.md has it, on rank 0; of a rank that sleeps, when the user stops it."""
    error, words = (cell.strip("`") for cell in CASES[case])
    output = tmp_path / "output"
    with output.open("w") as file:
        job = subprocess.Popen(
            RINGRUN,
            env={**os.environ, "CASE": case, "RING_STALL_WARNING": "2"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if case == "sleeps":
                until(lambda: words in output.read_text())
                os.kill(job.pid, signal.SIGINT)
            assert job.wait(LIMIT) != 0
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    lines = [line for line in output.read_text().splitlines() if line.startswith(("[0]", "ringrun:"))]
    assert any(error in line and words in line for line in lines), output.read_text()
    assert any("rank 1" in line for line in lines)


def losses(**variables: str) -> list[list[float]]:
    done = ran(RINGRUN, env={**os.environ, **variables}, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [ast.literal_eval(found) for found in re.findall(r"\[\d\] losses (.*)", done.stdout)]


@pytest.mark.slow
def test_trainings_have_the_same_losses_without_the_gate() -> None:
    """FSDP2, tensor parallelism and a pipeline, bit by bit."""
    gated = losses()
    assert len(gated) == 2
    assert sorted(gated) == sorted(losses(RING_GATE="off"))
