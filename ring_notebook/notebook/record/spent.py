"""Where the seconds of a rank went: compute, moving data, waiting for other ranks, waiting for data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NOTHING_SPENT", "Spent", "spent"]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one rank. ``seconds`` is all of them: since its first step, or since the beginning of its cell.

    ``moving`` is the time in collectives in which data moved, ``waiting`` that in which other ranks had not come yet,
    ``data`` the time in which `track` waited for a batch. Operations that go on beside the training count as far as
    the rank waited for them.
    """

    seconds: float
    moving: float
    waiting: float
    data: float

    @property
    def busy(self) -> float:
        """Seconds outside of collectives: the rank's own work, and its waiting for data."""
        return max(0.0, self.seconds - self.moving - self.waiting)

    @property
    def compute(self) -> float:
        """Seconds of the rank's own work."""
        return max(0.0, self.busy - self.data)

    def share(self, seconds: float) -> float:
        """A part of the seconds, 0 to 1."""
        return min(seconds / self.seconds, 1.0) if self.seconds > 0 else 0.0


NOTHING_SPENT = Spent(0.0, 0.0, 0.0, 0.0)


def spent(facts: Mapping[str, Any], elapsed: float) -> Spent:
    """What a rank has reported of itself, in a run that has lasted ``elapsed`` seconds for it."""

    def fact(name: str, otherwise: float = 0.0) -> float:
        value = facts.get(name)
        return float(value) if isinstance(value, int | float) else otherwise

    communication = fact("communication")
    waiting = min(fact("waiting"), communication)
    return Spent(fact("training") or elapsed, communication - waiting, waiting, fact("data_wait"))
