"""jsrun, by which LSF's Job Step Manager starts the ranks of Spectrum MPI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ring_notebook.launch.launchers.hosts import Host, with_equal_slots
from ring_notebook.launch.launchers.launcher import Launcher, exported_names

__all__ = ["Jsrun"]


class Jsrun(Launcher):
    """Each host is one resource set, with all of its cores and GPUs, that binds no rank: the ranks share them out."""

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
        return [self.path, *where, *whole, *variables, *extra, *program]
