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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Literal, TextIO

from ring_notebook.analysis import job_failure, time_limits
from ring_notebook.analysis.job_failure import Event, Kind, RankFailure, Rules, describe_exit, first_failure, judge
from ring_notebook.analysis.operation_log import TRACE
from ring_notebook.analysis.time_breakdown import RankTimes
from ring_notebook.config import config
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.hosts import Host, check_interface, master_of
from ring_notebook.launch.merge_traces import Traces
from ring_notebook.launch.printed_lines import RankFiles, RankOutput, Style, is_colourful
from ring_notebook.launch.supervisor.growth import NOT_ELASTIC, Elastic
from ring_notebook.launch.supervisor.inherited_variables import given_variables, without_outer_job
from ring_notebook.launch.supervisor.parent_death import wrap
from ring_notebook.launch.supervisor.start_and_signal import end_session
from ring_notebook.launch.supervisor.stderr_reports import RankMark, split_reports
from ring_notebook.launch.supervisor.tagged_output import SOON, TAGGED, Carrier, pieces
from ring_notebook.machine.os_calls import Wake, exit_descriptor
from ring_notebook.rank.rank_variables import MASTER

_HIDING = ("SLURM_STDERRMODE", "SLURM_STDOUTMODE")  # with these srun hides output of ranks from us
_LOOK = 0.5  # seconds; a signal that did not interrupt the wait for the job is handled then
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *job_failure.ENDS_NOTHING)


