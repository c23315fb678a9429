"""Which ranks the others wait for, and why; never said from noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_low

from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.record.spent import Spent
from ring_notebook.notebook.style import ranks

__all__ = ["SlowRanks", "find"]

SLOWER = 1.15  # times the work of the usual rank
WAITS = 0.10  # the share of time that the others wait, at least
LEAST_SECONDS, LEAST_STEPS = 4.0, 20  # before anything is said


@dataclass(frozen=True)
class SlowRanks:
    """Ranks that do the same work more slowly than the usual one; ``for_data`` when their data comes late.

    ``factor`` is how many times the usual rank's seconds they take, ``waits`` the share of time of the others.
    """

    ranks: tuple[int, ...]
    factor: float
    for_data: bool
    waits: float

    @property
    def sentence(self) -> str:
        """Who, why, and what it costs the others."""
        verb = "is" if len(self.ranks) == 1 else "are"
        cause = "in getting data" if self.for_data else "in compute"
        return f"{ranks(self.ranks)} {verb} {self.factor:.1f}x slower {cause}; the others wait {self.waits:.0%}"


def find(view: RunView) -> SlowRanks | None:
    """The slow ranks of a run whose ranks keep step by collectives; None while there are none or it is too early.

    Ranks in lockstep all have the same samples/s: the slow one is the one that hardly waits.
    """
    spent = {rank.rank: rank.spent for rank in view.ranks}
    if len(spent) < 2 or not any(one.idle for one in spent.values()):
        return None
    if min(one.seconds for one in spent.values()) < LEAST_SECONDS or max(r.step for r in view.ranks) < LEAST_STEPS:
        return None
    usual = median_low(one.busy for one in spent.values())
    slow = tuple(rank for rank, one in spent.items() if one.busy > SLOWER * usual > 0)
    others = [one for rank, one in spent.items() if rank not in slow]
    waits = median(one.share(one.idle) for one in others)
    if not slow or waits < WAITS:
        return None
    return _explained(slow, spent, others, usual, waits)


def _explained(
    slow: tuple[int, ...], spent: Mapping[int, Spent], others: list[Spent], usual: float, waits: float
) -> SlowRanks:
    theirs = [spent[rank] for rank in slow]
    for_data = median(one.data for one in theirs) - median(one.data for one in others)
    for_compute = median(one.compute for one in theirs) - median(one.compute for one in others)
    return SlowRanks(slow, median(one.busy for one in theirs) / usual, for_data > for_compute, waits)
