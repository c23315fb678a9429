"""Ranks without MPI: a test's body runs once per rank, in threads of this process or in processes of its own."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from itertools import combinations
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

from ring_notebook.core.communicator import Communicator
from ring_notebook.core.native import core, options
from ring_notebook.errors import CollectiveAborted

__all__ = ["LAUNCHERS", "LIMIT", "Dead", "Seat", "as_hosts", "as_processes", "as_threads", "on_ranks"]

LIMIT = 100.0
"""Seconds until ranks that have not returned count as stuck."""

ARENA = 256 << 20


@dataclass
class Seat:
    """What the body of a rank gets: its place in the ring memory, and a way to open generations."""

    ring_memory: Any
    rank: int
    size: int
    hosts: tuple[int, ...] = ()
    """The host of each rank, where ranks pretend to be on several; sockets join them."""
    link: Any = None
    barrier: Any = None
    devices: Any = None
    """A native ``Devices``, of tests that run on devices too."""
    log: Any = None
    """A native ``OperationLog``, of tests that read it."""
    opened: list[Communicator] = field(default_factory=list)

    make_devices: ClassVar[Callable[[], Any] | None] = None
    """For tests that run on devices too; None where tensors lie in host memory."""

    def meet(self) -> None:
        """Return when all ranks are here. They tell each other without the core, so no abort can come in between."""
        self.barrier.wait(LIMIT / 2)

    def open(
        self,
        generation: int = 1,
        ranks: Sequence[int] | None = None,
        timeout: float = LIMIT / 2,
        devices: Any = None,
        **settings: Any,
    ) -> Communicator:
        """Open a generation over all ranks, or over those of ``ranks``; each of them must call it.

        ``settings`` are fields of the native ``Options``; without them those of the environment hold. ``devices`` is a
        native ``Devices``.
        """
        members = list(range(self.size)) if ranks is None else list(ranks)
        hosts = [self.hosts[rank] for rank in members] if self.link else []
        hosts = hosts if len(set(hosts)) > 1 else []
        if devices is None and Seat.make_devices is not None:
            devices = self.devices = self.devices or Seat.make_devices()
        native = core.Communicator.open(
            ring_memory=self.ring_memory,
            ranks=members,
            local=[rank for rank in members if not hosts or self.hosts[rank] == self.hosts[self.rank]],
            index=members.index(self.rank),
            generation=generation,
            link=self.link if hosts else None,
            host_of=hosts,
            addresses=members if hosts else [],
            timeout=timeout,
            options=core.Options(**settings) if settings else options(),
            devices=devices,
            log=self.log,
        )
        self.opened.append(Communicator(native, self.ring_memory))
        return self.opened[-1]

    def leave(self, error: BaseException | None) -> None:
        """Close what is open, or abort it because of ``error``, as the runner of a cell does."""
        for communicator in self.opened:
            if error is not None:
                communicator.abort(f"rank {self.rank} raised {error!r}")
            communicator.close()
        self.opened.clear()


Body = Callable[[Seat], Any]


@dataclass(frozen=True)
class Dead:
    """In the place of a result: the rank was killed by this signal."""

    signal: int


def as_threads(
    size: int, body: Body, *, hosts: tuple[int, ...] = (), limit: float = LIMIT, arena: int = ARENA
) -> list[Any]:
    """What ``body`` returns on each rank. Raises the error of the rank that failed first of its own accord."""
    ring_memory = core.RingMemory.create(0, size, arena)
    memories = [ring_memory, *(ring_memory.share(rank) for rank in range(1, size))]
    outcomes: list[tuple[Any, BaseException | None] | None] = [None] * size
    barrier = threading.Barrier(size)
    links = _links(hosts)
    seats = [Seat(memories[rank], rank, size, hosts, links[rank] if links else None, barrier) for rank in range(size)]

    def main(rank: int) -> None:
        outcomes[rank] = _live(seats[rank], body)

    # A rank that comes out of a collective should not wait 5 ms for each of the others to give up the interpreter.
    sys.setswitchinterval(1e-4)
    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(0.005 if links else left)
            for link in links:
                link.flush()  # the rest of messages that were given up half sent
    stuck = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if stuck:
        faulthandler.dump_traceback()
        doing = [communicator.snapshot() for seat in seats for communicator in seat.opened]
        for seat in seats:
            for communicator in seat.opened:
                communicator.abort("the test took too long")
        failed = [f"{outcome[1]!r}" for outcome in outcomes if outcome is not None and outcome[1] is not None]
        raise AssertionError(f"ranks {stuck} of {size} did not return within {limit:.0f} s: {doing}, {failed}")
    return _results([outcome for outcome in outcomes if outcome is not None])


def _links(hosts: Sequence[int]) -> list[Any]:
    """A link for each rank of these hosts, connected to those of other hosts."""
    links = [core.TcpLink(len(hosts)) for _ in hosts]
    # Sixty-four ranks have 1,792 connections, with two ends in this process.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for pair in combinations(range(len(hosts)), 2):
        if hosts[pair[0]] != hosts[pair[1]]:
            for rank, other, end in zip(pair, reversed(pair), socket.socketpair(), strict=True):
                links[rank].connected(other, end.detach())
    return links


def as_processes(size: int, body: Body) -> list[Any]:
    """What ``body`` returns on each rank, `Dead` for one that was killed. What it returns must be picklable."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(size)]
    barrier = context.Barrier(size)
    processes = [
        context.Process(target=_process, args=(pipes, rank, size, barrier, body), daemon=True) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    ours = [mine for mine, _ in pipes]
    try:
        card = ours[0].recv()
        for connection in ours[1:]:
            connection.send(card)
        outcomes = _collect(ours, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for connection in ours:
            connection.close()
    return _results(outcomes)


def as_hosts(size: int, body: Body) -> list[Any]:
    """As threads that pretend to be on up to three hosts, with unequal numbers of ranks that are not in a row."""
    return as_threads(size, body, hosts=(0, 1, 0, 0, 2, 1, 0)[:size])


LAUNCHERS = {"threads": as_threads, "processes": as_processes, "hosts": as_hosts}


def on_ranks(
    size: int = 0, launch: Callable[..., list[Any]] = as_threads, gives: Sequence[Any] | None = None, **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Have a test run on every one of so many ranks, each with its `Seat`; what they return is compared with ``gives``.

    What pytest gives the test as ``size``, ``hosts`` or ``launcher`` (a name in `LAUNCHERS`) takes the place of these.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @wraps(test)
        def whole(**given: Any) -> None:
            started = LAUNCHERS[given["launcher"]] if "launcher" in given else launch
            hosts = {"hosts": given["hosts"]} if "hosts" in given else {}
            results = started(given.get("size", size), lambda seat: test(seat, **given), **hosts, **how)
            assert gives is None or results == gives

        own = signature(test)
        whole.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])  # type: ignore[attr-defined]
        return whole

    return decorate


def _live(seat: Seat, body: Body) -> tuple[Any, BaseException | None]:
    try:
        result = body(seat)
    except BaseException as error:
        seat.leave(error)
        return None, error
    seat.leave(None)
    return result, None


def _process(pipes: Sequence[tuple[Connection, Connection]], rank: int, size: int, barrier: Any, body: Body) -> None:
    faulthandler.register(signal.SIGUSR1)
    connection = pipes[rank][1]
    for mine, theirs in pipes:
        mine.close()
        if theirs is not connection:
            theirs.close()
    if rank == 0:
        ring_memory = core.RingMemory.create(0, size, ARENA)
        connection.send((os.getpid(), ring_memory.fd, ring_memory.token))
    else:
        ring_memory = core.RingMemory.attach(rank, size, *connection.recv())
    result, error = _live(Seat(ring_memory, rank, size, barrier=barrier), body)
    if error is not None:
        try:
            pickle.dumps(error)
        except (pickle.PicklingError, TypeError, AttributeError):  # as that of pytest.raises where nothing was raised
            error = AssertionError(f"{type(error).__name__}: {error}")
    connection.send((result, error))
    # The memory's maker must outlive those that still attach to it.
    with contextlib.suppress(EOFError):
        connection.recv()


def _collect(connections: list[Connection], processes: Sequence[Any]) -> list[tuple[Any, BaseException | None]]:
    outcomes: dict[int, tuple[Any, BaseException | None]] = {}
    deadline = time.monotonic() + LIMIT
    while len(outcomes) < len(connections):
        waiting = [connection for rank, connection in enumerate(connections) if rank not in outcomes]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            try:
                outcomes[rank] = connection.recv()
            except EOFError:
                processes[rank].join()
                outcomes[rank] = (Dead(-processes[rank].exitcode), None)
        if not ready:
            stuck = [rank for rank in range(len(connections)) if rank not in outcomes]
            for rank in stuck:
                os.kill(processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
            raise AssertionError(f"ranks {stuck} of {len(connections)} did not return within {LIMIT:.0f} s")
    return [outcomes[rank] for rank in range(len(connections))]


def _results(outcomes: Sequence[tuple[Any, BaseException | None]]) -> list[Any]:
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, CollectiveAborted))
    return [result for result, _ in outcomes]
