"""``run(fn, n=4)``: call a function on several ranks, results by rank (Horovod: ``horovod.run``)."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import cloudpickle

from ring_notebook.errors import RunFailed
from ring_notebook.files.claimed_folders import claimed_folder
from ring_notebook.gpus import gpus
from ring_notebook.hardware import cores
from ring_notebook.launch.allocation import find_allocation
from ring_notebook.launch.job import Job
from ring_notebook.launch.launchers.hosts import Host, check_slots, is_local, named_hosts
from ring_notebook.launch.rank_output import RankFiles
from ring_notebook.launch.supervisor.growth import NOT_ELASTIC, Elastic
from ring_notebook.own_python import code_command
from ring_notebook.rank.function_rank import ADDRESS, KEY, Outcome

_LAST_WORDS = 1.0
"""Seconds to read what a rank has sent before it ended."""
_SECONDS_TO_GREET = 10
"""For each message in which a caller proves that it has the key, and says its rank."""


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
    traceback; RunFailed alone when a rank died; MPIMissingError when there is no MPI; ValueError for a ``min_np``
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
) -> list[Any]:
    """What `run` does, in ranks of the interpreter ``python``; what they print also goes to files in ``output``."""
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
    work = (sys.path, cloudpickle.dumps((fn, tuple(args), dict(kwargs))))
    key = secrets.token_hex(32)  # text, because an environment variable carries it to the ranks
    files = RankFiles(output, size) if output else None
    with claimed_folder("run") as folder:
        inbox = _Inbox(_address(where, folder), key.encode(), work)
        try:
            job = Job(
                code_command("from ring_notebook.rank.function_rank import main; sys.exit(main())", python),
                size,
                where,
                {**env, ADDRESS: inbox.address, KEY: key},
                mpi_args,
                subprocess.DEVNULL,
                elastic,
                files=files,
            )
            code = job.wait()
        finally:
            inbox.close()
            if files:
                files.close()
    if elastic.min_np and code == 0:
        return [pickle.loads(outcome.value) for _, outcome in sorted(inbox.outcomes.items()) if not outcome.traceback]
    return _results(inbox.outcomes, size, code, job)


class _Inbox:
    """Sends the function to each rank that connects and takes the outcome, on threads of its own."""

    def __init__(self, address: str | tuple[str, int], key: bytes, work: tuple[list[str], bytes]) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._key = key
        self._work = work
        self._listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self._listener.bind(address)
        self._listener.listen()
        self._listener.setblocking(False)
        self._receivers: list[tuple[threading.Thread, Connection[Any, Any]]] = []
        self._ranks: set[Connection[Any, Any]] = set()
        """The callers that have the key."""
        self._closing = os.eventfd(0)
        self._acceptor = threading.Thread(target=self._accept, name="ring-run-inbox", daemon=True)
        self._acceptor.start()

    @property
    def address(self) -> str:
        """The path of the socket file, or ``host:port``."""
        at = self._listener.getsockname()
        return at if isinstance(at, str) else f"{at[0]}:{at[1]}"

    def close(self) -> None:
        """Take what the ranks have sent, all of which have ended, and stop."""
        os.eventfd_write(self._closing, 1)
        self._acceptor.join()
        os.close(self._closing)
        self._listener.close()
        for receiver, caller in self._receivers:
            receiver.join(_LAST_WORDS if caller in self._ranks else 0.0)
            if receiver.is_alive():
                # A stranger, or a process that the rank has forked: it holds the connection and sends nothing.
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(caller.fileno())) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                receiver.join()

    def _accept(self) -> None:
        poll = select.poll()
        for descriptor in (self._listener.fileno(), self._closing):
            poll.register(descriptor, select.POLLIN)
        while self._listener.fileno() in dict(poll.poll()):  # what has connected before the end is taken first
            with contextlib.suppress(OSError):  # the caller has hung up already
                caller = Connection(_with_timeout(self._listener.accept()[0], _SECONDS_TO_GREET).detach())
                receiver = threading.Thread(target=self._serve, args=(caller,), daemon=True)
                receiver.start()
                self._receivers.append((receiver, caller))

    def _serve(self, caller: Connection[Any, Any]) -> None:
        # The key was wrong, or the rank has died: the job reports how.
        with caller, contextlib.suppress(AuthenticationError, EOFError, OSError):
            deliver_challenge(caller, self._key)
            answer_challenge(caller, self._key)
            rank = caller.recv()
            self._ranks.add(caller)
            _with_timeout(socket.socket(fileno=os.dup(caller.fileno())), 0).close()
            caller.send(self._work)
            self.outcomes[rank] = caller.recv()


def _with_timeout(connection: socket.socket, seconds: int) -> socket.socket:
    """``connection``, whose receives and sends fail after so many ``seconds``; 0: never."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
    return connection


def _results(outcomes: Mapping[int, Outcome], size: int, code: int, job: Job) -> list[Any]:
    when = {failure.rank: failure.time for failure in job.verdict.failures}
    failed = sorted((o for o in outcomes.values() if o.traceback), key=lambda o: (o.aborted, when.get(o.rank, inf)))
    if failed:
        first = failed[0]
        cause = RunFailed(f"rank {first.rank} of {size} raised:\n{first.traceback}")
        try:
            error = pickle.loads(first.value)
        except Exception:
            raise cause from None
        raise error from cause
    if code or len(outcomes) < size:
        missing = sorted(set(range(size)) - set(outcomes))
        raise RunFailed(f"{job.describe_failure()}; no result from ranks {missing}")
    return [pickle.loads(outcomes[rank].value) for rank in range(size)]


def _address(hosts: Sequence[Host], folder: Path) -> str | tuple[str, int]:
    """Where ranks reach this process: a socket file only this user can open, or an address the hosts see."""
    remote = [host.name for host in hosts if not is_local(host.name)]
    if not remote:
        return str(folder / "inbox")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((remote[0], 9))  # sends nothing; the kernel picks the route, and with it our address
        return probe.getsockname()[0], 0
