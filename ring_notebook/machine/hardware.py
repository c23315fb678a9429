"""The cores that ranks can use on this machine, waits for cores, and how often memory ran out."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ring_notebook.machine.os_calls import number_in, processors

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")
_PROCESSORS = Path("/sys/devices/system/cpu")
RDMA = Path("/sys/class/infiniband")
"""The folder of this machine's RDMA devices, missing if there are none."""


def cores() -> int:
    """Processor cores that this process may use: its affinity, and the CPU limit of its container."""
    return min(len(processors()), _cores_of_container())


def cores_of(processors: Iterable[int]) -> int:
    """Physical cores of these processors, within the limit of this container. Hyperthreads of a core count once."""
    return min(len({_siblings(number) for number in processors}), _cores_of_container())


def _siblings(processor: int) -> str:
    try:
        return (_PROCESSORS / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(processor)


def _cores_of_container() -> int:
    """The least of what the control groups of this process allow: a service may have less than its container."""
    return max(1, min((math.ceil(quota) for quota in map(_quota_of, _groups("cpu")) if quota), default=sys.maxsize))


def _quota_of(folder: Path) -> float:
    """The cores that the control group at ``folder`` allows its processes; 0 where it has no limit of its own."""
    # The unified hierarchy (cgroup v2) has quota and period in one file, cgroup v1 in two.
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
    return 0.0


def oom_kills() -> int | None:
    """How often the Linux kernel has killed a process of this machine or container because memory ran out.

    None where it does not count them, as in gVisor.
    """
    counts = []
    for path in (_VMSTAT, _CGROUPS / "memory.events", _CGROUPS / "memory" / "memory.oom_control"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        counts += [int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill"]
    return sum(counts) if counts else None


def throttled() -> float:
    """Seconds, summed over cores, for which CPU limits of this process's control groups have held up threads."""
    return sum(map(_throttled_in, _groups("cpu")))


class WaitsForCore:
    """A context whose `seconds` are those that its thread has waited for a core so far.

    0 where Linux does not count that.
    """

    def __enter__(self) -> WaitsForCore:
        self._file = -1
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def seconds(self) -> float:
        """Seconds since the thread began. Takes some microseconds."""
        return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9 if self._file >= 0 else 0.0


def processes_of_container() -> int:
    """How many processes and threads the control groups of this process allow; `sys.maxsize` where they do not say."""
    limits = [number_in(folder / "pids.max") for folder in _groups("pids")]
    return min((limit for limit in limits if limit is not None), default=sys.maxsize)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of control groups through which ``controller`` limits this process, its own first."""
    try:
        lines = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        lines = [["0", "", "/"], ["1", controller, "/"]]  # those of a container
    for _, controllers, group in lines:
        if controllers and controller not in controllers.split(","):  # the unified hierarchy (cgroup v2) names none
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        own = root / group.lstrip("/")
        for folder in (own, *own.parents):
            yield folder
            if folder == root:
                break


def _throttled_in(folder: Path) -> float:
    with suppress(OSError):
        counts = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        return int(counts.get("throttled_usec", 0)) * 1e-6 + int(counts.get("throttled_time", 0)) * 1e-9
    return 0.0
