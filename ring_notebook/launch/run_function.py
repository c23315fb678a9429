"""``run(fn, n=4)``: call a function on several ranks, results by rank (Horovod: ``horovod.run``)."""

from __future__ import annotations

import pickle
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from ring_notebook.analysis.job_failure import first_failure
from ring_notebook.errors import RunFailed
from ring_notebook.files.claimed_folders import claimed_folder
from ring_notebook.launch.hosts_of_job import find_allocation
from ring_notebook.launch.job import Job
from ring_notebook.launch.launchers.hosts import Host, check_slots, is_local, named_hosts, only_here
from ring_notebook.launch.printed_lines import RankFiles
from ring_notebook.launch.remote.network import address_towards
from ring_notebook.launch.supervisor.growth import NOT_ELASTIC, Elastic
from ring_notebook.machine.gpus import gpus
from ring_notebook.machine.hardware import cores
from ring_notebook.machine.own_python import code_command
from ring_notebook.protocol.sent_functions import dumps
from ring_notebook.rank.function_rank import ADDRESS, KEY, Outcome
from ring_notebook.rank.known_callers import Caller, KnownCallers


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    n: int | None = None,
    *,
    num_proc: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    env: Mapping[str, str] | None = None,
    mpi_args: Sequence[str] = (),
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ranks 0..n-1, each a fresh process; what each returned, by rank.

    ``fn`` may be a lambda or defined in a notebook; it, its arguments and results travel by cloudpickle.
    ``n`` (Horovod: ``num_proc``) defaults to the slots of the hosts, which are ``hosts`` ("a:2,b:2"),
    ``hostfile``, or the allocation of a batch system; without any of them it is the number of GPUs, or of cores.
    ``env`` adds variables, ``mpi_args`` options for mpiexec. With ``min_np`` the job is elastic: it continues
    without ranks that die or raise, while so many are left, and the results are those of the ranks that returned. With
    ``max_np`` ranks join it, in place of those and where the hosts have slots, up to so many; see `elastic.run`.

    Raises the exception that the first failing rank raised, caused by a RunFailed that holds the rank and its
    traceback; RunFailed alone when a rank died, and when it called ``sys.exit``; TypeError for a result that cannot be
    pickled; MPIMissingError when there is no MPI; ValueError for a ``min_np``
    out of range, and for hosts with too few slots.
    """
    return run_on_ranks(
        fn, args, kwargs or {}, n or num_proc, hosts, hostfile, env or {}, mpi_args, elastic_of(min_np, max_np)
    )


def elastic_of(min_np: int | None, max_np: int | None, cooldown: Sequence[float] | None = None) -> Elastic:
    """The rules of a job with these limits; not an elastic one where there are none."""
    if min_np is None and max_np is None:
        return NOT_ELASTIC
    rules = Elastic(1 if min_np is None else min_np, max_np or 0)
    return replace(rules, cooldown=(cooldown[0], cooldown[1])) if cooldown else rules


def run_on_ranks(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    n: int | None,
    hosts: str | None,
    hostfile: str | None,
    env: Mapping[str, str],
    mpi_args: Sequence[str],
    elastic: Elastic,
    python: str = sys.executable,
    output: Path | None = None,
    take: Callable[[Any], None] | None = None,
) -> list[Any]:
    """What `run` does, in ranks of the interpreter ``python``; what they print also goes to files in ``output``.

    ``take`` is called with each value that ranks report, one after the other; what it raises is raised when the job
    has ended.
    """
    named = named_hosts(hosts, hostfile)
    allocation = None if named else find_allocation()
    where = allocation.hosts if allocation else named
    size = n or sum(host.slots for host in where) or len(gpus()) or cores()
    if elastic is not NOT_ELASTIC and not 1 <= elastic.min_np <= size:
        raise ValueError(f"min_np must be between 1 and the {size} ranks of the job, got {elastic.min_np}")
    if elastic.max_np and elastic.max_np < size:
        raise ValueError(f"max_np must be at least the {size} ranks that the job begins with, got {elastic.max_np}")
    if named:
        check_slots(size, named)
    elif allocation and not only_here(where):
        allocation.check_slots(size)
    work = (sys.path, dumps((fn, tuple(args), dict(kwargs))))
    key = secrets.token_hex(32)  # text, because an environment variable carries it to the ranks
    files = RankFiles(output, size) if output else None
    outcomes: dict[int, Outcome] = {}
    taking, troubles = threading.Lock(), list[BaseException]()

    def serve(caller: Caller) -> None:
        rank = caller.recv()
        caller.send(work)
        while isinstance(message := caller.recv(), bytes):
            with taking:
                try:
                    if take is not None and not troubles:
                        take(pickle.loads(message))
                except BaseException as error:
                    troubles.append(error)
        outcomes[rank] = message

    with claimed_folder("run") as folder:
        callers = KnownCallers(_address(where, folder), key.encode(), serve)
        try:
            job = Job(
                code_command("from ring_notebook.rank.function_rank import main; sys.exit(main())", python),
                size,
                where,
                {**env, ADDRESS: callers.address, KEY: key},
                mpi_args,
                subprocess.DEVNULL,
                elastic,
                files=files,
            )
            with job.signals_passed_on(_stops()):
                code = job.wait()
        finally:
            callers.close()
            if files:
                files.close()
    if troubles:
        raise troubles[0]
    if elastic.min_np and code == 0:
        return [_result(outcome, size) for _, outcome in sorted(outcomes.items()) if not outcome.traceback]
    return _results(outcomes, size, code, job)


def _stops() -> list[signal.Signals]:
    """The signals of Ctrl-Z and `fg`, where this thread can handle them and the user's program does not."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in (signal.SIGTSTP, signal.SIGCONT) if signal.getsignal(number) is signal.SIG_DFL]


