"""One job: its launcher under our control, signals passed on, and the rank that failed first."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TextIO

from ring_notebook.config import config
from ring_notebook.launch.launcher_watch import LauncherWatch
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.hosts import Host, master_of
from ring_notebook.launch.merge_traces import Traces
from ring_notebook.launch.supervisor.outer_job import without_outer_job
from ring_notebook.launch.supervisor.output_lines import SOON, Carrier, pieces
from ring_notebook.launch.supervisor.parent_death import wrap
from ring_notebook.launch.supervisor.rank_failure import (
    RankFailure,
    describe_exit,
    exit_code,
    first_failure,
    job_exit_code,
    split_reports,
)
from ring_notebook.launch.supervisor.rank_mark import RankMark
from ring_notebook.launch.supervisor.rank_process import end_session
from ring_notebook.launch.supervisor.supervisor import STOPPING
from ring_notebook.rank.rank_variables import MASTER

__all__ = ["Job", "print_message"]

GRACE = 5.0
"""Seconds that the other ranks have to end by themselves, with errors of their own, after one has failed."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START_TIMEOUT = 600.0  # seconds
_HIDING = ("SLURM_STDERRMODE", "SLURM_STDOUTMODE")  # by which srun keeps from us what the ranks say
_WARN_AFTER = 1.0  # seconds: most jobs end sooner and need no message
_LOOK = 0.5  # seconds after which a signal is handled that did not interrupt the wait for the job
_SAME_SIGNAL = 0.5  # seconds in which a second signal is the first one again: `timeout` signals us and our group


