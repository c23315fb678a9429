"""What this machine has for ranks: cores, GPUs, memory that ran out; found without loading a framework."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["cores", "gpus", "oom_kills"]

_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")
_VMSTAT = Path("/proc/vmstat")
_NVIDIA = Path("/proc/driver/nvidia/gpus")


def cores() -> int:
    """Processor cores that this process may use: its affinity, and the CPU limit of its container."""
    available = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPU.read_text().split()
    except (OSError, ValueError):
        return available
    return available if quota == "max" else max(1, min(available, math.ceil(int(quota) / int(period))))


def gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    try:
        return [str(index) for index in range(len(list(_NVIDIA.iterdir())))]
    except OSError:
        return []


def oom_kills() -> int:
    """How often the Linux kernel has killed a process of this machine or container for want of memory."""
    counts = []
    for path in (_VMSTAT, _CGROUP_EVENTS):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        counts += [int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill"]
    return sum(counts)