def _results(outcomes: Mapping[int, Outcome], size: int, code: int, job: Job) -> list[Any]:
    when = {failure.rank: failure.time for failure in job.verdict.failures}
    failed = sorted((o for o in outcomes.values() if o.traceback), key=lambda o: (o.aborted, when.get(o.rank, inf)))
    cause_of_job = first_failure(job.verdict.failures, size)
    died = cause_of_job is not None and not cause_of_job.aborted and cause_of_job.rank not in outcomes
    if failed and not (died and failed[0].aborted):  # ranks that only stopped because of one that died tell less
        first = failed[0]
        cause = RunFailed(f"rank {first.rank} of {size} raised:\n{first.traceback}")
        try:
            error = pickle.loads(first.value)
        except Exception:
            raise cause from None
        if isinstance(error, SystemExit):  # which would end this process without a word
            given = "" if error.code is None else repr(error.code)
            said = f"rank {first.rank} of {size} called sys.exit({given}); return from the function to end its work"
            raise RunFailed(said) from cause
        raise error from cause
    missing = sorted(set(range(size)) - {rank for rank, outcome in outcomes.items() if not outcome.traceback})
    if code:
        raise RunFailed(job.describe_failure() + (f"; no result from ranks {missing}" if missing else ""))
    if missing:
        raise RunFailed(
            f"no result from ranks {missing}, which exited with code 0; return from the function to end its work"
        )
    return [_result(outcomes[rank], size) for rank in range(size)]


def _result(outcome: Outcome, size: int) -> Any:
    try:
        return pickle.loads(outcome.value)
    except Exception as error:
        raise RunFailed(
            f"rank {outcome.rank} of {size} returned a value that cannot be unpickled here ({type(error).__name__}: "
            f"{error}); return numbers, arrays or dicts of them"
        ) from error


def _address(hosts: Sequence[Host], folder: Path) -> str | tuple[str, int]:
    """Where ranks reach this process: a socket file only this user can open, or an address the hosts see."""
    remote = [host.name for host in hosts if not is_local(host.name)]
    if not remote:
        return str(folder / "inbox")
    return address_towards(remote[0]), 0
