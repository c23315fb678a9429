"""The environment of a new job, also on other hosts, and of the programs of batch systems that start its parts.

A job inherits no variables that make the process that starts it a rank of another job. Batch scripts and tasks of srun
have such variables too; a rank of ours that inherited them would be taken for that one: Lightning reads SLURM_PROCID
first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ring_notebook.launch.supervisor.tagged_output import TAGGED
from ring_notebook.rank.rank_variables import MASTER
from ring_notebook.rank.rendezvous import JOB

ADDED = "RING_JOB_VARIABLES"
"""Names, with spaces between, that a job has added to the environment of its ranks."""
GIVEN = "RING_GIVEN_VARIABLES"
"""Names, with spaces between, of variables that a host would have of its own, and that the user has set for the job."""
_OURS = (ADDED, GIVEN, MASTER, *JOB, "RING_MIN_NP", "RING_STATUS_FILE", TAGGED)
_PREFIXES = (
    "ALPS_APP_",
    "HYDI_",
    "JSM_NAMESPACE_",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_",
    "OMPI_COMM_WORLD_",
    "PALS_",
    "PMIX_",
    "PMI_",
    "SLURM_STEP",  # of the step; the variables of job and hosts stay
    "TORCHELASTIC_",
)
_OF_LAUNCHERS = (
    *("OMPI_APP_CTX_NUM_PROCS", "OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX", "OMPI_UNIVERSE_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GTIDS"),
    *("SLURM_TASK_PID", "SLURMD_NODENAME"),
    *("PBS_NODENUM", "PBS_TASKNUM", "PBS_VNODENUM"),
    *("FLUX_TASK_LOCAL_ID", "FLUX_TASK_RANK"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)
_NAMES = frozenset(_OURS + _OF_LAUNCHERS)


def without_outer_job(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the variables of the job whose rank this process is, if it is one."""
    drop = _NAMES.union(environment.get(ADDED, "").split())
    return {name: value for name, value in environment.items() if name not in drop and not name.startswith(_PREFIXES)}


# What batch systems, engines and logins set on each host for itself.
_OF_HOST = ("CUDA_VISIBLE_DEVICES", "TMPDIR", "XDG_RUNTIME_DIR")


def given_variables(env: Iterable[str]) -> dict[str, str]:
    """The variable that tells a supervisor of those in ``env``, set for the job, that other hosts have to take."""
    names = " ".join(name for name in _OF_HOST if name in env)
    return {GIVEN: names} if names else {}


def take_environment(job: Mapping[str, str], given: Iterable[str] = ()) -> None:
    """Give this process the environment of a ``job`` that another host has started.

    What is this host's own, such as its GPUs, it keeps, except variables ``given`` by the user.
    """
    own = {name: os.environ[name] for name in _OF_HOST if name in os.environ and name not in given}
    os.environ.clear()
    os.environ.update({**job, **own})


# What a batch system's program needs to find a job, and Python its libraries.
_OF_PROGRAMS = (
    *("BASH_FUNC_", "CONDA", "EGO_", "LC_", "LD_LIBRARY_PATH", "LMOD", "LS", "MODULE", "MUNGE", "PBS_"),
    *("PYTHON", "SBATCH_", "SLURM_"),
)
_NAMES_OF_PROGRAMS = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV")
_TOKENS = ("SLURM_JWT",)


def for_batch_system(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program of a batch system, which may send it to other hosts in clear text.

    It has no secrets of the user. What ranks need reaches them by another way.
    """
    kept = (name for name in environment if name.startswith(_OF_PROGRAMS) or name in _NAMES_OF_PROGRAMS)
    return {name: environment[name] for name in kept if name not in _TOKENS}


def with_variables_of_job(environment: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """``environment`` of a rank with what its job has ``added``, so that `without_outer_job` finds the names."""
    names = (name for name, value in added.items() if environment.get(name) != value)
    return {**environment, **added, ADDED: " ".join(names)}
