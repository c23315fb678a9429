"""Starts the ranks of a job on this host, connects them, passes signals on, and decides when and how the job ends.

``python -m ring_notebook.launch.supervisor.supervisor N MIN_NP PROGRAM ARGS...``. With a MIN_NP of 0 MPICH connects the
ranks, and all end soon after one fails. Otherwise the job is elastic: it continues while MIN_NP ranks are left, which
find each other without MPI.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from ring_notebook.gpus import gpus, gpus_of_script
from ring_notebook.hardware import oom_kills
from ring_notebook.launch.supervisor.connections import Connections, MpiConnections, RendezvousConnections
from ring_notebook.launch.supervisor.outer_job import with_variables_of_job, without_outer_job
from ring_notebook.launch.supervisor.output_lines import Carrier, carry
from ring_notebook.launch.supervisor.rank_failure import (
    RankFailure,
    describe_exit,
    exit_code,
    job_exit_code,
    report_failure,
)
from ring_notebook.launch.supervisor.rank_process import (
    FORWARDED,
    end_children,
    send_signal,
    start_rank,
)
from ring_notebook.launch.supervisor.start_error import report_start_error
from ring_notebook.rank.preload import preloaded
from ring_notebook.rank.rank_status import StatusFile
from ring_notebook.rank.rank_variables import loopback, rank_variables

__all__ = ["STOPPING", "Supervisor", "main"]

LINGER = 1.0
"""Seconds that ranks have to end with errors of their own after one has failed; none after one was killed."""
GRACE = 5.0
"""Seconds that ranks have to end when an elastic job cannot continue, and after SIGTERM before SIGKILL."""
STOPPING = 10.0
"""Seconds that ranks have to end after a signal: for a checkpoint, or a timeline."""


class Supervisor:
    """``program`` on ``n`` ranks of this host."""

    def __init__(self, program: Sequence[str], n: int, min_np: int = 0) -> None:
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._files[1], self._files[1]))  # several per rank
        self._n = n
        self._min_np = min_np
        self._failures: list[RankFailure] = []
        self._finished: list[int] = []  # ranks that exited with 0
        self._status_files = [StatusFile() for _ in range(n)]
        self._oom_kills = oom_kills()
        self._gpus = gpus()
        self._connections: Connections
        if min_np:
            self._connections = RendezvousConnections(n)
        else:
            self._connections = MpiConnections(f"ring-{os.getpid()}-{secrets.token_hex(8)}", n)
        self._signal = 0  # that has ended the job
        self._ending = False  # ranks are being ended; what they exit with says nothing
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}
        self._groups: list[int] = []
        # A signal waits until it can be passed on to all ranks.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        self._catch_signals()
        self._master = loopback()
        for rank in range(n):
            self._start(rank, program)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        # Threads only now: what Popen runs between fork and exec may need a lock that one of them holds.
        self._output: list[Carrier] = [carry(process) for process in self._ranks.values()]

    def run(self) -> int:
        """Wait for all ranks; the exit code of the job.

        0 when all finished, of an elastic job ``min_np``; else that of the first failure, 128 + signal for a signal.
        """
        while self._ranks:
            for key, _ in self._selector.select(0.5):
                what, rank = key.data
                if what == "message":
                    self._read_message(key.fileobj, rank)
                else:
                    self._handle_exit(rank)
            self._find_deserters()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = time.monotonic() + GRACE
                self._send(signal.SIGKILL if self._ending else signal.SIGTERM)
                self._ending = True
        if self._ending:
            for group in self._groups:  # the program behind a shell script is a child of it
                end_children(group)
        self._connections.close()
        for output in self._output:
            output.join()
        return self._exit_code()

    def _exit_code(self) -> int:
        if self._signal:
            return exit_code(-self._signal)
        if self._min_np and not self._connections.error and self._n - len(self._failures) >= self._min_np:
            return 0
        return job_exit_code(self._failures, self._n)

    def _start(self, rank: int, program: Sequence[str]) -> None:
        ours, theirs = self._connections.pair(rank)
        with theirs:
            environment = self._environment(rank, theirs)
            stdin = None if rank == 0 else subprocess.DEVNULL
            self._ranks[rank] = start_rank(program, environment, stdin, [theirs.fileno()], files=self._files)
        self._groups.append(self._ranks[rank].pid)
        self._selector.register(ours, selectors.EVENT_READ, ("message", rank))
        self._pidfds[rank] = os.pidfd_open(self._ranks[rank].pid)
        self._selector.register(self._pidfds[rank], selectors.EVENT_READ, ("exit", rank))

    def _environment(self, rank: int, channel: socket.socket) -> dict[str, str]:
        own = without_outer_job(os.environ)
        # As MPI has it: what ranks print comes when they do.
        defaults = {"PYTHONUNBUFFERED": "1", **self._connections.variables(rank, channel)}
        added = {name: value for name, value in defaults.items() if name not in own}
        added |= rank_variables(rank, self._n, rank, self._n, self._master) | gpus_of_script(rank, self._gpus)
        return {
            **with_variables_of_job(own, added),
            **preloaded(own),
            **self._status_files[rank].variables,
            **({"RING_MIN_NP": str(self._min_np)} if self._min_np else {}),
        }

    def _read_message(self, channel: object, rank: int) -> None:
        assert isinstance(channel, socket.socket)
        if not self._connections.receive(rank):
            self._selector.unregister(channel)
            channel.close()
        code = self._connections.take_abort(rank)
        if code is not None and not self._ending:
            self._fail(rank, code)
            self._kill_at = time.monotonic()

    def _handle_exit(self, rank: int) -> None:
        # A dead process's descriptor stays readable: left in the selector, no select would wait any more.
        self._selector.unregister(self._pidfds[rank])
        os.close(self._pidfds.pop(rank))
        code = self._ranks.pop(rank).wait()
        self._connections.exited(rank, describe_exit(code))
        if self._ending:
            return
        if code:
            self._fail(rank, code)
        else:
            self._finished.append(rank)

    def _find_deserters(self) -> None:
        """Ranks that exited with 0 while others still needed them have failed, like ranks that died."""
        if self._ending:
            return
        statuses = [file.read() for file in self._status_files] if self._finished else []
        lost = self._connections.deserters(self._finished, statuses)
        if self._min_np and self._failures and all(failure.aborted for failure in self._failures):
            lost |= set(self._finished)  # the others waited for ranks that had exited
        for rank in [rank for rank in self._finished if rank in lost]:
            self._finished.remove(rank)
            self._fail(rank, 0)

    def _fail(self, rank: int, code: int) -> None:
        """Rank ``rank`` has failed: report it, and have the job end unless it can continue."""
        failure = RankFailure.of(rank, code, self._status_files[rank].read(), self._oom_kills)
        self._failures.append(failure)
        report_failure(failure)
        if self._kill_at is not None:
            return
        if not self._min_np:
            self._kill_at = time.monotonic() + (LINGER if code >= 0 else 0.0)
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
        self._kill_at = time.monotonic() + GRACE

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more, or the disk is full
            os.write(2, f"ringrun: {text}\n".encode())

    def _send(self, signum: int) -> None:
        for process in self._ranks.values():
            send_signal(process, signum)

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
    try:
        supervisor = Supervisor(program, n, min_np)
    except OSError as error:
        sys.exit(report_start_error(program, error))
    sys.exit(supervisor.run())


if __name__ == "__main__":
    main()
