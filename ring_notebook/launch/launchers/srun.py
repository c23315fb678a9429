"""Slurm's srun, within an allocation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from ring_notebook.launch.launchers.hosts import Host, check_slots
from ring_notebook.launch.launchers.launcher import Launcher
from ring_notebook.launch.launchers.mpi_library import loaded_mpi

__all__ = ["Srun"]

# How Slurm connects the ranks of each MPI. With none of them every rank would be a job of size 1.
_PMI = {"MPICH": "pmi2", "Open MPI": "pmix"}


class Srun(Launcher):
    """It sends the whole environment to all hosts."""

    __slots__ = ()
    mpis = ("MPICH", "Open MPI")

    def command(
        self,
        program: Sequence[str],
        n: int,
        hosts: Sequence[Host] = (),
        extra: Sequence[str] = (),
        exported: Iterable[str] = (),
    ) -> list[str]:
        where = []
        if hosts:
            check_slots(n, hosts)
            where = _placement(n, hosts)
        flags = [
            f"--mpi={_PMI[loaded_mpi()]}",
            "--kill-on-bad-exit=1",
            "--disable-status",  # pass the first SIGINT on
            "--input=0",  # standard input goes to rank 0
        ]
        return [self.path, f"--ntasks={n}", *where, *flags, *extra, *program]


def _placement(n: int, hosts: Sequence[Host]) -> list[str]:
    """Options that fill the hosts in order.

    Not the arbitrary distribution: Slurm then does not tell MPI which ranks share a host (22.05, PMI-2).
    """
    ends = list(accumulate(host.slots for host in hosts))
    used = hosts[: next(index for index, end in enumerate(ends, start=1) if end >= n)]
    slots = {host.slots for host in used}
    # With different numbers of slots Slurm fills the hosts as it has allocated them.
    distribution = f"plane={slots.pop()}" if len(slots) == 1 else "block"
    names = ",".join(host.name for host in used)
    return [f"--distribution={distribution}", f"--nodes={len(used)}", f"--nodelist={names}"]
