"""Our own supervisor, which starts ranks on this host: those of MPICH, or those of an elastic job without MPI."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ring_notebook.launch.launchers.hosts import Host, only_here
from ring_notebook.launch.launchers.launcher import Launcher
from ring_notebook.launch.launchers.limits import too_many_ranks
from ring_notebook.own_python import module_command

__all__ = ["Local"]


@dataclass(frozen=True, slots=True)
class Local(Launcher):
    """With a ``min_np`` the job is elastic: it continues without ranks that fail while so many are left.

    With a named pipe for ``requests`` the ranks are a notebook's engines: those that live continue, and others are
    started again when `engine_supervisor.request` asks for it.
    """

    mpis = ("MPICH",)
    foreign = False

    path: str = sys.executable
    min_np: int = 0
    requests: str = ""

    def __str__(self) -> str:
        return "the supervisor of ring_notebook"

    @property
    def starts_again(self) -> bool:
        return bool(self.requests)

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
        if problem := too_many_ranks(n):
            raise ValueError(problem)
        module, option = "supervisor", str(self.min_np)
        if self.requests:
            module, option = "engine_supervisor", self.requests
        return module_command(f"ring_notebook.launch.supervisor.{module}", str(n), option, *program, python=self.path)
