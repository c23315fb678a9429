"""The doctor's check of GPUs: two ranks connect, compare what their GPUs reduce with the host, and lose one of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any, Literal, TypeAlias

from ring_notebook.config import config
from ring_notebook.launch.supervisor.inherited_variables import without_outer_job
from ring_notebook.machine.gpus import SHARED_BY_NCCL, VISIBLE, gpus
from ring_notebook.machine.own_python import module_command

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

_CONTAINER = "in a container start it with `--gpus all` (Docker) or `--nv` (Apptainer)"
# What to do where a library says this. In this order: the first that is found in the words counts.
_BY_WORDS = (
    (
        r"libcuda\.so\.1 cannot be loaded",
        f"install NVIDIA's driver, of CUDA 12 or newer; {_CONTAINER}, and with NVIDIA_DRIVER_CAPABILITIES=all",
    ),
    (
        r"\(CUDA error 100\)",
        f"CUDA sees no GPU: let CUDA_VISIBLE_DEVICES name one that is here; {_CONTAINER}, so that it has /dev/nvidia*",
    ),
    (
        r"\(CUDA error (35|803)\)",
        "the driver's library and kernel module differ: restart the machine after an update of the driver, and take "
        "other copies of libcuda.so.1 out of LD_LIBRARY_PATH",
    ),
    (r"\(CUDA error 804\)", "take the cuda-compat libraries out of LD_LIBRARY_PATH: this GPU does not work with them"),
    (
        r"\(CUDA error (999|3)\)",
        "`nvidia-smi` and then `modprobe nvidia_uvm` may show what the driver lacks; restart it",
    ),
    (r"the library has no cu", "install a driver of CUDA 12 or newer (525 or later)"),
    (
        r"NCCL [\d.]+ is too old|the library has no nccl",
        "`pip install -U torch`, which brings its NCCL, or `pip install -U 'nvidia-nccl-cu12>=2.26'` (-cu13 where "
        "torch is built for CUDA 13)",
    ),
    (
        r"libnccl\.so\.2 cannot be loaded",
        "install a CUDA build of torch, or `pip install nvidia-nccl-cu12` (-cu13 for a driver of CUDA 13)",
    ),
    (
        r"share device",
        "start no more ranks than there are GPUs; MIG instances count as GPUs, each with a rank of its own",
    ),
    (r"has NCCL .* and rank", "install the same version of torch on all hosts"),
    (r"NCCL_COMM_BLOCKING", "`unset NCCL_COMM_BLOCKING`"),
    (
        r"unhandled cuda error",
        "an NCCL of CUDA 13 (nvidia-nccl-cu13) needs a driver of CUDA 13 (580 or later): install the CUDA 12 build of "
        "torch or a newer driver; `NCCL_DEBUG=INFO ringrun --doctor` shows more",
    ),
)


def check_gpus() -> Finding:
    """Run the check where there are GPUs; it loads no framework."""
    names = gpus()
    if not names and not config().cuda_library:
        if os.environ.get(VISIBLE, "").partition(",")[0].isdigit():
            found = f"none: {VISIBLE}={os.environ[VISIBLE]} names some, and no driver is here"
            return "warn", found, f"install the driver, start the container with `--gpus all`, or unset {VISIBLE}"
        return "ok", "none found", ""
    if config().device == "host":
        return "ok", f"{len(names)} found; sums of their tensors go through CPU memory, as RING_DEVICE=host says", ""
    return _judge(*_run(shared=len(names) == 1))


def _run(shared: bool) -> tuple[str, str, bool]:
    """What the ranks have printed on both streams, and whether they have ended in time; ``shared``: on one GPU."""
    program = module_command("ring_notebook.core.gpu_check_rank", *(["--shared"] if shared else []))
    options = ("--no-prefix", "-np", "2", "-H", "localhost:2", "--elastic")
    command = module_command("ring_notebook.launch.cli", *options, *program)
    environment = without_outer_job(os.environ) | ({SHARED_BY_NCCL: "1"} if shared else {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as job:
        try:
            return *job.communicate(timeout=LIMIT), True
        except subprocess.TimeoutExpired:
            job.kill()  # the ranks end with it
            return *job.communicate(), False


def _advice(step: str, found: str) -> str:
    known = next((advice for words, advice in _BY_WORDS if re.search(words, found)), "")
    return f"{known}; {_SLOWLY}" if known else _ADVICE[step]


def _judge(printed: str, errors: str, in_time: bool) -> Finding:
    found: dict[str, str] = {}
    warned = ""  # the last warning of NCCL, which prints there too with NCCL_DEBUG
    failed: dict[str, Any] | None = None
    for line in printed.splitlines():
        step = _report(line)
        if step is None:
            warned = f"; {line.strip()}" if "NCCL WARN" in line else warned
        elif failed is None:
            found[step["step"]] = step["found"]
            failed = None if step["fine"] else step
    if failed is not None:
        status: Literal["warn", "fail"] = "warn" if failed["step"] in ("libraries", "connect") else "fail"
        return status, f"{'; '.join(found.values())}{warned}", _advice(failed["step"], failed["found"])
    missing = [step for step in _STEPS if step not in found]
    if not missing:
        return "ok", "; ".join(found.values()), ""
    why = (errors.strip().splitlines() or ["the ranks ended"])[-1] if in_time else f"no answer within {LIMIT:g} s"
    before = "".join(f"{text}; " for text in found.values())
    return "fail", f"{before}{missing[0]}: {why}{warned}", _ADVICE[missing[0]]


def _report(line: str) -> dict[str, Any] | None:
    """What rank 0 reports of a step, also behind a line that another rank has begun; None for any other line."""
    try:
        step, _ = json.JSONDecoder().raw_decode(line, line.index('{"step": '))
    except ValueError:
        return None
    return step if isinstance(step, dict) and step.keys() == {"step", "fine", "found"} else None
