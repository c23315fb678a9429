"""What this machine has for ranks: cores, and how often its memory ran out."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

__all__ = ["cores", "oom_kills"]

_CGROUPS = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


def cores() -> int:
    """Processor cores that this process may use: its affinity, and the CPU limit of its container."""
    return min(len(os.sched_getaffinity(0)), _cores_of_container())


def _cores_of_container() -> int:
    # The unified hierarchy has quota and period in one file, that of the processor controller alone in two.
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((_CGROUPS / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return max(1, math.ceil(int(quota) / int(period)))
    return sys.maxsize


def oom_kills() -> int:
    """How often the Linux kernel has killed a process of this machine or container for want of memory."""
    counts = []
    for path in (_VMSTAT, _CGROUPS / "memory.events", _CGROUPS / "memory" / "memory.oom_control"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        counts += [int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill"]
    return sum(counts)