class Job:
    """``program`` on ``n`` ranks. It ends when this process does, however this process ends.

    What the ranks print goes to ``sys.stdout`` and ``sys.stderr`` as they are when the job starts, which in a
    notebook are the cell's. All of ``env`` reaches the ranks of all hosts. With ``min_np`` the job is elastic: it
    continues while so many ranks are left, all on this host. ``start_timeout`` is in seconds; None means that of
    `config`. Raises MPIMissingError and ValueError as `find_launcher` and `Launcher.command` do.
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
        start_timeout: float | None = None,
    ) -> None:
        launcher = find_launcher(hosts, min_np, mpi_args)
        self.command = launcher.command(launcher.supervised(program), n, hosts, mpi_args, {MASTER, *(env or ())})
        self._elastic = min_np > 0
        self._n = n
        self.failures: list[RankFailure] = []
        self.ended_by = 0
        environment = {
            **without_outer_job(os.environ),
            MASTER: master_of(hosts),
            **launcher.environment(),
            **(env or {}),
        }
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
        self._passed_on: dict[int, float] = {}
        self._outputs = [_Output(sink, self._add_failures, self._take_mark) for sink in (sys.stdout, sys.stderr)]
        self._watch: LauncherWatch | None = None
        if launcher.foreign:
            hides = bool(mpi_args) or any(name in environment for name in _HIDING)
            limit = _start_limit(start_timeout, hides)
            self._watch = LauncherWatch(n, limit, self.kill, print_message, self._is_blocked)
        sources = (self._process.stdout, self._process.stderr)
        self._carriers = [  # a thread for each: the one flows while nobody reads the other
            Carrier(self._process, {source: output.take}, hold=SOON)
            for source, output in zip(sources, self._outputs, strict=True)
            if source is not None
        ]

    def send(self, signum: int) -> None:
        """Send a signal to the launcher, which passes it on to the ranks."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signum)

    def kill(self) -> None:
        """End all ranks now."""
        self.send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                self._process.wait(GRACE)
            finally:  # also after a second interrupt
                self._kill_at_once()
        self._process.wait()

    def wait(self) -> int:
        """Wait for the job; its exit code is the first failed rank's, and 128 + signal where one ended it.

        1 where that rank exited with 0 in the middle of the job; 0 for an elastic job that finished without the ranks
        that failed.

        The file that ``RING_TIMELINE`` names is written then. When the wait is interrupted the job is killed.
        """
        try:
            code = self._wait()
            if self._watch is not None and self._watch.has_killed:
                end_session(self._process.pid)  # it may have ended without its ranks
        except BaseException:
            self.kill()
            raise
        finally:
            self._over.set()
            if self._watch is not None:
                self._watch.close()
        self._take_rest()
        if problem := self._traces.merge():
            print_message(problem)
        if self.ended_by:
            code = -self.ended_by
        elif self.failures and not self._elastic:
            code = job_exit_code(self.failures, self._n)
        elif self._watch is not None and self._watch.has_killed:
            code = int(bool(self._watch.problem))
        return exit_code(code) or int(bool(self._output_error))

    def _wait(self) -> int:
        """Wait for the launcher in steps: a signal that comes just before a system call does not interrupt it."""
        with contextlib.suppress(ProcessLookupError):  # `kill` has waited for it
            exited = os.pidfd_open(self._process.pid)
            try:
                poll = select.poll()
                poll.register(exited, select.POLLIN)
                while not poll.poll(_LOOK * 1000):
                    pass
            finally:
                os.close(exited)
        return self._process.wait()

    @property
    def first_failure(self) -> RankFailure | None:
        """The rank that failed before all others; None when none has."""
        return first_failure(self.failures, self._n)

    @property
    def _output_error(self) -> str:
        """Why output of the ranks was lost; empty when all is written."""
        return next((output.error for output in self._outputs if output.error), "")

    def describe_failure(self) -> str:
        """One sentence on the rank that failed first, or on the launcher when no rank did."""
        first = self.first_failure
        if self._process.returncode == 0 and self._output_error:
            return f"output of the ranks was lost: {self._output_error}"
        if first is None and self._watch is not None and self._watch.problem:
            return f"{self._watch.problem}: {shlex.join(self.command)}"
        if first is None:
            how = describe_exit(self._process.returncode)
            return f"the launcher of the ranks failed ({how}): {shlex.join(self.command)}"
        too_early = "" if first.code or first.reason else " in the middle of the job"
        return f"rank {first.rank} on {first.host} failed first: {first.how}{too_early}"

    def _take_rest(self) -> None:
        """Wait until the output of the ranks is written; for a limited time when a signal has ended the job."""
        until = time.monotonic() + GRACE
        for carrier, output in zip(self._carriers, self._outputs, strict=True):
            while carrier.is_alive() and not (self.ended_by and time.monotonic() > until):
                carrier.join(0.2)
            if not carrier.is_alive():
                output.close()

    def _add_failures(self, failures: list[RankFailure]) -> None:
        if failures and not self.failures and not self._elastic:
            threading.Thread(target=self._end_others, name="ring-job-end", daemon=True).start()
        self.failures += failures

    def _take_mark(self, mark: RankMark) -> None:
        if self._watch is not None:
            self._watch.take(mark)

    def _is_blocked(self) -> bool:
        return any(output.is_writing for output in self._outputs)

    def _end_others(self) -> None:
        """After the first failure: the others have time to end with errors of their own."""
        if not self._over.wait(GRACE):
            self.kill()

    def _end_by_signal(self, signum: int) -> None:
        """Pass on a signal that would end this process. Ranks then have limited time; a second Ctrl-C kills them."""
        if signum in self._passed_on:  # mpiexec takes a second one for an order to kill
            if signum == signal.SIGINT and time.monotonic() - self._passed_on[signum] > _SAME_SIGNAL:
                self._kill_at_once()
            return
        self._passed_on[signum] = time.monotonic()
        self.send(signum)
        if not self.ended_by:
            self.ended_by = signum
            threading.Thread(target=self._limit_time_to_end, name="ring-job-end", daemon=True).start()

    def _limit_time_to_end(self) -> None:
        """Ranks may be stopped or stuck and ignore the signal; SIGKILL always works."""
        if self._over.wait(_WARN_AFTER):
            return
        print_message(f"waiting {STOPPING - _WARN_AFTER:.0f} s more for the ranks to end; Ctrl-C kills them at once")
        if not self._over.wait(STOPPING - _WARN_AFTER):
            print_message(f"killing the ranks: they have not ended within {STOPPING:.0f} s")
            self._kill_at_once()

    def _kill_at_once(self) -> None:
        if self._over.is_set():  # the process id may belong to another process by now
            return
        end_session(self._process.pid)

    @contextlib.contextmanager
    def signals_passed_on(self) -> Iterator[None]:
        """While the block runs, signals that would end this process end the job instead (command line only).

        A signal that this process ignores, as under ``nohup``, stays ignored.
        """
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

        def pass_on(signum: int, _frame: FrameType | None) -> None:
            if signum in _ENDING:
                self._end_by_signal(signum)
            else:
                self.send(signum)

        kept = [signum for signum in wanted if signal.getsignal(signum) is not signal.SIG_IGN]
        before = {signum: signal.signal(signum, pass_on) for signum in kept}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class _Output:
    """Writes one output stream of the job to ``sink`` and passes on the reports and the marks in it."""

    def __init__(
        self,
        sink: TextIO | None,
        on_failures: Callable[[list[RankFailure]], None],
        on_mark: Callable[[RankMark], None],
    ) -> None:
        self._sink = sink
        self._on_failures = on_failures
        self._on_mark = on_mark
        self._kept = b""
        self.is_writing = False
        """Whether a write is under way, which the reader of the output may hold up."""
        self.error = ""
        """Why output was lost."""

    def take(self, data: bytes) -> None:
        """The next piece of output."""
        text, failures, self._kept = split_reports(self._kept + data, self._on_mark)
        self._on_failures(failures)
        self._write(text)

    def close(self) -> None:
        """The output has ended: an unfinished report is ordinary text."""
        self._write(self._kept)

    def _write(self, data: bytes) -> None:
        """Write ``data``. Raises BrokenPipeError when the reader has gone; ranks that write more then learn of it.

        A terminal that has gone is such a reader.
        """
        if not data or self.error:
            return
        if self._sink is None:
            self.error = "the stream is closed"
            return
        self.is_writing = True
        try:
            _write(self._sink, data)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET) or (error.errno == errno.EIO and _is_device(self._sink)):
                raise BrokenPipeError(errno.EPIPE, "the reader of the output has gone") from error
            self.error = str(error.strerror)
        finally:
            self.is_writing = False


def _start_limit(given: float | None, hides: bool) -> float:
    """Seconds that a launcher has to start all ranks, 0 without end; ``hides``: not all marks may reach us."""
    limit = config().start_timeout if given is None else given
    if limit < 0:
        return 0.0 if hides else _START_TIMEOUT
    return limit


def _is_device(stream: TextIO) -> bool:
    return stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)


def print_message(text: str) -> None:
    """Print one line of ringrun's own to stderr."""
    if sys.stderr is None:  # closed when this process was started
        return
    with contextlib.suppress(OSError):  # the terminal is gone
        print(f"ringrun: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _write(sink: TextIO, data: bytes) -> None:
    """Bytes to a text stream, as they are where it has a binary side."""
    sink.flush()
    binary = getattr(sink, "buffer", None)
    if binary is None:
        sink.write(data.decode(errors="replace"))
    else:
        for piece in pieces(data):  # stderr may go to the same pipe at the same time
            binary.write(piece)
            binary.flush()
    sink.flush()
