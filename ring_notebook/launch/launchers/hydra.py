"""Hydra, the mpiexec of MPICH and Intel MPI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ring_notebook.launch.launchers.hosts import Host, check_slots, only_here
from ring_notebook.launch.launchers.launcher import Launcher

__all__ = ["Hydra"]


class Hydra(Launcher):
    """It sends the whole environment to all hosts."""

    __slots__ = ()
    mpis = ("MPICH",)

    def command(
        self,
        program: Sequence[str],
        n: int,
        hosts: Sequence[Host] = (),
        extra: Sequence[str] = (),
        exported: Iterable[str] = (),
    ) -> list[str]:
        where = []
        if not only_here(hosts):
            check_slots(n, hosts)
            where = ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
        return [self.path, "-n", str(n), *where, *extra, *program]
