"""How the time of a training is spent: in a run of a notebook, and in a script for `ringrun --scale`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from ring_notebook.core import other_waits, world
from ring_notebook.hardware import cores
from ring_notebook.rank.rank_status import report_to_job


class TimeSpent:
    """How the time of a run is spent, counted from its first row, so that set-up does not distort the shares.

    ``data_wait`` returns the seconds that `track` has waited for data.
    """

    def __init__(self, data_wait: Callable[[], float]) -> None:
        self._data_wait = data_wait
        self._begun: float | None = None
        self._before: dict[str, float] = {}
        self._ended: dict[str, float] | None = None

    def begin_training(self) -> None:
        """The rank logs its first row: earlier time no longer counts."""
        self._before, self._begun = self._counters(), monotonic()

    def end(self) -> None:
        """The cell has ended: later time does not count."""
        self._ended = self.now()

    def now(self) -> dict[str, float]:
        """Seconds in collectives and messages, the part of them spent waiting for other ranks, and waiting for data.

        ``bubble`` is the wait for messages in that part, ``posted`` the bytes of the tensors in collectives.
        ``training`` is the whole time; without a row it is left out, and the others count from the beginning of the
        cell.
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
            "data_wait": self._data_wait(),
            "posted": float(world.posted()),
        }


class ScriptMeter:
    """Measures the steps of a script on this rank, after ``warmup`` of them, for the job that has started it.

    A row is logged when its step is done, so the row of the last step of the warm-up starts the clock.
    """

    def __init__(self, warmup: int, gpus: bool, data_wait: Callable[[], float]) -> None:
        self._warmup = warmup
        self._gpus = gpus
        self._spent = TimeSpent(data_wait)
        self._first: int | None = None
        self._begun: tuple[int, float] | None = None
        self._samples = 0.0
        self._newest: dict[str, Any] = {}
        self._place = {"rank": 0, "hosts": 1}

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Take in a row that the script logs."""
        self._first = step if self._first is None else self._first
        if step - self._first < self._warmup - 1:
            return
        if self._begun is None:
            self._begun = step, monotonic()
            self._spent.begin_training()
            if world.is_initialized():  # a script may shut down before it ends
                place = world.current()
                self._place = {"rank": place.rank, "hosts": place.cross_size}
            return
        self._samples += float(values.get("samples", 0.0))
        began, since = self._begun
        self._newest = {
            "steps": step - began,
            "seconds": monotonic() - since,
            "samples": self._samples,
            "spent": self._spent.now(),
        }

    def report(self) -> None:
        """Report to the job what has been measured so far."""
        if self._newest:
            report_to_job({**self._place, "cores": 0 if self._gpus else cores(), **self._newest})
