"""Where the seconds of this rank's run go: counted from its first row on, so that imports and set-up blur no share."""

from __future__ import annotations

from time import monotonic

from ring_notebook.core import world
from ring_notebook.core.logged import metrics
from ring_notebook.core.waits import other_waits

__all__ = ["TimeSpent"]


class TimeSpent:
    """The counters of one run."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._before: dict[str, float] = {}

    def begin_training(self) -> None:
        """The rank logs its first row: what came before counts no more."""
        self._before, self._begun = _counters(), monotonic()

    def now(self) -> dict[str, float]:
        """Seconds in collectives and messages, the part of them before other ranks had come, and waiting for data.

        ``bubble`` is what of that part were messages.

        ``training`` is the time that these are part of; without a row it is left out, and they count from the
        beginning of the cell.
        """
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
