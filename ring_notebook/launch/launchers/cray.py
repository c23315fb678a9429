"""The launchers of HPE Cray systems: the mpiexec of PALS, and aprun of the older ALPS."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ring_notebook.launch.launchers.hosts import Host, only_here, with_equal_slots
from ring_notebook.launch.launchers.launcher import Launcher

__all__ = ["Aprun", "Pals"]


class Pals(Launcher):
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
            used, each = with_equal_slots(n, hosts, "the mpiexec of PALS")
            where = ["--ppn", str(each), "--hosts", ",".join(host.name for host in used)]
        return [self.path, "-n", str(n), *where, *extra, *program]


class Aprun(Launcher):
    """It sends the whole environment to all hosts, whose numbers it takes."""

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
            used, each = with_equal_slots(n, hosts, "aprun")
            where = ["-N", str(each), "-L", ",".join(_number(host) for host in used)]
        return [self.path, "-n", str(n), *where, *extra, *program]


def _number(host: Host) -> str:
    match = re.fullmatch(r"(?:nid)?0*(\d+)", host.name)
    if match is None:
        raise ValueError(f"aprun takes nodes by their numbers, such as 12 or nid00012, got {host.name!r}")
    return match[1]
