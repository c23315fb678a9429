"""Our own supervisor over several hosts: an agent on each starts the ranks of MPICH, and nothing of ours listens."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ring_notebook.launch.launchers.hosts import Host, check_slots
from ring_notebook.launch.launchers.launcher import Launcher
from ring_notebook.own_python import module_command

__all__ = ["OverHosts"]


@dataclass(frozen=True, slots=True)
class OverHosts(Launcher):
    """It sends the whole environment to all hosts, over the streams of ssh or what a batch system has for it."""

    mpis = ("MPICH",)
    foreign = False

    path: str = sys.executable

    def __str__(self) -> str:
        return "the supervisor of ring_notebook"

    def command(
        self,
        program: Sequence[str],
        n: int,
        hosts: Sequence[Host] = (),
        extra: Sequence[str] = (),
        exported: Iterable[str] = (),
    ) -> list[str]:
        check_slots(n, hosts)
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        return module_command("ring_notebook.launch.remote.job_of_hosts", str(n), named, *program, python=self.path)
