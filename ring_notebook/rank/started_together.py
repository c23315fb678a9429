"""Whether a process that finds no other ranks was started together with others: each would then train alone."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ring_notebook.errors import RingError


class _Start(NamedTuple):
    """A way to start processes: what it is called, its variables, and how to let them find each other."""

    launcher: str
    size: str
    rank: str
    connects: str = ""


# MPI launchers, and ours, are taken at their word: with `ringrun -np 1` the user wants one process.
_MPI = (
    _Start("mpiexec", "PMI_SIZE", "PMI_RANK"),
    _Start("mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    _Start("mpiexec of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
)
# A batch script has SLURM_NTASKS and SLURM_PROCID too, and is one process; only srun sets the tasks of a step.
_SRUN = _Start("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "`srun --mpi=pmi2 ...` (of Open MPI: --mpi=pmix), ")
_OTHERS = (_Start("torchrun", "WORLD_SIZE", "RANK"), _SRUN)


def started_several() -> tuple[str, int, int] | None:
    """The launcher that started this process together with others, its number among them, and their count.

    Launchers of ranks only: torchrun's variables are also set by hand. None for a process that was started alone.
    """
    for start in (*_MPI, _SRUN):
        if _has_several(start, os.environ) and os.environ[start.rank].isdigit():
            return start.launcher, int(os.environ[start.rank]), int(os.environ[start.size])
    return None


def check_alone(env: Mapping[str, str] = os.environ) -> None:
    """Raise RingError when the launcher of this process, which found itself alone, has started several."""
    _check_hosts_of_torchrun(env)
    started = [start for start in _MPI if _is_set(start, env)]
    for start in started or _OTHERS:
        if _has_several(start, env):
            n = int(env[start.size])
            raise RingError(
                f"process {env[start.rank]} of {n} that {start.launcher} started ({start.size}={n}) found no other "
                f"ranks: expected {n} ranks, got {n} jobs of one rank, each of which would train alone. Start them "
                f"with {start.connects}`ringrun -np {n} ...`, or the mpiexec that belongs to the MPI of mpi4py; a "
                "process that is to be alone with `ringrun -np 1 ...`"
            )


def _check_hosts_of_torchrun(env: Mapping[str, str]) -> None:
    """Refuse ranks that torchrun has started on several hosts without RING_RENDEZVOUS.

    Its own store cannot connect them: anyone who reaches its port can read and write it.
    """
    hosts = env.get("GROUP_WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" not in env or hosts == "1":
        return
    n, each = env.get("WORLD_SIZE", "N"), env.get("LOCAL_WORLD_SIZE", "N")
    raise RingError(
        f"rank {env.get('RANK', '?')}: torchrun started {n} ranks on {hosts} hosts, and connects hosts by a store that "
        "is open to anyone who reaches its port: expected RING_RENDEZVOUS=HOST:PORT, an address of rank 0's host, and "
        "RING_RENDEZVOUS_SECRET in the environment of torchrun on every host. Or start the script from one host with "
        f"`ringrun -np {n} -H HOST:{each},HOST:{each} python SCRIPT`, which starts the others over ssh, or with "
        f"`ringrun -np {n} python SCRIPT` in an allocation of Slurm, PBS or LSF"
    )


def _has_several(start: _Start, env: Mapping[str, str]) -> bool:
    return _is_set(start, env) and int(env[start.size]) > 1 and not (start is _SRUN and _in_terminal_of_srun(env))


def _in_terminal_of_srun(env: Mapping[str, str]) -> bool:
    """Whether this process was started in the shell of ``srun --pty``, whose other tasks have ended at once.

    A later srun in that shell, which starts several, inherits the variable; its tasks have no terminal.
    """
    if "SLURM_PTY_PORT" not in env:
        return False
    pid, tty = os.getpid(), 1
    with contextlib.suppress(OSError, ValueError):  # the processes of others are hidden
        while pid > 1:
            _, name, rest = re.split(r" \((.*)\) ", Path(f"/proc/{pid}/stat").read_text(), flags=re.DOTALL)
            if name == "slurmstepd":
                return bool(tty) and os.getppid() != pid
            parent, _, _, tty = map(int, rest.split()[1:5])
            pid = parent
    return True


def _is_set(start: _Start, env: Mapping[str, str]) -> bool:
    return env.get(start.size, "").isdigit() and start.rank in env
