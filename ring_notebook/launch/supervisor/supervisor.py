"""Starts the ranks of an elastic job on this host, and continues without those that fail.

``python -m ring_notebook.launch.supervisor.supervisor N MIN_NP PROGRAM ARGS...`` takes the place of mpiexec, because
MPI ends all ranks when one dies.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from ring_notebook.launch.supervisor.output_lines import Carrier, carry, outlet
from ring_notebook.launch.supervisor.parent_death import bind_to_parent
from ring_notebook.launch.supervisor.rank_failure import RankFailure, describe_exit, report_failure
from ring_notebook.launch.supervisor.rank_wrapper import FORWARDED
from ring_notebook.launch.supervisor.start_error import explain_start
from ring_notebook.rank_status import StatusFile
from ring_notebook.rendezvous import receive, send, variables

__all__ = ["STOPPING", "Supervisor", "main"]

GRACE = 5.0
"""Seconds that ranks have to end by themselves, with errors of their own, when the job cannot continue."""
STOPPING = 10.0
"""Seconds that ranks have to end after a signal: for a checkpoint, or a timeline."""


class Supervisor:
    """``program`` on ``n`` ranks of this host. The job continues without ranks that fail while ``min_np`` are left."""

    def __init__(self, program: Sequence[str], n: int, min_np: int) -> None:
        self._n = n
        self._min_np = min_np
        self._failures: list[RankFailure] = []
        self._status_files = [StatusFile() for _ in range(n)]
        self._finished: list[int] = []  # ranks that exited with 0
        self._arrived: set[int] = set()  # at the rendezvous
        self._all_arrived = False
        self._card: list[int] | None = None
        self._rendezvous_error = ""
        self._stopped_by = 0
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._channels: dict[int, socket.socket] = {}
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}
        self._catch_signals()
        for rank in range(n):
            self._start(rank, program)
        # Threads only now: what Popen runs between fork and exec may need a lock that one of them holds.
        self._output: list[Carrier] = [carry(process) for process in self._ranks.values()]

    def run(self) -> int:
        """Wait for all ranks; the exit code of the job: 0 when ``min_np`` finished, else that of the first failure."""
        while self._ranks:
            for key, _ in self._selector.select(0.5):
                what, rank = key.data
                if what == "message":
                    self._read_message(rank)
                else:
                    self._handle_exit(rank)
            if self._finished:
                self._find_deserters()
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._kill_at += GRACE
                self._send(signal.SIGKILL if self._stopped_by else signal.SIGTERM)
                self._stopped_by = self._stopped_by or signal.SIGTERM
        for output in self._output:
            output.join()
        if self._failures and (self._rendezvous_error or self._n - len(self._failures) < self._min_np):
            code = next((failure.code for failure in self._failures if failure.code), 1)
            return code if code > 0 else 128 - code
        return 0

    def _start(self, rank: int, program: Sequence[str]) -> None:
        parent = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ranks[rank] = subprocess.Popen(
            program,
            # As MPI has it: what ranks print comes when they do.
            env={
                "PYTHONUNBUFFERED": "1",
                **os.environ,
                **variables(rank, self._n, theirs),
                **self._status_files[rank].variables,
                "RING_MIN_NP": str(self._min_np),
            },
            stdin=None if rank == 0 else subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            preexec_fn=lambda: bind_to_parent(parent, signal.SIGKILL),
            stdout=outlet(1),
            stderr=outlet(2),
        )
        theirs.close()
        self._channels[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, ("message", rank))
        self._pidfds[rank] = os.pidfd_open(self._ranks[rank].pid)
        self._selector.register(self._pidfds[rank], selectors.EVENT_READ, ("exit", rank))

    def _read_message(self, rank: int) -> None:
        channel = self._channels[rank]
        message = receive(channel)
        if not message:  # the rendezvous is complete, or the rank has exited
            self._selector.unregister(channel)
            self._channels.pop(rank).close()
        elif "card" in message:
            self._card = message["card"]
            self._send_all(card=self._card)
        elif "arrived" in message:
            self._arrived.add(rank)
            if len(self._arrived) == self._n:
                self._all_arrived = True
                self._send_all(complete=True)

    def _send_all(self, **message: object) -> None:
        for rank, channel in self._channels.items():
            if rank != 0 or "card" not in message:
                with contextlib.suppress(OSError):
                    send(channel, **message)

    def _handle_exit(self, rank: int) -> None:
        # A dead process's descriptor stays readable: left in the selector, no select would wait any more.
        self._selector.unregister(self._pidfds[rank])
        os.close(self._pidfds.pop(rank))
        code = self._ranks.pop(rank).wait()
        if not self._all_arrived and not self._rendezvous_error:
            # Ranks that wait for it in init() must not wait for ever.
            self._rendezvous_error = f"rank {rank} exited ({describe_exit(code)}) before all ranks had called init()"
            self._send_all(error=self._rendezvous_error)
        if self._stopped_by:
            return
        if not code:
            self._finished.append(rank)
            self._find_deserters()
            return
        aborted = self._status_files[rank].read().aborted
        failure = RankFailure(rank, socket.gethostname(), code, time.time(), aborted=aborted)
        self._find_deserters(failure)
        self._handle_failure(failure)

    def _find_deserters(self, *new: RankFailure) -> None:
        """Ranks that exited with 0 while others still waited for them have failed, like ranks that died."""
        lost = frozenset[int]().union(*(file.read().lost for file in self._status_files))
        failures = [*self._failures, *new]
        if failures and all(failure.aborted for failure in failures):  # they waited for ranks that had exited
            lost |= set(self._finished)
        for rank in [rank for rank in self._finished if rank in lost]:
            self._finished.remove(rank)
            self._handle_failure(RankFailure(rank, socket.gethostname(), 0, time.time()))

    def _handle_failure(self, failure: RankFailure) -> None:
        rank, code = failure.rank, failure.code
        self._failures.append(failure)
        report_failure(failure)
        left = self._n - len(self._failures)
        if self._kill_at is not None:
            return
        if not self._all_arrived:
            self._print(f"{self._rendezvous_error}; ending the job")
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
        os.write(2, f"ringrun: {text}\n".encode())

    def _send(self, signum: int) -> None:
        for process in self._ranks.values():
            process.send_signal(signum)

    def _catch_signals(self) -> None:
        def pass_on(signum: int, _frame: object) -> None:
            if signum not in (signal.SIGUSR1, signal.SIGUSR2) and not self._stopped_by:
                self._stopped_by = signum
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
        code, reason = explain_start(program, error=error) or (1, str(error))
        os.write(2, f"ringrun: {reason}\n".encode())
        sys.exit(code)
    sys.exit(supervisor.run())


if __name__ == "__main__":
    main()
