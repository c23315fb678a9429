"""Starts the ranks of a job on this host without MPI, which does not outlive a rank, and goes on when some of them die.

``python -m ring_notebook.launch.keeper N LEAST PROGRAM ARGS...`` takes the place of mpiexec where a job is elastic.
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

from ring_notebook.launch.deathsig import bind_to_parent
from ring_notebook.launch.lines import Carrier, carry, outlet
from ring_notebook.launch.rank import FORWARDED, RankFailure, describe_exit, report
from ring_notebook.launch.refusal import refusal
from ring_notebook.rank_status import Life
from ring_notebook.rendezvous import receive, say, surroundings

__all__ = ["STOPPING", "Keeper", "command", "main"]

GRACE = 5.0
"""Seconds that ranks have to end by themselves, with errors of their own, when the job cannot go on."""
STOPPING = 10.0
"""Seconds that ranks have after a signal that asks them to end: for a checkpoint, or a timeline."""


def command(program: Sequence[str], n: int, least: int) -> list[str]:
    """The command line that keeps ``program`` running on ``n`` ranks, or on the living as long as ``least`` do."""
    return [sys.executable, "-m", "ring_notebook.launch.keeper", str(n), str(least), *program]


class Keeper:
    """``program`` on ``n`` ranks of this host. Ranks that end badly are left behind while ``least`` are well."""

    def __init__(self, program: Sequence[str], n: int, least: int) -> None:
        self._n = n
        self._least = least
        self._failures: list[RankFailure] = []
        self._lives = [Life() for _ in range(n)]
        self._through: list[int] = []  # ranks that ended with 0
        self._here: set[int] = set()
        self._met = False
        self._card: list[int] | None = None
        self._lost = ""
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
        """Wait for all ranks; the job's exit code: 0 when ``least`` ended well, else as the first failure ended."""
        while self._ranks:
            for key, _ in self._selector.select(0.5):
                what, rank = key.data
                if what == "said":
                    self._listen(rank)
                else:
                    self._note_end(rank)
            if self._through:
                self._look_who_is_missed()
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._kill_at += GRACE
                self._send(signal.SIGKILL if self._stopped_by else signal.SIGTERM)
                self._stopped_by = self._stopped_by or signal.SIGTERM
        for output in self._output:
            output.join()
        if self._failures and (self._lost or self._n - len(self._failures) < self._least):
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
                **surroundings(rank, self._n, theirs),
                **self._lives[rank].variables,
                "RING_MIN_NP": str(self._least),
            },
            stdin=None if rank == 0 else subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            preexec_fn=lambda: bind_to_parent(parent, signal.SIGKILL),
            stdout=outlet(1),
            stderr=outlet(2),
        )
        theirs.close()
        self._channels[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, ("said", rank))
        self._pidfds[rank] = os.pidfd_open(self._ranks[rank].pid)
        self._selector.register(self._pidfds[rank], selectors.EVENT_READ, ("ended", rank))

    def _listen(self, rank: int) -> None:
        channel = self._channels[rank]
        message = receive(channel)
        if not message:  # it is through with the meeting, or has ended
            self._selector.unregister(channel)
            self._channels.pop(rank).close()
        elif "card" in message:
            self._card = message["card"]
            self._tell_all(card=self._card)
        elif "here" in message:
            self._here.add(rank)
            if len(self._here) == self._n:
                self._met = True
                self._tell_all(all=True)

    def _tell_all(self, **message: object) -> None:
        for rank, channel in self._channels.items():
            if rank != 0 or "card" not in message:
                with contextlib.suppress(OSError):
                    say(channel, **message)

    def _note_end(self, rank: int) -> None:
        # A dead process's descriptor stays readable: left in the selector, no select would wait any more.
        self._selector.unregister(self._pidfds[rank])
        os.close(self._pidfds.pop(rank))
        code = self._ranks.pop(rank).wait()
        if not self._met and not self._lost:
            # Whoever waits for it in init() must not wait for ever.
            self._lost = f"rank {rank} ended ({describe_exit(code)}) before all ranks had called init()"
            self._tell_all(lost=self._lost)
        if self._stopped_by:
            return
        if not code:
            self._through.append(rank)
            self._look_who_is_missed()
            return
        aborted = self._lives[rank].read().aborted
        failure = RankFailure(rank, socket.gethostname(), code, time.time(), aborted=aborted)
        self._look_who_is_missed(failure)
        self._note_failure(failure)

    def _look_who_is_missed(self, *new: RankFailure) -> None:
        """Of the ranks that ended with 0, those that others waited for have failed like any that died."""
        missed = frozenset[int]().union(*(life.read().without for life in self._lives))
        failures = [*self._failures, *new]
        if failures and all(failure.aborted for failure in failures):  # whom else would they have waited for?
            missed |= set(self._through)
        for rank in [rank for rank in self._through if rank in missed]:
            self._through.remove(rank)
            self._note_failure(RankFailure(rank, socket.gethostname(), 0, time.time()))

    def _note_failure(self, failure: RankFailure) -> None:
        rank, code = failure.rank, failure.code
        self._failures.append(failure)
        report(failure)
        left = self._n - len(self._failures)
        if self._kill_at is not None:
            return
        if not self._met:
            self._say(f"{self._lost}, so that no rank can go on")
        elif left < self._least:
            self._say(
                f"rank {rank} is gone: {describe_exit(code)}. {_ranks(left)} of {self._n} left, "
                f"fewer than the {self._least} of --min-np"
            )
        else:
            self._say(f"rank {rank} is gone: {describe_exit(code)}. Going on with {_ranks(left)} of {self._n}")
            return
        self._kill_at = time.monotonic() + GRACE

    def _say(self, text: str) -> None:
        os.write(2, f"ringrun: {text}\n".encode())

    def _send(self, signum: int) -> None:
        for process in self._ranks.values():
            process.send_signal(signum)

    def _catch_signals(self) -> None:
        def hand_on(signum: int, _frame: object) -> None:
            if signum not in (signal.SIGUSR1, signal.SIGUSR2) and not self._stopped_by:
                self._stopped_by = signum
                self._kill_at = time.monotonic() + STOPPING
            self._send(signum)

        for signum in FORWARDED:
            signal.signal(signum, hand_on)


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def main() -> None:
    """Keep the program of ``sys.argv``, and end with the job's exit code."""
    n, least = int(sys.argv[1]), int(sys.argv[2])
    program = sys.argv[3:]
    try:
        ranks = Keeper(program, n, least)
    except OSError as error:
        code, reason = refusal(program, error=error) or (1, str(error))
        os.write(2, f"ringrun: {reason}\n".encode())
        sys.exit(code)
    sys.exit(ranks.run())


if __name__ == "__main__":
    main()
