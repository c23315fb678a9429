"""What this rank's process and machine are doing: processor, memory, GPU, disk and network, by psutil and NVML."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import Any

import psutil

from ring_notebook.core.native import core
from ring_notebook.gpus import gpus

__all__ = ["Machine"]


class Machine:
    """Reads what has changed since the last reading. ``gpu`` is the rank's own, as CUDA_VISIBLE_DEVICES names it."""

    def __init__(self, gpu: str | None = None) -> None:
        self.threads = 0
        """How many the rank computes with; 0 where that is not known."""
        self._process = psutil.Process()
        self._gpu = _device(gpu if gpu is not None else next(iter(gpus()), ""))
        self._process.cpu_percent(None)  # the first reading only starts the clock
        self._before = monotonic()
        self._disk, self._network = self._disk_bytes(), _network_bytes()

    def read(self) -> dict[str, float]:
        """What `records.Load` describes; a reading that the system refuses is left out."""
        now = monotonic()
        seconds, self._before = max(now - self._before, 1e-3), now
        disk, self._disk = self._disk, self._disk_bytes()
        network, self._network = self._network, _network_bytes()
        values = {
            "cpu": self._process.cpu_percent(None),
            "memory": float(self._process.memory_info().rss),
            "memory_left": float(min(core().memory_left(), psutil.virtual_memory().available)),
            "network": (self._network - network) / seconds,
        }
        if self.threads:
            values["threads"] = float(self.threads)
        if self._disk >= 0:
            values["disk"] = (self._disk - disk) / seconds
        return {**values, **_gpu_values(self._gpu)}

    def _disk_bytes(self) -> float:
        """Bytes that this process has read from disks and written to them; -1 where the system does not say."""
        with suppress(psutil.Error, AttributeError, OSError):
            io = self._process.io_counters()
            return float(io.read_bytes + io.write_bytes)
        return -1.0


def _network_bytes() -> float:
    """Bytes that have crossed the interfaces of this host, the loopback left out."""
    counters = psutil.net_io_counters(pernic=True)
    return float(sum(one.bytes_sent + one.bytes_recv for name, one in counters.items() if name != "lo"))


def _device(name: str) -> Any:
    """The NVML handle of a GPU by its index or UUID; None where there is none, or no driver."""
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
