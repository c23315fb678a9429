"""How many threads a rank computes with: its share of the cores of its host.

A process with torch takes all cores. Several on one host then wait for one another's threads, and small steps take many
times as long. OpenMP reads OMP_NUM_THREADS; torch, MKL and OpenBLAS follow it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ring_notebook.machine.hardware import cores_of
from ring_notebook.machine.os_calls import processors

OMP, MKL = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


def _share(own: int, shared: int, ranks: int, asked: int = 0) -> int:
    """The threads of one of ``ranks`` ranks on a host.

    ``own``: cores that it may use. ``shared``: cores of all these ranks together. ``asked``: cores for each task that
    the user has asked of a batch system; 0 for none.
    """
    return max(1, min(own, shared // ranks, asked or own))


def thread_variables(ranks: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that set the threads of ranks that this process starts; empty if the user has set them."""
    own = cores_of(processors())
    shared = min(own, _number(env, "SLURM_CPUS_ON_NODE") or own)
    return _variables(_share(own, shared, ranks, _number(env, "SLURM_CPUS_PER_TASK")), env)


def launched_thread_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that set the threads of this process, a rank that mpiexec or srun, our parent, has started.

    It may have bound this rank to cores. Empty where the user has set the threads, or the launcher does not say how
    many ranks are here.
    """
    ranks = _launched_here(env)
    if not ranks:
        return {}
    usable, of_launcher = processors(), processors(os.getppid())
    own = cores_of(usable)
    shared = cores_of(of_launcher) if usable <= of_launcher else own
    asked = _number(env, "SLURM_CPUS_PER_TASK") if "SLURM_PROCID" in env else 0
    # Slurm gives each task cores of its own; Slurm's own processes may be bound to others.
    return _variables(_share(own, max(shared, asked * ranks), ranks, asked), env)


def threads_started(ranks: int, here: bool) -> str:
    """One line on the threads of the ranks of a job; empty where there is nothing to choose.

    ``here`` says that all ranks are on this host.
    """
    threads = thread_variables(ranks).get(OMP, "")
    if ranks == 1 or not threads:
        return ""
    share = (
        f"{threads} thread{'s' * (threads != '1')} on this host's cores" if here else "its share of its host's cores"
    )
    return f"each of {ranks} ranks computes with {share}; set {OMP} for more or fewer"


def threads_set(env: Mapping[str, str] = os.environ) -> int:
    """The threads that this environment sets for a process, 0 where it sets none. In torch MKL's comes first."""
    return _number(env, MKL) or _number(env, OMP)


def _variables(threads: int, env: Mapping[str, str]) -> dict[str, str]:
    return {} if env.get(OMP) else {OMP: str(threads)}


def _launched_here(env: Mapping[str, str]) -> int:
    """The ranks of this job on this host, as MPICH, Open MPI, PALS or Slurm tell it; 0 where none does."""
    names = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    count_here = next((count for name in names if (count := _number(env, name))), 0)
    return count_here or slurm_tasks(env)


def slurm_tasks(env: Mapping[str, str]) -> int:
    """How many tasks of its step a task of Slurm has on its host, itself among them; 0 for another process."""
    hosts = slurm_counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    number = int(env.get("SLURM_NODEID") or 0)
    return hosts[number] if number < len(hosts) else 0


def slurm_counts(text: str) -> list[int]:
    """Slurm's short form of a number for each host: ``"2(x3),1"`` -> [2, 2, 2, 1]."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def _number(env: Mapping[str, str], name: str) -> int:
    """The number at the beginning of a variable, such as ``4`` in ``4,2``; 0 where there is none."""
    match = re.match(r"\d+", env.get(name, ""))
    return int(match[0]) if match else 0
