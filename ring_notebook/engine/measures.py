"""What a rank measures of itself while a cell runs: calls in loops, its machine, and where its time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import psutil

from ring_notebook.core import metrics, other_waits, world
from ring_notebook.core.native import core
from ring_notebook.gpus import gpus

MOST = 32  # steps of a loop that are noted
SHORTEST = 0.5  # seconds over which a rate is measured


class _Loop:
    """One pass over a tracked loop: ``marks`` are the calls before some of its steps, the same ones on all ranks."""

    def __init__(self, name: str, line: int, calls: Callable[[], int]) -> None:
        self.name = name
        self.line = line
        self.marks: dict[int, int] = {}
        self._calls = calls
        self._every = 1

    def begin_step(self, step: int) -> None:
        """Step ``step``, counted from 0, begins."""
        if step % self._every:
            return
        marks = {**self.marks, step: self._calls()}
        if len(marks) > MOST:
            self._every *= 2
            marks = {at: calls for at, calls in marks.items() if at % self._every == 0}
        self.marks = marks  # at once: another thread reads it


class LoopCalls:
    """How many collectives this rank had called when steps of a run's loops began, for a comparison of the ranks.

    ``calls`` says how many it has called in the run.

    ``lines`` are those of the cell that the main thread is at, the innermost first: ranks in the same pass over the
    same loop name it alike.
    """

    def __init__(self, calls: Callable[[], int], lines: Callable[[], Sequence[int]]) -> None:
        self._calls = calls
        self._lines = lines
        self._passes: Counter[str] = Counter()
        self._newest: _Loop | None = None
        self.number = 0  # of the pass, from 1; 0 outside of loops, and where steps are counted over all passes

    def begin(self, place: str, whole: bool = False) -> Callable[[int], None]:
        """A pass over the loop at ``place`` in its file begins; what this returns is called before each step.

        ``whole``: its steps are counted over all passes.
        """
        lines = self._lines()
        name = f"{place} {' '.join(map(str, lines))}"
        self._passes[name] += 1
        self.number = 0 if whole else self._passes[name]
        self._newest = _Loop(f"{name} {self._passes[name]}", lines[0] if lines else 0, self._calls)
        return self._newest.begin_step

    def report(self) -> dict[str, Any]:
        """The newest pass for a record: its ``name``, the ``line`` of the cell, and ``marks`` as (step, calls)."""
        newest = self._newest
        if newest is None:
            return {}
        return {"name": newest.name, "line": newest.line, "marks": [*newest.marks.items()]}


class Machine:
    """What this rank's process and machine are doing since the last reading, by psutil and NVML.

    ``gpu`` is the rank's own, as CUDA_VISIBLE_DEVICES names it.
    """

    def __init__(self, gpu: str | None = None) -> None:
        self.threads = 0
        """How many the rank computes with; 0 where that is not known."""
        self._process = psutil.Process()
        self._gpu = _device(gpu if gpu is not None else next(iter(gpus()), ""))
        self._process.cpu_percent(None)  # the first reading only starts the clock
        self._before = monotonic()
        self._disk, self._network = self._disk_bytes(), _network_bytes()

    def read(self) -> dict[str, float]:
        """What `records.Load` describes; a reading that the system refuses is left out, and a rate of too short a time.

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
        return {**values, **_gpu_values(self._gpu)}

    def _rates(self) -> dict[str, float]:
        """What is counted per second, since the last time."""
        now = monotonic()
        seconds, self._before = now - self._before, now
        disk, self._disk = self._disk, self._disk_bytes()
        network, self._network = self._network, _network_bytes()
        values = {"cpu": self._process.cpu_percent(None), "network": (self._network - network) / seconds}
        if self._disk >= 0:
            values["disk"] = (self._disk - disk) / seconds
        return values

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


class TimeSpent:
    """Where the seconds of a run go, counted from its first row on, so that imports and set-up blur no share."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._before: dict[str, float] = {}
        self._ended: dict[str, float] | None = None

    def begin_training(self) -> None:
        """The rank logs its first row: what came before counts no more."""
        self._before, self._begun = _counters(), monotonic()

    def end(self) -> None:
        """The cell has ended: what comes now counts no more."""
        self._ended = self.now()

    def now(self) -> dict[str, float]:
        """Seconds in collectives and messages, the part of them before other ranks had come, and waiting for data.

        ``bubble`` is what of that part were messages.

        ``training`` is the time that these are part of; without a row it is left out, and they count from the
        beginning of the cell.
        """
        if self._ended is not None:
            return self._ended
        counted = {name: value - self._before.get(name, 0.0) for name, value in _counters().items()}
        return counted if self._begun is None else {**counted, "training": monotonic() - self._begun}


def _counters() -> dict[str, float]:
    other = other_waits.seconds()
    return {
        "communication": world.communication() + other.foreign,
        "waiting": world.waiting() + other.foreign,
        "bubble": other.messages + other.foreign_messages,
        "data_wait": metrics.data_wait(),
    }
