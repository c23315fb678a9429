"""The load of a rank's process and machine while a cell runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from ring_notebook.core.metrics import expected_loads
from ring_notebook.core.native import core
from ring_notebook.machine.gpus import gpus

_INTERFACES = Path("/sys/class/net")
SHORTEST = 0.5  # seconds over which a rate is measured


class Machine:
    """The load of this rank's process and machine since the last reading, from psutil and NVML.

    ``gpu`` is the rank's own GPU, as named in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, gpu: str | None = None) -> None:
        self.threads = 0
        """Number of threads that the rank computes with; 0 if unknown."""
        self._process = psutil.Process()
        self._gpu = _device(gpu if gpu is not None else next(iter(gpus()), ""))
        self._process.cpu_percent(None)  # the first reading only starts the clock
        self._before = monotonic()
        self._disk, self._network = self._disk_bytes(), _network_bytes()

    def read(self) -> dict[str, float]:
        """The values of `records.Load`, without readings that the system refuses and rates over too short a time.

        The system counts processor time in hundredths of a second: a rank that computed for one of three milliseconds
        would have used 330 % of a core.
        """
        values = {
            "memory": float(self._process.memory_info().rss),
            "memory_left": float(min(core.memory_left(), psutil.virtual_memory().available)),
        }
        if self.threads:
            values["threads"] = float(self.threads)
        if monotonic() - self._before >= SHORTEST:
            values |= self._rates()
        return {**values, **_gpu_values(self._gpu), **expected_loads()}

    def _rates(self) -> dict[str, float]:
        """The values per second, since the last call."""
        now = monotonic()
        seconds, self._before = now - self._before, now
        disk, self._disk = self._disk, self._disk_bytes()
        network, self._network = self._network, _network_bytes()
        values = {"cpu": self._process.cpu_percent(None), "network": (self._network - network) / seconds}
        if self._disk >= 0:
            values["disk"] = (self._disk - disk) / seconds
        return values

    def _disk_bytes(self) -> float:
        """Bytes that this process has read from and written to disks; -1 if unknown."""
        with suppress(psutil.Error, AttributeError, OSError):
            io = self._process.io_counters()
            return float(io.read_bytes + io.write_bytes)
        return -1.0


def _network_bytes() -> float:
    """Bytes sent and received by the network cards of this host; where it shows none, by interfaces over no others.

    A bond, a bridge or a VLAN counts the bytes of the cards below it again, and the interfaces of containers too.
    """
    counters = psutil.net_io_counters(pernic=True)
    cards = [name for name in counters if (_INTERFACES / name / "device").exists()]
    own = [name for name in counters if name != "lo" and not any((_INTERFACES / name).glob("lower_*"))]
    return float(sum(counters[name].bytes_sent + counters[name].bytes_recv for name in cards or own))


def _device(name: str) -> Any:
    """The NVML handle of a GPU by its index or UUID; None without that GPU, or without a driver."""
    if not name:
        return None
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return (
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
        )
    return None


def _gpu_values(device: Any) -> dict[str, float]:
    if device is None:
        return {}
    import pynvml

    values: dict[str, float] = {}
    with suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        values |= {"gpu_memory": float(memory.used), "gpu_memory_left": float(memory.free)}
    with suppress(pynvml.NVMLError):  # a part of a GPU (MIG) has no utilization of its own
        values["gpu"] = float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
    return values
