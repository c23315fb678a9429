"""The environment of a new job: without what makes the process that starts it a rank of another job."""

from __future__ import annotations

from collections.abc import Mapping

from ring_notebook.rank.rank_variables import MASTER
from ring_notebook.rank.rendezvous import JOB

__all__ = ["ADDED", "with_variables_of_job", "without_outer_job"]

ADDED = "RING_JOB_VARIABLES"
"""Names, with spaces between, that a job has added to the environment of its ranks."""
_PREFIXES = ("PMI_", "PMIX_", "HYDI_", "OMPI_COMM_WORLD_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "TORCHELASTIC_")
_NAMES = frozenset({ADDED, MASTER, *JOB, "RING_MIN_NP", "RING_STATUS_FILE"})


def without_outer_job(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the variables of the job whose rank this process is, if it is one."""
    drop = _NAMES.union(environment.get(ADDED, "").split())
    return {name: value for name, value in environment.items() if name not in drop and not name.startswith(_PREFIXES)}


def with_variables_of_job(environment: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """``environment`` of a rank with what its job has ``added``, so that `without_outer_job` finds the names."""
    names = (name for name, value in added.items() if environment.get(name) != value)
    return {**environment, **added, ADDED: " ".join(names)}
