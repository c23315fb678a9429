"""The benchmark of GPUs runs to its end on the pretended device, so that it works where there are GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.programs import ran
from ring_notebook.machine.gpus import gpus

ROOT = Path(__file__).parents[3]
RINGRUN = Path(sys.executable).parent / "ringrun"


def benchmark(ranks: int, *options: str) -> str:
    command = [str(RINGRUN), "--no-prefix", "-np", str(ranks), sys.executable, "benchmarks/gpu.py", *options]
    ended = ran(command, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_it_measures_our_own_candidates() -> None:
    if gpus():
        pytest.skip("this machine has GPUs: run the benchmark itself")
    printed = benchmark(2, "--pretend", "--sizes", "4,100000", "--seconds", "0", "--steps", "1")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    assert [row[:2] for row in rows[2:]] == [
        ["allreduce", "4"],
        ["allreduce", "100,000"],
        ["step, transformer", ""],
        ["step, convolutional", ""],
    ]
    assert all(row[3].endswith("s") for row in rows[2:])
    assert "A pretended device, whose times say nothing, by nccl" in printed


@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    if gpus():
        pytest.skip("this machine has GPUs")
    assert "NOT MEASURED: this machine has no GPU" in benchmark(1)