class Job:
    """``program`` on ``n`` ranks. It ends when this process does, however this process ends.

    What the ranks print goes to ``sys.stdout`` and ``sys.stderr`` as they are when the job starts, which in a notebook
    are the cell's. All of ``env`` reaches the ranks of all hosts. ``elastic`` has the rules of an elastic job.
    ``start_timeout`` is in seconds, by default `config`'s. With ``prefix`` lines begin with their rank, in colour on a
    terminal, with ``times`` also with the time, and ``files`` take what each rank prints too; tracebacks then come in
    one piece each. Raises MPIMissingError and ValueError as `find_launcher` and `Launcher.command` do.
    """

    def __init__(
        self,
        program: Sequence[str],
        n: int,
        hosts: Sequence[Host] = (),
        env: Mapping[str, str] | None = None,
        mpi_args: Sequence[str] = (),
        stdin: int | None = None,
        elastic: Elastic = NOT_ELASTIC,
        start_timeout: float | None = None,
        prefix: bool = False,
        times: bool = False,
        files: RankFiles | None = None,
    ) -> None:
        launcher = find_launcher(elastic, mpi_args)
        tagged = {TAGGED: "1"} if prefix or times or files else {}
        exported = {MASTER, *tagged, *(env or ())}
        self.command = launcher.command(launcher.supervised(program), n, hosts, mpi_args, exported)
        environment = {
            **without_outer_job(os.environ),
            MASTER: master_of(hosts),
            **launcher.environment(),
            **tagged,
            **given_variables(env or ()),
            **(env or {}),
        }
        if not launcher.foreign:  # theirs connect ranks by MPI
            check_interface(environment.get("RING_INTERFACE", ""), hosts)
        elif environment.get(TRACE):
            print_message(
                f"--trace-on-error has no effect: it needs our own supervisor, and {launcher} starts the ranks"
            )
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
        limit = None
        if launcher.foreign:
            hides = bool(mpi_args) or any(name in environment for name in _HIDING)
            limit = _start_limit(start_timeout, hides)
        self._rules = Rules(n, elastic.min_np, launched=True, start_limit=limit)
        self._began = time.monotonic()
        self._looked = self._deaf = 0.0
        self._events: list[Event] = []
        self.verdict = judge(self._rules, (), 0.0)
        """Of what has happened so far; final after `wait`."""
        self._exited, self._wake = exit_descriptor(self._process.pid), Wake()
        weakref.finalize(self, os.close, self._exited)
        weakref.finalize(self, self._wake.close)
        self._causes: dict[int, str] = {}  # what ranks raised
        self.times: dict[int, RankTimes] = {}
        """What each rank has measured of its steps, where its script calls `log`."""
        named: tuple[tuple[TextIO | None, Literal["stdout", "stderr"]], ...]
        named = ((sys.stdout, "stdout"), (sys.stderr, "stderr"))
        style = partial(Style, n, prefix, times=times, most=elastic.most(n))
        self._outputs = [
            _Output(
                sink,
                self._note,
                self.times,
                RankOutput(style(colour=is_colourful(sink)), name, files, self._causes) if tagged else None,
            )
            for sink, name in named
        ]
        sources = (self._process.stdout, self._process.stderr)
        self._carriers = [  # a thread for each: the one flows while nobody reads the other
            Carrier(self._process, {source: output.take}, hold=SOON)
            for source, output in zip(sources, self._outputs, strict=True)
            if source is not None
        ]

    def wait(self) -> int:
        """Wait for the job; its exit code is the first failed rank's, and 128 + signal where one ended it.

        1 where that rank exited with 0 in the middle of the job; 0 for an elastic job that finished without the ranks
        that failed.

        The file that ``RING_TIMELINE`` names is written then. When the wait is interrupted the job is killed.
        """
        try:
            self._wait()
        except BaseException:
            self._note("stopped")
            try:
                self._wait()
            finally:  # also after a second interrupt
                end_session(self._process.pid)
            raise
        self._take_rest()
        self.verdict = judge(self._rules, self._events, self._now())
        if problem := self._traces.merge():
            print_message(problem)
        return self.verdict.code or int(bool(self._output_error))

    def _wait(self) -> None:
        """Carry out what is due until the launcher ends. Polls: a signal just before a system call interrupts none."""
        poll = select.poll()
        poll.register(self._exited, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        ready = set[int]()
        while self._exited not in ready:
            self._look()
            wait = max(0.0, min(_LOOK, self.verdict.look_at - self._now()))
            ready = {descriptor for descriptor, _ in poll.poll(1000 * wait)}
            if self._wake.fileno() in ready:
                self._wake.clear()
        self._note("launcher", self._process.wait())
        if self.verdict.ends:
            end_session(self._process.pid)  # it may have ended without its ranks

    def _look(self) -> None:
        now, before = self._now(), self.verdict
        # After a SIGSTOP of this process, reports of ranks are yet to be read.
        waited, self._looked = now - self._looked, now
        self._deaf += waited if any(output.is_writing for output in self._outputs) else max(0.0, waited - 2 * _LOOK)
        latest = judge(self._rules, self._events, now, self._deaf)
        if latest.due:
            self._events.append(Event(now, "looked", self._deaf))
            latest = judge(self._rules, self._events, now, self._deaf)
        self.verdict = latest
        for signum in latest.signals[len(before.signals) :]:
            if signum == signal.SIGKILL:
                end_session(self._process.pid)
            else:
                os.kill(self._process.pid, signum)
            if signum == signal.SIGTSTP:  # of the command line, whose shell waits for it
                os.kill(os.getpid(), signal.SIGSTOP)
        for text in latest.words[len(before.words) :]:  # stderr may block: a stuck thread is left behind
            printer = threading.Thread(target=print_message, args=(text,), daemon=True)
            printer.start()
            printer.join(_LOOK)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _note(self, kind: Kind, value: RankFailure | str | float = 0.0) -> None:
        """Take in an event, from any thread or signal handler."""
        self._events.append(Event(self._now(), kind, value))
        self._wake.set()

    @property
    def _output_error(self) -> str:
        """Why output of the ranks was lost; empty when all is written."""
        return next((output.error for output in self._outputs if output.error), "")

    def describe_failure(self) -> str:
        """One sentence on the rank that failed first, or on the launcher when no rank did."""
        first = first_failure(self.verdict.failures, self._rules.n)
        if self._process.returncode == 0 and self._output_error:
            return f"output of the ranks was lost: {self._output_error}"
        if first is not None:
            cause = self._causes.get(first.rank, "") if first.code == 1 and not first.reason else ""
            return f"{first.sentence}{f', {cause}' * bool(cause)}"
        how = f"the launcher of the ranks failed ({describe_exit(self._process.returncode)})"
        return f"{self.verdict.problem or how}: {shlex.join(self.command)}"

    def _take_rest(self) -> None:
        """Wait until the output of the ranks is written; for a limited time when a signal has ended the job."""
        until = self._now() + time_limits.GRACE
        for carrier, output in zip(self._carriers, self._outputs, strict=True):
            while carrier.is_alive() and not (self.verdict.ended_by and self._now() > until):
                carrier.join(0.2)
            if not carrier.is_alive():
                output.close()

    @contextlib.contextmanager
    def signals_passed_on(self, signals: Sequence[signal.Signals] = _SIGNALS) -> Iterator[None]:
        """While the block runs, ``signals`` to this process reach the job: all that would end or stop a command line.

        A signal that this process ignores, as under ``nohup``, stays ignored.
        """

        def pass_on(signum: int, _frame: FrameType | None) -> None:
            self._note("signal", signum)

        kept = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]
        before = {signum: signal.signal(signum, pass_on) for signum in kept}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class _Output:
    """Writes one output stream of the job to ``sink``, and has the reports in it noted."""

    def __init__(
        self,
        sink: TextIO | None,
        note: Callable[[Kind, RankFailure | int], None],
        times: dict[int, RankTimes],
        lines: RankOutput | None,
    ) -> None:
        self._sink = sink
        self._lines = lines
        self._note = note
        self._times = times
        self._kept = b""
        self.is_writing = False
        """Whether a write is under way, which the reader of the output may hold up."""
        self.error = ""
        """Why output was lost."""

    def take(self, data: bytes) -> None:
        text, failures, self._kept = split_reports(self._kept + data, self._take_mark)
        for failure in failures:
            self._note("exited", failure)
        self._write(self._lines.feed(text) if self._lines else text)

    def _take_mark(self, mark: RankMark | RankTimes) -> None:
        if isinstance(mark, RankTimes):
            self._times[mark.rank] = mark
        else:
            self._note("ended" if mark.ended else "started", mark.rank)

    def close(self) -> None:
        """The output has ended: an unfinished report is ordinary text."""
        self._write(self._lines.feed(self._kept) + self._lines.close() if self._lines else self._kept)

    def _write(self, data: bytes) -> None:
        """Write ``data``. Raises BrokenPipeError when the reader or terminal has gone; later writes of ranks fail."""
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
    """Seconds that a launcher has to start all ranks, 0: no limit. ``hides``: some start marks may not reach us."""
    limit = config().start_timeout if given is None else given
    if limit < 0:
        return 0.0 if hides else time_limits.START_LIMIT
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
