"""Starts engines again, and has all that live use ring memory together; the others keep their variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from ring_notebook.notebook.cluster.ranks.death import Death
from ring_notebook.notebook.cluster.ranks.lost_ranks import LostRanks
from ring_notebook.notebook.cluster.ranks.prepare_engines import meet, prepare_engines
from ring_notebook.notebook.engines import Engines

__all__ = ["NOT_HERE", "end", "heal"]

NOT_HERE = (
    "`%ring heal` needs all engines on one host, under our own supervisor: all of these end when one dies; use "
    "`%ring restart --rerun`"
)
"""What to say where engines cannot be started one by one."""

_START_TIMEOUT = 120.0
_FORGET_TIMEOUT = 10.0


def heal(
    engines: Engines,
    lost: LostRanks,
    request: Callable[[Literal["start", "end"], int], None],
    ranks: Sequence[int],
    directory: Path,
    keep: bool,
    generation: int,
) -> None:
    """Start the engines of ``ranks`` again, ending those of them that live, and have all `meet` in ``generation``.

    ``request`` asks the supervisor. Whatever fails, or interrupts it: ``ranks`` have died then as before, and another
    call may start them. Raises ClusterError, with the story of a rank that died meanwhile.
    """
    deaths = lost.deaths
    n = len(engines.all)
    try:
        for rank in ranks:
            lost.expect(rank)
            request("end", rank)
            engines.forget(rank, _FORGET_TIMEOUT)
            request("start", rank)
        engines.wait_for(ranks, _START_TIMEOUT, lambda: _failed(lost, ranks))
        for engine in prepare_engines(engines, n, directory, keep, True, ranks):
            engines.all[engine.rank] = engine
            lost.watch([engine])
        meet(engines, engines.living(), generation)
    except BaseException:
        for rank in ranks:
            end(lost, request, rank, "was ended and not started again", deaths.get(rank))
        raise


def end(
    lost: LostRanks,
    request: Callable[[Literal["start", "end"], int], None],
    rank: int,
    how: str,
    before: Death | None = None,
) -> None:
    """End the engine of ``rank``, which has died then: ``before``, or as ``how`` says."""
    lost.expect(rank)
    request("end", rank)
    lost.add(rank, before or Death(f"rank {rank} {how}", rank, advice="`%ring heal` starts it again"))


def _failed(lost: LostRanks, ranks: Sequence[int]) -> str:
    """Why one of ``ranks`` has ended instead of starting; empty while none has."""
    for rank in ranks:
        if death := lost.ended(rank):
            return f"{death.reason} while it started; `%ring heal` tries again.\nThe end of its log:\n{death.log}"
    return ""
