"""The doctor's check of GPUs: two ranks connect, compare what their GPUs reduce with the host, and lose one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Literal, TypeAlias

from ring_notebook.config import config
from ring_notebook.gpus import gpus
from ring_notebook.launch.supervisor.outer_job import without_outer_job

__all__ = ["LIMIT", "Finding", "check_gpus"]

LIMIT = 30.0
"""Seconds that all steps together may take."""

Finding: TypeAlias = tuple[Literal["ok", "warn", "fail"], str, str]
"""How it is, what was found, and what to do."""

_STEPS = ("libraries", "connect", "results", "death")
_SLOWLY = "until then sums of GPU tensors go through CPU memory"
_ADVICE = {
    "libraries": f"`pip install nvidia-nccl-cu12`, or -cu13 for a driver of CUDA 13; {_SLOWLY}",
    "connect": f"`NCCL_DEBUG=INFO ringrun --doctor` may show why; {_SLOWLY}",
    "results": "set RING_DEVICE=host, which is slow and right, and report this with the versions above",
    "death": "set RING_DEVICE=host, or a run may hang after a rank has died; report this with the versions above",
}


def check_gpus() -> Finding:
    """Run the check where there are GPUs; it loads no framework."""
    names = gpus()
    if not names and not config().cuda_library:
        return "ok", "none found", ""
    if config().device == "host":
        return "ok", f"{len(names)} found; sums of their tensors go through CPU memory, as RING_DEVICE=host says", ""
    if len(names) == 1 and not config().cuda_library:
        return (
            "warn",
            "1 found: NCCL, which needs one for each rank, was not tried",
            "two ranks that share a GPU work, and sum its tensors through CPU memory",
        )
    return _judge(*_run())


def _run() -> tuple[str, str, bool]:
    """What the ranks have printed on both streams, and whether they have ended in time."""
    program = [sys.executable, "-m", "ring_notebook.launch.gpu_check_rank"]
    command = [sys.executable, "-m", "ring_notebook.launch.cli", "-np", "2", "--elastic", *program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=without_outer_job(os.environ)
    ) as job:
        try:
            return *job.communicate(timeout=LIMIT), True
        except subprocess.TimeoutExpired:
            job.kill()  # the ranks end with it
            return *job.communicate(), False


def _judge(printed: str, errors: str, in_time: bool) -> Finding:
    said: dict[str, str] = {}
    for line in printed.splitlines():
        step = json.loads(line)
        said[step["step"]] = step["said"]
        if not step["fine"]:
            before = "".join(f"{found}; " for found in list(said.values())[:-1])
            status: Literal["warn", "fail"] = "warn" if step["step"] in ("libraries", "connect") else "fail"
            return status, f"{before}{step['said']}", _ADVICE[step["step"]]
    missing = [step for step in _STEPS if step not in said]
    if not missing:
        return "ok", "; ".join(said.values()), ""
    why = (errors.strip().splitlines() or ["the ranks ended"])[-1] if in_time else f"no answer within {LIMIT:g} s"
    return "fail", f"{''.join(f'{found}; ' for found in said.values())}{missing[0]}: {why}", _ADVICE[missing[0]]
