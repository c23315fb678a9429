"""The hosts that a batch system gave to this job: Slurm, PBS or LSF, read from the environment."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ring_notebook.launch.launchers.hosts import Host, expand_names
from ring_notebook.rank.rank_threads import slurm_counts


@dataclass(frozen=True, slots=True)
class Allocation:
    """What batch system ``system`` gave to ``job``: at least one host."""

    system: str
    job: str
    hosts: tuple[Host, ...]

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)

    def check_slots(self, n: int) -> None:
        """Raises ValueError when it has room for fewer than ``n`` ranks."""
        if n > self.slots:
            raise ValueError(f"{n} ranks do not fit into {self}; ask for a larger job, or start fewer ranks")

    def __str__(self) -> str:
        """Such as ``Slurm job 17: 4 slots on n1, n2``; of many hosts the first and the last."""
        names = [host.name for host in self.hosts]
        where = ", ".join(names) if len(names) <= 4 else f"{len(names)} hosts, {names[0]} to {names[-1]}"
        slots = "1 slot" if self.slots == 1 else f"{self.slots} slots"
        return f"{self.system} job{f' {self.job}' * bool(self.job)}: {slots} on {where}"


def find_allocation(env: Mapping[str, str] = os.environ, cpus_per_rank: int = 0) -> Allocation | None:
    """The allocation that this process is in; None outside of one.

    With ``cpus_per_rank``, a host of Slurm has one slot for so many of its cores, and at least one.

    Raises ValueError when its variables cannot be read, OSError when its host file cannot.
    """
    for system in _SYSTEMS:
        if env.get(system.variable):
            cores = slurm_counts(env.get("SLURM_JOB_CPUS_PER_NODE", "")) if system.name == "Slurm" else []
            hosts = tuple(system.hosts(env))
            if cpus_per_rank and cores:
                cores += cores[-1:] * (len(hosts) - len(cores))
                hosts = tuple(
                    Host(host.name, max(1, n // cpus_per_rank)) for host, n in zip(hosts, cores, strict=False)
                )
            if not hosts:
                raise ValueError(f"{system.variable}={env[system.variable]!r} names no host")
            return Allocation(system.name, env.get(system.job, ""), hosts)
    return None


def _slurm(env: Mapping[str, str]) -> list[Host]:
    names = expand_names(env["SLURM_JOB_NODELIST"])
    slots = slurm_counts(env.get("SLURM_TASKS_PER_NODE") or env.get("SLURM_JOB_CPUS_PER_NODE") or "1")
    slots += slots[-1:] * (len(names) - len(slots))
    return [Host(name, count) for name, count in zip(names, slots, strict=False)]


def _pbs(env: Mapping[str, str]) -> list[Host]:
    path = env["PBS_NODEFILE"]
    try:
        names = Path(path).read_text().split()
    except OSError as error:
        raise OSError(
            f"PBS_NODEFILE={path}, by which PBS names the hosts of this job: {error.strerror}; "
            "unset it outside of a job, or name the hosts with -H"
        ) from error
    return [Host(name, slots) for name, slots in Counter(names).items()]


def _lsf(env: Mapping[str, str]) -> list[Host]:
    words = env["LSB_MCPU_HOSTS"].split()
    hosts = [Host(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True)]
    # With jsrun, the job's script runs on a batch node: listed first, with one slot, and without ranks.
    has_batch_node = len(hosts) > 1 and hosts[0].slots == 1 and shutil.which("jsrun", path=env.get("PATH", ""))
    return hosts[1:] if has_batch_node else hosts


@dataclass(frozen=True, slots=True)
class _System:
    """A batch system: the ``variable`` that shows it, the variable of the ``job`` number, and how to read the hosts."""

    name: str
    variable: str
    job: str
    hosts: Callable[[Mapping[str, str]], list[Host]]


_SYSTEMS = (
    _System("Slurm", "SLURM_JOB_NODELIST", "SLURM_JOB_ID", _slurm),
    _System("PBS", "PBS_NODEFILE", "PBS_JOBID", _pbs),
    _System("LSF", "LSB_MCPU_HOSTS", "LSB_JOBID", _lsf),
)
