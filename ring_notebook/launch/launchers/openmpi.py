"""The mpiexec of Open MPI."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ring_notebook.launch.launchers.hosts import Host, check_slots, only_here
from ring_notebook.launch.launchers.launcher import Launcher, exported_names

__all__ = ["OpenMPI"]

# Open MPI refuses to start as root and to oversubscribe, and binds each rank to a core; none of that suits a
# notebook in a container. The PRTE names are those of Open MPI 5, the OMPI names those of 4.
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


class OpenMPI(Launcher):
    """It sends no variable to another host unless told to."""

    __slots__ = ()
    mpis = ("Open MPI",)

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
            where = ["--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
            where += [word for name in exported_names(exported) for word in ("-x", name)]
        return [self.path, "-n", str(n), *where, *extra, *program]

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
