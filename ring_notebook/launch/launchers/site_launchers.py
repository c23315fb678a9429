"""The launchers that sites have: mpiexec of several MPIs, and those of batch systems."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

from ring_notebook.launch.launchers.hosts import Host, check_slots, only_here, with_equal_slots
from ring_notebook.launch.launchers.launcher import Launcher, exported_names, loaded_mpi


def _number_and_list(n: int, hosts: Sequence[Host], option: str) -> list[str]:
    if only_here(hosts):
        return ["-n", str(n)]
    check_slots(n, hosts)
    return ["-n", str(n), option, ",".join(map(str, hosts))]


class Hydra(Launcher):
    """The mpiexec of MPICH and Intel MPI, which sends the whole environment to all hosts."""

    mpis = ("MPICH",)

    def options(self, n: int, hosts: Sequence[Host], exported: Iterable[str]) -> list[str]:
        return _number_and_list(n, hosts, "-hosts")


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
    """The mpiexec of Open MPI, which sends no variable to another host unless told to."""

    mpis = ("Open MPI",)

    def options(self, n: int, hosts: Sequence[Host], exported: Iterable[str]) -> list[str]:
        variables = [] if only_here(hosts) else [word for name in exported_names(exported) for word in ("-x", name)]
        return [*_number_and_list(n, hosts, "--host"), *variables]

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}


class Pals(Launcher):
    """The mpiexec of HPE Cray systems, which sends the whole environment to all hosts."""

    mpis = ("MPICH",)

    def options(self, n: int, hosts: Sequence[Host], exported: Iterable[str]) -> list[str]:
        if only_here(hosts):
            return ["-n", str(n)]
        used, each = with_equal_slots(n, hosts, "the mpiexec of PALS")
        return ["-n", str(n), "--ppn", str(each), "--hosts", ",".join(host.name for host in used)]


class Aprun(Launcher):
    """The launcher of older Cray systems (ALPS): sends the whole environment to all hosts, whose numbers it takes."""

    mpis = ("MPICH",)

    def options(self, n: int, hosts: Sequence[Host], exported: Iterable[str]) -> list[str]:
        if only_here(hosts):
            return ["-n", str(n)]
        used, each = with_equal_slots(n, hosts, "aprun")
        return ["-n", str(n), "-N", str(each), "-L", ",".join(_number(host) for host in used)]


def _number(host: Host) -> str:
    match = re.fullmatch(r"(?:nid)?0*(\d+)", host.name)
    if match is None:
        raise ValueError(f"aprun takes nodes by their numbers, such as 12 or nid00012, got {host.name!r}")
    return match[1]


class Jsrun(Launcher):
    """The launcher of LSF's Job Step Manager, for ranks of Spectrum MPI.

    Each host is one resource set, with all of its cores and GPUs, that binds no rank: the ranks share them out.
    """

    mpis = ("Open MPI",)

    def options(self, n: int, hosts: Sequence[Host], exported: Iterable[str]) -> list[str]:
        sets, each = 1, n
        if hosts:
            used, each = with_equal_slots(n, hosts, "jsrun")
            sets = len(used)
        if n != sets * each:
            raise ValueError(
                f"jsrun starts the same number of ranks on each host, got {n} ranks for {sets} hosts of {each} slots; "
                f"start {sets * each} ranks"
            )
        where = ["--nrs", str(sets), "--rs_per_host", "1", "--tasks_per_rs", str(each)]
        whole = ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", "--bind", "none"]
        variables = [word for name in exported_names(exported) for word in ("-E", name)]
        return [*where, *whole, *variables]


# How Slurm connects the ranks of each MPI. With none of them every rank would be a job of size 1.
_PMI = {"MPICH": "pmi2", "Open MPI": "pmix"}


class Srun(Launcher):
    """Slurm's launcher, within an allocation; sends the whole environment to all hosts."""

    mpis = ("MPICH", "Open MPI")

    def options(self, n: int, hosts: Sequence[Host], exported: Iterable[str]) -> list[str]:
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
        return [f"--ntasks={n}", *where, *flags]


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
