"""How the time of a training is spent: in a run of a notebook, and in a script of ``ringrun``.

Linux counts what the main thread does, which executes the training.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from time import monotonic, process_time, thread_time
from typing import Any

from ring_notebook.analysis.time_breakdown import SENDING, SENT, OwnTime
from ring_notebook.core import other_waits, world
from ring_notebook.core.energy_of_rank import EnergyOfRank
from ring_notebook.machine.hardware import cores, throttled
from ring_notebook.rank.rank_status import report_to_job

_PERIOD = 0.2  # seconds between two reads of Linux's counters
_PAUSE = 0.01  # seconds between two reads of all counters, while a script logs


class _Linux:
    """Reads the values of `time_breakdown.OwnTime`, except samples, since the process began; 0 if not counted."""

    def __init__(self) -> None:
        self._collecting = 0.0
        self._began = self._read_at = -_PERIOD
        self._values: dict[str, float] = {}
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = thread_time()  # without the time in which other processes use the core
        else:
            self._collecting += thread_time() - self._began

    def read(self, fresh: bool = False) -> dict[str, float]:
        """The values, at most a fifth of a second old; those of this moment if ``fresh``."""
        if fresh or monotonic() - self._read_at >= _PERIOD:
            self._values, self._read_at = self._counted(), monotonic()
        return self._values

    def _counted(self) -> dict[str, float]:
        on_cpu = queued = disk = 0.0
        with suppress(OSError, ValueError), open(f"/proc/self/task/{os.getpid()}/schedstat") as file:
            on_cpu, queued = (int(one) * 1e-9 for one in file.read().split()[:2])
        with suppress(OSError, ValueError), open("/proc/self/io") as file:
            disk = sum(float(line.split()[1]) for line in file if line.startswith(("read_bytes", "write_bytes")))
        return {
            "on_cpu": on_cpu,
            "queued": queued,
            "throttled": throttled(),
            "collecting": self._collecting,
            "beside": max(0.0, process_time() - on_cpu),
            "faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt),
            "disk": disk,
        }


_linux = _Linux()


class TimeSpent:
    """How the time of a run is spent: from its first row on if steps follow, so that set-up does not count.

    ``totals`` is `metrics.totals`.
    """

    def __init__(self, totals: Callable[[], dict[str, float]]) -> None:
        self._totals = totals
        self._begun: float | None = None
        self._before: dict[str, float] = _linux.read(fresh=True)  # the process may have had runs before this one
        self._ended: dict[str, float] | None = None
        self.energy = EnergyOfRank()

    def moment(self) -> tuple[dict[str, float], float]:
        """The counters and the time now, for `begin_training`."""
        _linux.read(fresh=True)
        return self._counters(), monotonic()

    def begin_training(self, moment: tuple[dict[str, float], float]) -> None:
        """Count from the ``moment`` of the rank's first row."""
        self._before, self._begun = moment

    def end(self) -> None:
        """Stop counting: the cell has ended."""
        _linux.read(fresh=True)
        self._ended = self.now()

    def counted(self) -> dict[str, float]:
        """The present values of `time_breakdown.OwnTime`, since any fixed moment, and what went to other hosts."""
        values = {**_linux.read(), **self._totals()}
        return {**{one.name: values.get(one.name, 0.0) for one in fields(OwnTime)}, **_links()}

    def now(self) -> dict[str, float]:
        """Counters since the first row; without a row, since the beginning of the cell.

        ``communication``: seconds in collectives and messages; ``waiting``: the part spent waiting for other ranks;
        ``bubble``: the part of that spent waiting for messages; ``posted``: bytes of the tensors in collectives;
        ``training``: the whole time, left out without a row. Also the values of `time_breakdown.OwnTime`, the joules of
        `energy`, and `time_breakdown.SENDING` and `time_breakdown.SENT` for ranks of other hosts.
        """
        if self._ended is not None:
            return self._ended
        counted = {name: value - self._before.get(name, 0.0) for name, value in self._counters().items()}
        return counted if self._begun is None else {**counted, "training": monotonic() - self._begun}

    def _counters(self) -> dict[str, float]:
        other = other_waits.seconds()
        return {
            "communication": world.communication() + other.foreign,
            "waiting": world.waiting() + other.foreign,
            "bubble": other.messages + other.foreign_messages,
            "posted": float(world.posted()),
            **self._totals(),
            **_linux.read(),
            **self.energy.joules(),
            **_links(),
        }


def _links() -> dict[str, float]:
    found: dict[str, float] = {}
    for rank, (seconds, count) in world.sent().items():
        found |= {f"{SENDING}{rank}": seconds, f"{SENT}{rank}": float(count)}
    return found


class ScriptMeter:
    """Measures the steps of a script on this rank, after ``warmup`` of them, for the job that has started it.

    A row is logged when its step is done, so the row of the last warm-up step starts the clock; if that step has
    several rows, such as with logical ranks, its last row.
    """

    def __init__(self, warmup: int, gpus: bool, totals: Callable[[], dict[str, float]]) -> None:
        self._warmup = warmup
        self._gpus = gpus
        self._spent = TimeSpent(totals)
        self._first: int | None = None
        self._begun: tuple[int, float] | None = None
        self._samples = 0.0
        self._newest: dict[str, Any] = {}
        self._read_at = 0.0
        self._place = {"rank": 0, "hosts": 1}

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        self._first = step if self._first is None else self._first
        if step - self._first < self._warmup - 1:
            return
        if self._begun is None or step == self._begun[0]:
            self._begun = step, monotonic()
            self._spent.begin_training(self._spent.moment())
            if world.is_initialized():  # a script may shut down before it ends
                place = world.current()
                self._place = {"rank": place.rank, "hosts": place.cross_size}
            return
        self._samples += float(values.get("samples", 0.0))
        began, since = self._begun
        now = monotonic()
        self._newest.update(steps=step - began, seconds=now - since, samples=self._samples)
        if now - self._read_at < _PAUSE:
            return
        self._read_at = now
        self._newest["spent"] = self._spent.now()
        self._newest["last"] = {name: value for name, value in values.items() if isinstance(value, int | float)}

    def report(self) -> None:
        """Report to the job what has been measured so far."""
        if self._newest:
            report_to_job({**self._place, "cores": 0 if self._gpus else cores(), **self._newest})
