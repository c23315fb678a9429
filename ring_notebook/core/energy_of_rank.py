"""The energy counters that this rank reads: one rank of the run reads each CPU package and GPU of a host."""

from __future__ import annotations

from ring_notebook.core import world
from ring_notebook.machine.energy import GPU, PACKAGES, Gpu, Packages
from ring_notebook.machine.gpus import gpus


class EnergyOfRank:
    """This rank's counters, chosen at the first `joules` in a generation. ``lacks``: why one cannot be read."""

    def __init__(self) -> None:
        self._counters: dict[str, Packages | Gpu] | None = None

    def joules(self) -> dict[str, float]:
        """Joules since the first call in a generation, by name of each counter that can be read."""
        if self._counters is None:
            if not world.is_initialized():
                return {}
            self._counters = _chosen()
        read = {name: one.joules() for name, one in self._counters.items()}
        return {name: joules for name, joules in read.items() if joules is not None}

    @property
    def lacks(self) -> str:
        return "; ".join(one.lacks for one in (self._counters or {}).values() if one.lacks)


def _chosen() -> dict[str, Packages | Gpu]:
    here = world.current()
    chosen: dict[str, Packages | Gpu] = {PACKAGES: Packages()} if here.local_rank == 0 else {}
    names = gpus()
    if names:
        mates = world.prepare_host().mates  # of the job, of which the run may have a part
        own = mates.index(here.ranks[here.rank]) % len(names)
        before = [mates.index(rank) for rank in here.ranks[: here.rank] if rank in mates]
        if all(one % len(names) != own for one in before):
            # An engine's own GPU is its first; a script sees all of them in one order.
            chosen[GPU] = Gpu(names[own if here.run is None else 0])
    return chosen
