"""One job: mpiexec or a keeper under our control, signals handed on, and the rank that failed first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TextIO

from ring_notebook.launch import keeper
from ring_notebook.launch.deathsig import wrap
from ring_notebook.launch.hosts import Host
from ring_notebook.launch.keeper import STOPPING
from ring_notebook.launch.lines import SOON, Carrier, pieces
from ring_notebook.launch.merge_traces import Traces
from ring_notebook.launch.mpi import find_mpiexec
from ring_notebook.launch.rank import RankFailure, describe_exit, split_reports

__all__ = ["Job", "say"]

GRACE = 5.0
"""Seconds that the other ranks have to end by themselves, with errors of their own, after one has failed."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAY_AFTER = 1.0  # seconds: most jobs end sooner, and nothing needs saying
_SAME_ASKING = 0.5  # seconds in which a second signal comes from the one who sent the first, as that of `timeout` does


class Job:
    """``program`` on ``n`` ranks. It ends when this process does, however this process ends.

    What the ranks print goes to ``sys.stdout`` and ``sys.stderr`` as they are when the job starts, which in a
    notebook are the cell's. All of ``env`` reaches the ranks of all hosts. With ``min_np`` the job is elastic: it goes
    on as long as so many ranks do, which has to be on this host. Raises MPIMissingError and ValueError as
    `find_mpiexec` and `Mpiexec.command` do.
    """

    def __init__(
        self,
        program: Sequence[str],
        n: int,
        hosts: Sequence[Host] = (),
        env: Mapping[str, str] | None = None,
        mpi_args: Sequence[str] = (),
        stdin: int | None = None,
        min_np: int = 0,
    ) -> None:
        needed: Mapping[str, str] = {}
        if min_np:
            self.command = keeper.command(program, n, min_np)
        else:
            mpiexec = find_mpiexec()
            supervised = [sys.executable, "-m", "ring_notebook.launch.rank", *program]
            self.command = mpiexec.command(n, supervised, hosts, mpi_args, env or ())
            needed = mpiexec.environment()
        self._elastic = min_np > 0
        self._n = n
        self.failures: list[RankFailure] = []
        self.ended_by = 0
        environment = {**os.environ, **needed, **(env or {})}
        self._traces = Traces(environment, n)
        self._process = subprocess.Popen(
            wrap(self.command),
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A session of its own: the terminal's Ctrl-C comes once, through us, and not twice.
            start_new_session=True,
        )
        self._over = threading.Event()
        self._asked: dict[int, float] = {}
        self._outputs = [_Output(sink, self._note) for sink in (sys.stdout, sys.stderr)]
        sources = (self._process.stdout, self._process.stderr)
        self._carriers = [  # one for each: who does not read the one gets the other
            Carrier(self._process, {source: output.take}, hold=SOON)
            for source, output in zip(sources, self._outputs, strict=True)
            if source is not None
        ]

    def send(self, signum: int) -> None:
        """Hand a signal to mpiexec or the keeper, which hands it to the ranks."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)

    def kill(self) -> None:
        """End all ranks now."""
        self.send(signal.SIGTERM)
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._kill_at_once()
            self._process.wait()

    def wait(self) -> int:
        """Wait for the job; its exit code is the first failed rank's, and 128 + signal where one ended it.

        1 where that rank ended with 0 in the middle of the job; 0 for an elastic job that went on to its end without
        the ranks that failed.

        The file that ``RING_TIMELINE`` names is written then. When the wait is interrupted the job is killed.
        """
        try:
            code = self._process.wait()
        except BaseException:
            self.kill()
            raise
        finally:
            self._over.set()
        self._take_rest()
        if said := self._traces.merge():
            say(said)
        first = self.first_failure
        if self.ended_by:
            code = -self.ended_by
        elif self.failures and not self._elastic:
            code = 0 if first is None else first.code or 1
        return code if code >= 0 else 128 - code

    @property
    def first_failure(self) -> RankFailure | None:
        """The rank that ended badly before any other did; None when none has.

        One that others have aborted did not, whatever clocks say. Ranks that all leave in the middle, with 0, are
        done: nobody has missed them.
        """
        if len(self.failures) == self._n and not any(failure.code for failure in self.failures):
            return None
        return min(self.failures, key=lambda failure: (failure.aborted, failure.time), default=None)

    def describe_failure(self) -> str:
        """One sentence on the rank that failed first, or on what started the ranks when no rank did."""
        first = self.first_failure
        if first is None:
            launcher = "the keeper of the ranks" if self._elastic else "mpiexec"
            return f"{launcher} failed ({describe_exit(self._process.returncode)}): {' '.join(self.command)}"
        too_early = "" if first.code else " in the middle of the job"
        return f"rank {first.rank} on {first.host} failed first: {describe_exit(first.code)}{too_early}"

    def _take_rest(self) -> None:
        """Wait until what the ranks have printed is taken; when a signal has ended the job, not for ever."""
        until = time.monotonic() + GRACE
        for carrier, output in zip(self._carriers, self._outputs, strict=True):
            while carrier.is_alive() and not (self.ended_by and time.monotonic() > until):
                carrier.join(0.2)
            if not carrier.is_alive():
                output.close()

    def _note(self, failures: list[RankFailure]) -> None:
        if failures and not self.failures and not self._elastic:
            threading.Thread(target=self._end_others, name="ring-job-end", daemon=True).start()
        self.failures += failures

    def _end_others(self) -> None:
        """After the first failure: the others have time to end with errors of their own."""
        if not self._over.wait(GRACE):
            self.kill()

    def _ask_to_end(self, signum: int) -> None:
        """Hand on a signal that would end this process: its time is limited then, and a second Ctrl-C ends it."""
        if signum in self._asked:  # mpiexec would take a second one for an order to kill
            if signum == signal.SIGINT and time.monotonic() - self._asked[signum] > _SAME_ASKING:
                self._kill_at_once()
            return
        self._asked[signum] = time.monotonic()
        self.send(signum)
        if not self.ended_by:
            self.ended_by = signum
            threading.Thread(target=self._see_to_the_end, name="ring-job-end", daemon=True).start()

    def _see_to_the_end(self) -> None:
        """Ranks that were asked to end may be stopped, or stuck: those that do not get SIGKILL, which always works."""
        if self._over.wait(_SAY_AFTER):
            return
        say(f"the ranks have {STOPPING - _SAY_AFTER:.0f} seconds more to end; Ctrl-C ends them at once")
        if not self._over.wait(STOPPING - _SAY_AFTER):
            say(f"killing the ranks, which have not ended in {STOPPING:.0f} seconds")
            self._kill_at_once()

    def _kill_at_once(self) -> None:
        if self._over.is_set():  # the number may be another's by now
            return
        # Ranks that ignore SIGTERM lose their process manager, and with it their lives.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def signals_handed_on(self) -> Iterator[None]:
        """While the block runs, what would end this process ends the job instead (command line only)."""
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

        def hand_on(signum: int, _frame: FrameType | None) -> None:
            if signum in _ENDING:
                self._ask_to_end(signum)
            else:
                self.send(signum)

        before = {signum: signal.signal(signum, hand_on) for signum in wanted}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class _Output:
    """One of the job's streams, on its way to ``sink``; the reports in it go to ``note``."""

    def __init__(self, sink: TextIO, note: Callable[[list[RankFailure]], None]) -> None:
        self._sink = sink
        self._note = note
        self._kept = b""

    def take(self, data: bytes) -> None:
        """What has come."""
        text, failures, self._kept = split_reports(self._kept + data)
        _write(self._sink, text)
        self._note(failures)

    def close(self) -> None:
        """Nothing more comes: what might have been the beginning of a report is none."""
        _write(self._sink, self._kept)


def say(text: str) -> None:
    """A line of ours on stderr."""
    with contextlib.suppress(OSError):  # of a terminal that is gone
        print(f"ringrun: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _write(sink: TextIO, data: bytes) -> None:
    """Bytes to a text stream, as they are where it has a binary side."""
    if not data:
        return
    sink.flush()
    binary = getattr(sink, "buffer", None)
    if binary is None:
        sink.write(data.decode(errors="replace"))
    else:
        for piece in pieces(data):  # stderr may go to the same pipe at the same time
            binary.write(piece)
            binary.flush()
    sink.flush()
