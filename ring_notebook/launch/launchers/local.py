"""Our own supervisor, which starts the ranks of an elastic job on this host without MPI."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ring_notebook.launch.launchers.hosts import Host, check_slots, only_here
from ring_notebook.launch.launchers.launcher import Launcher

__all__ = ["Local"]


@dataclass(frozen=True, slots=True)
class Local(Launcher):
    """The job continues without ranks that fail while at least ``min_np`` are left."""

    path: str = sys.executable
    min_np: int = 1

    def supervised(self, program: Sequence[str]) -> list[str]:
        return list(program)

    def command(
        self,
        program: Sequence[str],
        n: int,
        hosts: Sequence[Host] = (),
        extra: Sequence[str] = (),
        exported: Iterable[str] = (),
    ) -> list[str]:
        if not only_here(hosts):
            raise ValueError(f"the local launcher starts ranks on this host only, got {hosts[-1].name}")
        if hosts:
            check_slots(n, hosts)
        module = "ring_notebook.launch.supervisor.supervisor"
        return [self.path, "-m", module, str(n), str(self.min_np), *program]
