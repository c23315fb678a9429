"""``horovod.run``: Horovod's keywords, each with its effect here, over the launch that ``ring_notebook.run`` makes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ring_notebook.horovod.as_horovod import variables
from ring_notebook.launch.launchers.hosts import named_hosts, only_here
from ring_notebook.launch.run_function import elastic_of, run_on_ranks
from ring_notebook.launch.supervisor.growth import NOT_ELASTIC


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks; what each returned, by rank (Horovod: ``horovod.run``).

    In the ranks ``import horovod`` means Ring Notebook. ``np``, ``min_np`` and ``max_np`` are Horovod's old names of
    ``num_proc``, ``min_num_proc`` and ``max_num_proc``. Raises as `ring_notebook.run` does.

    min_num_proc: the job is elastic, and continues without ranks that fail while so many are left.
    reset_limit: with 0 the job ends with its first failure; other limits are ignored.
    hosts, hostfile: ``"a:2,b:2"``, or a file of such lines; one of them. Default: the allocation of a batch system, or
        this host.
    output_filename: a folder for what the ranks print, also in files ``rank.<N>/stdout`` and ``stderr``.
    mpi_args: more options for mpiexec, quoted as for a shell.
    executable: the Python of the ranks, which must have Ring Notebook.
    max_num_proc: ranks join in place of those that fail, and where the hosts have slots, up to so many.
    cooldown_range: for how many seconds a host rests after its first failure, and at most.
    slots: without effect: no host is discovered.
    use_gloo, use_mpi: without effect: there is one core. Both at once raise ValueError, as in Horovod.
    start_timeout, disable_cache, verbose: without effect: nothing is probed before the ranks start, and a job that
        cannot start says why. RING_START_TIMEOUT limits the start by an mpiexec or srun.
    ssh_port, ssh_identity_file, network_interface: without effect on this host. With other hosts they raise
        ValueError, because ssh and MPI take them from settings of their own.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError("horovod.run takes hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("horovod.run takes use_gloo or use_mpi, not both")
    if not only_here(named_hosts(hosts, hostfile)):
        _refuse(ssh_port, "ssh_port", "set Port for these hosts in ~/.ssh/config")
        _refuse(ssh_identity_file, "ssh_identity_file", "set IdentityFile for these hosts in ~/.ssh/config")
        _refuse(network_interface, "network_interface", "set it for MPI, such as UCX_NET_DEVICES for MPICH")
    n = np if np is not None and num_proc == 1 else num_proc
    if n < 1:
        raise ValueError(f"num_proc must be at least 1, got {n}")
    least = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    return run_on_ranks(
        func,
        args,
        kwargs or {},
        n,
        hosts,
        hostfile,
        variables(),
        shlex.split(mpi_args or ""),
        NOT_ELASTIC if reset_limit == 0 else elastic_of(least, most, cooldown_range),
        executable or sys.executable,
        None if output_filename is None else Path(output_filename),
    )


def _refuse(value: Any, name: str, instead: str) -> None:
    if value is not None:
        raise ValueError(f"horovod.run cannot set {name} for other hosts; {instead}")
