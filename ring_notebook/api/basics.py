"""Horovod's functions without tensors, and its constants: init, shutdown, ranks, sizes, barrier, join, *_built."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.process_sets import (
    ProcessSet,
    _get_process_set_ids_and_ranks,  # noqa: F401 - Horovod's tests ask `mpi_ops._basics`, which is this module
    add_process_set,
    global_process_set,
    remove_process_set,
)
from ring_notebook.config import config
from ring_notebook.core import trace, world
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.core.membership import RanksOrComm

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "barrier",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def init(
    comm: RanksOrComm | None = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Make this process a rank (Horovod: ``init``). If it is one already, only registers new process sets.

    ``comm`` is None for all processes of the job (one process if no launcher started it), a list of their ranks, or an
    mpi4py communicator. ``process_sets`` are registered in order; "dynamic" is Horovod's value to allow
    `add_process_set` later, which is always allowed here. May be called again after `shutdown`, any number of times.
    Raises ValueError, and registers none of them, where a set is wrong or there twice.
    """
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'process_sets must be a list of process sets or "dynamic", got {process_sets!r}')
    world.init(comm)
    if config().timeline and not trace.active():
        trace.start(config().timeline)
    added: list[ProcessSet] = []
    try:
        for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            if not process_set.registered():
                added.append(add_process_set(process_set))
    except ValueError:
        for process_set in reversed(added):
            remove_process_set(process_set)
        raise


def shutdown() -> None:
    """Leave the group of ranks (Horovod: ``shutdown``). Does nothing before `init`.

    Collectives of other ranks that wait for this one raise CollectiveAborted. This call raises it too if an operation
    on a GPU failed after its call had returned, and no later call has raised.
    """
    world.close()


def is_initialized() -> bool:
    """Whether `init` has been called and `shutdown` has not."""
    return world.is_initialized()


def rank() -> int:
    """Index of this process among all. Raises NotInitializedError, a ValueError, before `init`."""
    return world.current().rank


def size() -> int:
    """Number of processes. Raises NotInitializedError before `init`."""
    return world.current().size


def local_rank() -> int:
    """Index of this process among those of its host."""
    return world.current().local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return world.current().local_size


def cross_rank() -> int:
    """Index of this host among those that have a process with this `local_rank`."""
    return world.current().cross_rank


def cross_size() -> int:
    """Number of hosts that have a process with this `local_rank`."""
    return world.current().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return len(set(Counter(world.current().hosts).values())) == 1


def mpi_threads_supported() -> bool:
    """Whether MPI is in use and lets several threads call it. Raises ValueError before `init`."""
    world.current()
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and mpi.Query_thread() == mpi.THREAD_MULTIPLE


def mpi_enabled() -> bool:
    """Whether MPI is initialized in this process, after `init`."""
    mpi = sys.modules.get("mpi4py.MPI")
    return world.is_initialized() and mpi is not None and bool(mpi.Is_initialized())


def mpi_built() -> bool:
    """True: the core can use MPI, which it finds at run time."""
    return True


def gloo_enabled() -> bool:
    """False: Gloo is not used."""
    return False


def gloo_built() -> bool:
    """False: Gloo is not used."""
    return False


def nccl_built() -> int:
    """0: nothing is compiled against NCCL, which is found at run time (Horovod returns its version number)."""
    return 0


def ddl_built() -> bool:
    """False: IBM DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """False: nothing is compiled against CUDA, whose driver is found at run time."""
    return False


def rocm_built() -> bool:
    """False: tensors on AMD's GPUs are reduced in host memory."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the collectives of this rank until `stop_timeline`; all ranks call it.

    ``mark_cycles`` is Horovod's argument and has no effect: there are no cycles.
    """
    trace.start(file_path)


def stop_timeline() -> None:
    """End the recording that `start_timeline` began; all ranks call it.

    Rank 0 writes a Chrome trace of all ranks to ``file_path`` (open it in https://ui.perfetto.dev), and every rank
    writes its own trace next to it, with ``.rank<N>`` before the suffix.
    """
    trace.stop()


_joins = 0


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of ``process_set`` have called it (Horovod: ``barrier``).

    Raises CollectiveAborted when a rank failed or left, CollectiveTimeout after ``RING_TIMEOUT`` seconds.
    """
    check_process_set(process_set)
    process_set.in_turn.barrier().wait()


def join(device: int = -1) -> int:
    """Wait until all ranks have no more data; returns the rank that joined last, on all ranks (Horovod: ``join``).

    Until all have joined, this rank contributes zeros to the others' allreduces (their Average still divides by the
    full size). An allgather or a broadcast raises CollectiveMismatch on the ranks that call it; this rank stays joined.
    ``device`` is Horovod's argument and has no effect.
    """
    global _joins
    work = global_process_set.in_turn.join()
    work.wait()
    _joins += 1
    return work.last_rank()


def joins() -> int:
    """How often all ranks have joined. Joined ranks take no part in what the others agree on meanwhile."""
    return _joins
