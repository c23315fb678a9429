"""Prepares the engines of a new cluster for runs, and checks that they are the ranks of one MPI job."""

from __future__ import annotations

from pathlib import Path

from ring_notebook.errors import ClusterError
from ring_notebook.notebook.engines import Engine, Engines

__all__ = ["prepare_engines"]

_RANK_SIDE = "ring_notebook.engine.setup:prepare"
_TIMEOUT = 120.0


def prepare_engines(engines: Engines, n: int, directory: Path, keep: bool) -> list[Engine]:
    """Prepare ``n`` engines of the cluster in ``directory``; returns what each of them is, by rank.

    Raises ClusterError when one is not the rank that it should be.
    """
    found = engines.call(_RANK_SIDE, str(directory), keep, ranks=range(n), timeout=_TIMEOUT)
    for rank, about in enumerate(found):
        if (about["rank"], about["size"]) != (rank, n):
            raise ClusterError(
                f"engine {rank} of {n} is rank {about['rank']} of {about['size']} in MPI: launcher and mpi4py belong "
                "to different MPIs; see RING_MPIEXEC"
            )
    return [Engine(about["rank"], about["host"], about["pid"], about["gpu"]) for about in found]
