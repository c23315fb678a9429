"""Prepares new engines for runs, checks which ranks they are, and lets the engines of a cluster find each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.ranks.process_life import began
from ring_notebook.notebook.engines import Engine, Engines

__all__ = ["meet", "prepare_engines"]

_SETUP = "ring_notebook.engine.setup"
_TIMEOUT = 120.0


def prepare_engines(
    engines: Engines, n: int, directory: Path, keep: bool, replaceable: bool, ranks: Sequence[int] | None = None
) -> list[Engine]:
    """Prepare the engines of the cluster of ``n`` in ``directory``, or those of ``ranks``; returns what each is.

    With ``replaceable`` they have yet to `meet`. Raises ClusterError when one is not the rank that it should be.
    """
    wanted = list(range(n)) if ranks is None else list(ranks)
    found = engines.call(f"{_SETUP}:prepare", str(directory), keep, replaceable, ranks=wanted, timeout=_TIMEOUT)
    for rank, about in zip(wanted, found, strict=True):
        if (about["rank"], about["size"]) != (rank, n):
            raise ClusterError(
                f"engine {rank} of {n} is rank {about['rank']} of {about['size']} in MPI: launcher and mpi4py belong "
                "to different MPIs; see RING_MPIEXEC"
            )
    return [
        Engine(
            about["rank"],
            about["host"],
            about["pid"],
            about["gpu"],
            began(about["pid"]) if replaceable else 0,
            about["threads"],
        )
        for about in found
    ]


def meet(engines: Engines, ranks: Sequence[int], generation: int) -> None:
    """Have these engines, all that live, form again, in new ring memory. Their variables stay.

    ``generation`` is greater than that of any call before, whatever became of it.
    """
    engines.call(f"{_SETUP}:form", generation, list(ranks), ranks=ranks, timeout=_TIMEOUT)
