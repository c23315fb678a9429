"""The load of a rank's process, of its children, such as the workers of a loader, and of its machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from time import monotonic
from types import ModuleType

import psutil

from ring_notebook.core.metrics import expected_loads
from ring_notebook.core.native import core
from ring_notebook.machine.gpus import gpus, handle_of, management_library

_INTERFACES = Path("/sys/class/net")
_CHILDREN = "/proc/{}/task/*/children"
_SHARE = 0.01  # of the time, at most, goes to measuring the memory of children
SHORTEST = 0.5  # seconds over which a rate is measured


class Machine:
    """The load of this rank's processes and machine since the last reading, from psutil and NVML.

    Only unshared memory of children counts: a forked worker shares most with the rank.
    """

    def __init__(self) -> None:
        self.threads = 0
        """Number of threads that the rank computes with; 0 if unknown."""
        self._process = psutil.Process()
        self._gpu = next(iter(gpus()), "")  # the rank's own
        self._gpus = management_library() if self._gpu else None
        self._of_children, self._due = 0.0, 0.0
        self._before, self._cpu = monotonic(), self._cpu_seconds(self._children())
        self._disk, self._network = self._disk_bytes(), _network_bytes()

    def read(self) -> dict[str, float]:
        """The values of `records.Load`, without readings that the system refuses and rates over too short a time.

        The system counts processor time in hundredths of a second: a rank that computed for one of three milliseconds
        would have used 330 % of a core.
        """
        children = self._children()
        beside = self._memory_of(children)
        values = {
            "memory": self._process.memory_info().rss + beside,
            "memory_left": float(min(core.memory_left(), psutil.virtual_memory().available)),
        }
        if self.threads:
            values["threads"] = float(self.threads)
        if monotonic() - self._before >= SHORTEST:
            values |= self._rates(children)
        expected = expected_loads()
        if "memory_expected" in expected:
            expected["memory_expected"] += beside
        return {**values, **_gpu_values(self._gpu, self._gpus), **expected}

    def _children(self) -> list[psutil.Process]:
        """The processes below this one; none where the system does not list them.

        psutil's own way reads the parents of all processes of the machine, each time.
        """
        found, parents = [], [self._process.pid]
        while parents:
            lists = [_text(path) for path in glob(_CHILDREN.format(parents.pop()))]
            parents += (pids := [int(pid) for text in lists for pid in text.split()])
            for pid in pids:
                with suppress(psutil.Error):
                    found.append(psutil.Process(pid))
        return found

    def _memory_of(self, children: Sequence[psutil.Process]) -> float:
        """The bytes that only these have, as last counted. Counting takes a while, so it is done now and then."""
        begun = monotonic()
        if not children:
            self._of_children = 0.0
        elif begun >= self._due:
            self._of_children = 0.0
            for child in children:
                with suppress(psutil.Error, OSError):
                    self._of_children += child.memory_full_info().uss
            self._due = monotonic() + (monotonic() - begun) / _SHARE
        return self._of_children

    def _cpu_seconds(self, children: Sequence[psutil.Process]) -> float:
        """Processor time until now, also of children that have ended."""
        seconds = 0.0
        for process in (self._process, *children):
            with suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
        return seconds

    def _rates(self, children: Sequence[psutil.Process]) -> dict[str, float]:
        """The values per second, since the last call."""
        now = monotonic()
        seconds, self._before = now - self._before, now
        cpu, self._cpu = self._cpu, self._cpu_seconds(children)
        disk, self._disk = self._disk, self._disk_bytes()
        network, self._network = self._network, _network_bytes()
        used = max(0.0, self._cpu - cpu)  # the time of a child that nobody has waited for is lost
        values = {"cpu": 100 * used / seconds, "network": (self._network - network) / seconds}
        if self._disk >= 0:
            values["disk"] = (self._disk - disk) / seconds
        return values

    def _disk_bytes(self) -> float:
        """Bytes that this process has read from and written to disks; -1 if unknown."""
        with suppress(psutil.Error, AttributeError, OSError):
            io = self._process.io_counters()
            return float(io.read_bytes + io.write_bytes)
        return -1.0


def _text(path: str) -> str:
    """What a file says; empty where it is gone."""
    with suppress(OSError):
        return Path(path).read_text()
    return ""


def _network_bytes() -> float:
    """Bytes sent and received by the network cards of this host; where it shows none, by interfaces over no others.

    A bond, a bridge or a VLAN counts the bytes of the cards below it again, and the interfaces of containers too.
    """
    counters = psutil.net_io_counters(pernic=True)
    cards = [name for name in counters if (_INTERFACES / name / "device").exists()]
    own = [name for name in counters if name != "lo" and not any((_INTERFACES / name).glob("lower_*"))]
    return float(sum(counters[name].bytes_sent + counters[name].bytes_recv for name in cards or own))


def _gpu_values(gpu: str, library: ModuleType | None) -> dict[str, float]:
    if library is None:
        return {}
    values: dict[str, float] = {}
    with suppress(library.NVMLError):  # of a name that it does not know; a part of a GPU (MIG) has no utilization
        device = handle_of(library, gpu)
        memory = library.nvmlDeviceGetMemoryInfo(device)
        values |= {"gpu_memory": float(memory.used), "gpu_memory_left": float(memory.free)}
        values["gpu"] = float(library.nvmlDeviceGetUtilizationRates(device).gpu)
    return values
