"""Starts the ranks of a job on this host, connects them, passes signals on, and decides when and how the job ends.

``python -m ring_notebook.launch.supervisor.supervisor N MIN_NP PROGRAM ARGS...``. With a MIN_NP of 0 MPICH connects the
ranks, and all end soon after one fails. Otherwise the job is elastic: it continues while MIN_NP ranks are left, which
find each other without MPI.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence

from ring_notebook.launch.connections.connections import (
    Connections,
    MpiConnections,
    RendezvousConnections,
    new_job_name,
)
from ring_notebook.launch.supervisor.host_ranks import Assignment, HostRanks
from ring_notebook.launch.supervisor.local_ranks import LocalRanks, raise_file_limit
from ring_notebook.launch.supervisor.outer_job import without_outer_job
from ring_notebook.launch.supervisor.rank_failure import (
    RankFailure,
    describe_exit,
    exit_code,
    job_exit_code,
    report_failure,
)
from ring_notebook.launch.supervisor.rank_process import FORWARDED
from ring_notebook.launch.supervisor.start_error import report_start_error
from ring_notebook.rank.rank_variables import loopback

__all__ = ["STOPPING", "Supervisor", "main"]

LINGER = 1.0
"""Seconds that ranks have to end with errors of their own after one has failed; none after one was killed."""
GRACE = 5.0
"""Seconds that ranks have to end when an elastic job cannot continue, and after SIGTERM before SIGKILL."""
ABORTED = 3.0
"""Seconds that ranks have to end after one that others have aborted: who did so has yet to exit, and is to be named."""
STOPPING = 10.0
"""Seconds that ranks have to end after a signal: for a checkpoint, or a timeline."""


class Supervisor:
    """The job of the ranks of ``hosts``, which find each other through ``connections``."""

    def __init__(self, hosts: Sequence[HostRanks], connections: Connections, min_np: int = 0) -> None:
        self._hosts = hosts
        self._host_of = {rank: host for host in hosts for rank in host.ranks}
        self._n = len(self._host_of)
        self._min_np = min_np
        self._connections = connections
        self._failures: list[RankFailure] = []
        self._finished: list[int] = []  # ranks that exited with 0
        self._signal = 0  # that has ended the job
        self._ending = False  # ranks are being ended; what they exit with says nothing
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._running = set(self._host_of)
        # A signal waits until it can be passed on to all ranks.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        self._catch_signals()
        for host in hosts:
            host.watch(self._selector, self._handle_exit)
        for rank in range(self._n):
            self._start(rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for host in hosts:
            host.carry_output()

    def run(self) -> int:
        """Wait for all ranks; the exit code of the job.

        0 when all finished, of an elastic job ``min_np``; else that of the first failure, 128 + signal for a signal.
        """
        while self._running:
            for key, _ in self._selector.select(0.5):
                key.data()
            for host in self._hosts:
                host.check()
            self._find_deserters()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._blame_who_has_left()
                self._kill_at = time.monotonic() + GRACE
                self._send(signal.SIGKILL if self._ending else signal.SIGTERM)
                self._ending = True
        if self._ending:
            for host in self._hosts:
                host.end_children()
        self._connections.close()
        for host in self._hosts:
            host.close()
        return self._exit_code()

    def _exit_code(self) -> int:
        if self._signal:
            return exit_code(-self._signal)
        if self._min_np and not self._connections.error and self._n - len(self._failures) >= self._min_np:
            return 0
        return job_exit_code(self._failures, self._n)

    def _start(self, rank: int) -> None:
        ours, theirs = self._connections.pair(rank)
        with theirs:
            self._host_of[rank].start(rank, theirs)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._read_message(ours, rank))

    def _read_message(self, channel: socket.socket, rank: int) -> None:
        if not self._connections.receive(rank):
            self._selector.unregister(channel)
            channel.close()
        code = self._connections.take_abort(rank)
        if code is not None and not self._ending:
            self._abort(rank, code)

    def _abort(self, rank: int, code: int) -> None:
        """Rank ``rank`` has called MPI_Abort, which ends all ranks."""
        self._fail(rank, code)
        self._end_within(0.0)

    def _handle_exit(self, rank: int, code: int) -> None:
        self._running.discard(rank)
        self._connections.exited(rank, describe_exit(code))
        if self._ending:
            return
        if code:
            self._fail(rank, code)
        else:
            self._finish(rank)

    def _finish(self, rank: int) -> None:
        """Rank ``rank`` has exited with 0."""
        self._finished.append(rank)

    def _find_deserters(self) -> None:
        """Ranks that exited with 0 while others still needed them have failed, like ranks that died."""
        if self._ending:
            return
        statuses = [self._host_of[rank].status(rank) for rank in range(self._n)] if self._finished else []
        lost = self._connections.deserters(self._finished, statuses)
        if self._failures and all(failure.aborted for failure in self._failures):
            lost |= set(self._finished)  # the others waited for ranks that had exited
        for rank in [rank for rank in self._finished if rank in lost]:
            self._finished.remove(rank)
            self._fail(rank, 0)

    def _blame_who_has_left(self) -> None:
        """Before the rest is ended: ranks that are slow to exit have failed where all others only missed one."""
        if self._ending or self._min_np or not all(failure.aborted for failure in self._failures):
            return
        for rank in sorted(self._running):
            status = self._host_of[rank].status(rank)
            if "exiting" in status.times and not status.times.keys() & {"raised", "aborted"}:
                self._fail(rank, 0)

    def _fail(self, rank: int, code: int) -> None:
        """Rank ``rank`` has failed: report it, and have the job end unless it can continue."""
        failure = self._host_of[rank].failure(rank, code)
        self._failures.append(failure)
        report_failure(failure)
        if not self._min_np:
            self._end_within(ABORTED if failure.aborted else LINGER if code >= 0 else 0.0)
            return
        if self._kill_at is not None:
            return
        left = self._n - len(self._failures)
        if self._connections.error:
            self._print(f"{self._connections.error}; ending the job")
        elif left < self._min_np:
            self._print(
                f"rank {rank} failed: {describe_exit(code)}. {_ranks(left)} of {self._n} left, "
                f"fewer than the {self._min_np} of --min-np"
            )
        else:
            self._print(f"rank {rank} failed: {describe_exit(code)}. Continuing with {_ranks(left)} of {self._n}")
            return
        self._end_within(GRACE)

    def _end_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more, or the disk is full
            os.write(2, f"ringrun: {text}\n".encode())

    def _send(self, signum: int) -> None:
        for host in self._hosts:
            host.send(signum)

    def _catch_signals(self) -> None:
        def pass_on(signum: int, _frame: object) -> None:
            if signum not in (signal.SIGUSR1, signal.SIGUSR2) and not self._ending:
                self._ending = True
                self._signal = signum
                self._kill_at = time.monotonic() + STOPPING
            self._send(signum)

        for signum in FORWARDED:
            signal.signal(signum, pass_on)


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def main() -> None:
    """Run the program of ``sys.argv`` and exit with the exit code of the job."""
    n, min_np = int(sys.argv[1]), int(sys.argv[2])
    program = sys.argv[3:]
    connections: Connections
    try:
        files = raise_file_limit()
        connections = RendezvousConnections(n) if min_np else MpiConnections(new_job_name(), [0] * n)
        assignment = Assignment(program, without_outer_job(os.environ), list(range(n)), n, loopback(), min_np)
        supervisor = Supervisor([LocalRanks(assignment, connections.variables, files)], connections, min_np)
    except OSError as error:
        sys.exit(report_start_error(program, error))
    sys.exit(supervisor.run())


if __name__ == "__main__":
    main()
