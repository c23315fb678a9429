"""Which ranks the others wait for, and why; noise never counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_low

from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.style import ranks
from ring_notebook.spent import Spent

SLOWER = 1.15  # times the work of the usual rank
WAITS = 0.10  # the least share of time that the others wait
LEAST_SECONDS, LEAST_STEPS = 4.0, 20  # before a rank is called slow


@dataclass(frozen=True)
class SlowRanks:
    """Ranks that take longer than the usual rank for the same work; ``for_data``: their data comes late.

    ``factor``: how many times as long; ``waits``: the share of time that the others wait.
    """

    ranks: tuple[int, ...]
    factor: float
    for_data: bool
    waits: float

    @property
    def sentence(self) -> str:
        """Which ranks, why, and how long the others wait."""
        verb = "is" if len(self.ranks) == 1 else "are"
        cause = "in getting data" if self.for_data else "in compute"
        return f"{ranks(self.ranks)} {verb} {self.factor:.1f}x slower {cause}; the others wait {self.waits:.0%}"


def find(view: RunView) -> SlowRanks | None:
    """The slow ranks of a run whose ranks keep step through collectives; None if there are none, or too early.

    Ranks in lockstep all have the same samples/s. The slow rank is the one that hardly waits.
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
