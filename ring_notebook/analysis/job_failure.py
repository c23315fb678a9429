"""Which rank failed first, how long the others have, what is ended and how, the exit code, and the words for the user.

All functions are pure. From the events so far and the time, `judge` says what must have happened to a job by now. The
functions below it do the same for one rank, one host and one run of a notebook. Supervisors, agents, wrappers and
kernels note the events and carry out the verdict. Seconds count from the start of the job. A deadline passes when its
owner looks, which is an event too (``looked``): whatever arrived before that look is in time.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from ring_notebook.analysis import time_limits as limits
from ring_notebook.text.words import plural

_OF_SHELL = 128  # added to the number of a signal

ENDS_NOTHING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT)
"""Signals after which a job continues."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How the program of one rank failed. ``code`` is negative for a signal, as in subprocess.

    ``code`` is 0 for a rank that exited in the middle of the job. ``time`` is the clock of its host. ``out_of_memory``:
    the Linux kernel of the host has killed a process meanwhile because memory ran out; None where it does not count
    these. ``aborted``: the rank ended only because another one failed. ``reason`` is set if the code does not say why:
    the rank could not be started, or its host is lost. ``behind``: the rank to which an aborted rank has lost its link,
    if it knows no more; else -1.
    """

    rank: int
    host: str
    code: int
    time: float
    out_of_memory: bool | None = None
    aborted: bool = False
    reason: str = ""
    behind: int = -1

    @property
    def how(self) -> str:
        return self.reason or describe_exit(self.code, self.out_of_memory)

    @property
    def sentence(self) -> str:
        """Says that the rank failed first, and how it ended."""
        if self.aborted and self.behind >= 0:  # nobody knows more: the rank named is no cause
            return f"rank {self.behind} was lost first: rank {self.rank} on {self.host} has lost its link to it"
        too_early = "" if self.code or self.reason else " in the middle of the job"
        return f"rank {self.rank} on {self.host} failed first: {self.how}{too_early}"


Kind = (
    Literal["exited", "aborts", "leaving", "missed", "apart", "unwanted", "joined"]
    | Literal["started", "ended", "launcher", "signal", "stopped", "looked"]
)


class Event(NamedTuple):
    """Something that has happened to a job.

    - ``exited``: a rank has exited, as the value says; code 0 is a good end until ``missed`` says otherwise
    - ``aborts``: a rank has called MPI_Abort and waits to be killed
    - ``leaving``: the program of a rank has ended, not because of another rank, and its exit handlers still run
    - ``missed``: other ranks still need this rank, which has exited with 0
    - ``apart``: the ranks of an elastic job will never find each other; the value says why
    - ``unwanted``: this rank is to end while others live on
    - ``joined``: the ranks of an elastic job have taken in this one
    - ``started``: a process of this rank has been started, by a site's launcher or in place of one that has exited
    - ``ended``: the rank of a site's launcher has ended
    - ``launcher``: the launcher has exited with this code
    - ``signal``: this signal has come for the job
    - ``stopped``: no process waits for the job any more
    - ``looked``: everything that was due has been carried out; the value is ``deaf`` of `judge`
    """

    at: float
    kind: Kind
    value: RankFailure | str | float = 0.0


class Rules(NamedTuple):
    """The kind of a job of ``n`` ranks, for `judge`.

    ``min_np``: the job is elastic and continues with so many ranks; with fewer for ``patience`` seconds, within which
    others may join. ``engines``: ranks of a notebook, which never exit by themselves and live on when another one dies.
    ``launched``: a launcher starts and ends the ranks; the owner of the job only hears of ranks that fail, and signals
    the launcher. ``start_limit``: seconds that a site's launcher has to start all ranks; 0 for any time.
    """

    n: int
    min_np: int = 0
    engines: bool = False
    launched: bool = False
    start_limit: float | None = None
    patience: float = 0.0


def judge(rules: Rules, events: Iterable[Event], now: float, deaf: float = 0.0) -> Verdict:
    """What must have happened to a job by ``now``.

    ``deaf``: seconds in which no report of a rank could arrive, for example behind output that nobody reads.
    """
    verdict = Verdict(rules)
    for event in events:
        verdict._take(event)
    before = len(verdict.signals), len(verdict.words), len(verdict.failures)
    verdict._look(now, deaf)
    verdict.due = before != (len(verdict.signals), len(verdict.words), len(verdict.failures))
    return verdict


class Verdict:
    """The verdict on a job, from `judge`. From one verdict to the next its lists only grow."""

    def __init__(self, rules: Rules) -> None:
        self.signals: list[int] = []  # due by now, to all ranks or their launcher
        self.words: list[str] = []  # due by now, to the user
        self.failures: list[RankFailure] = []
        self.finished: dict[int, RankFailure] = {}  # ranks that have ended well so far
        self.doomed: set[int] = set()  # ranks to kill while the others live on
        self.problem = ""  # why a launcher was ended before all ranks had started
        self.ended_by = 0  # the signal that ends the job, if one does
        self.ends = False  # this verdict ends the job
        self.due = False  # this look has decided something new; its owner then adds an event `looked`
        self._rules = rules
        self._members = set(range(rules.n))  # ranks that take part, or have finished
        self._size = rules.n  # of the job when it was largest
        self._exited: set[int] = set()
        self._leaving: dict[int, RankFailure] = {}
        self._apart = ""
        self._started: set[int] = set()
        self._through: set[int] = set()  # ranks that have ended, as their wrappers report
        self._through_at = 0.0
        self._launcher_code: int | None = None
        self._passed_on: dict[int, float] = {}  # when each signal came first
        self._end_at = self._warn_at = self._launcher_at = self._short_at = inf
        self._start_warning = inf if rules.start_limit is None else min(limits.WARN_START, rules.start_limit or inf)

    @property
    def is_ending(self) -> bool:
        """Whether all ranks have been told to end. Their exit codes then mean nothing."""
        return bool(self.ended_by or self.ends)

    @property
    def look_at(self) -> float:
        """When to look again, unless an event comes first."""
        return min(self._end_at, self._warn_at, self._launcher_at, self._short_at)

    @property
    def code(self) -> int:
        """The exit code of the job, if it is over."""
        rules = self._rules
        if self.ended_by:
            return exit_code(-self.ended_by)
        if self._launcher_code is not None and (rules.min_np or not self.failures):
            return int(bool(self.problem)) if self.ends else exit_code(self._launcher_code)
        if rules.min_np and not self._apart and len(self._members) >= rules.min_np:
            return 0
        first = first_failure(self.failures, rules.n)
        return 0 if first is None else exit_code(first.code or 1)

    def _take(self, event: Event) -> None:
        match event:
            case Event(at, "looked", float(deaf)):
                self._look(at, deaf)
            case Event(at, "signal", int(number)):
                self._signal(at, number)
            case Event(_, "launcher", int(code)):
                self._launcher_code = code
            case Event(_, "started", int(rank)):
                self._started.add(rank)
                self._exited.discard(rank)
            case Event(at, "ended", int(rank)):
                self._started.add(rank)
                self._through.add(rank)
                self._through_at = at
            case Event(_, "unwanted", int(rank)):
                self.doomed.add(rank)
            case Event(_, "exited", RankFailure(rank)) if rank in self.doomed:
                self.doomed.discard(rank)  # as requested
                self._members.discard(rank)
                if self._rules.min_np:
                    self._exited.add(rank)
            case _ if self.is_ending:
                pass
            case Event(at, "exited", RankFailure() as how):
                self._exited.add(how.rank)
                self._leaving.pop(how.rank, None)
                if how.code or self._rules.engines or self._rules.launched:
                    self._fail(at, how)
                else:
                    self.finished[how.rank] = how
                    if any(failure.behind == how.rank for failure in self.failures):  # it has left, and is to be named
                        self._end_within(at, limits.ABORTED)
            case Event(at, "aborts", RankFailure() as how):
                self._fail(at, how, 0.0)
                if self._rules.engines:  # MPI would end the others too, which may not use MPI
                    self.doomed.add(how.rank)
            case Event(at, "missed", int(rank)) if rank in self.finished:
                self._fail(at, self.finished.pop(rank))
            case Event(_, "joined", int(rank)):
                self._members.add(rank)
                self._size = max(self._size, rank + 1)
                self.words.append(f"rank {rank} has joined. Continuing with {plural(len(self._members), 'rank')}")
                if len(self._members) >= self._rules.min_np:
                    self._short_at = inf
            case Event(_, "leaving", RankFailure() as how):
                self._leaving[how.rank] = how
            case Event(_, "apart", str(why)):
                self._apart = why
            case Event(at, "stopped"):
                self._end_within(at, 0.0)

    def _look(self, now: float, deaf: float) -> None:
        if self._launcher_code is not None:
            self._end_at = self._warn_at = self._launcher_at = self._short_at = inf
            return
        self._look_at_launcher(now, deaf)
        if now >= self._short_at and not self.is_ending:
            self._end_within(now, 0.0)
        if not self.is_ending and (now >= self._end_at or len(self._exited) >= self._size):
            self._blame_who_has_left(now)
        if now >= self._warn_at:
            left = limits.STOPPING - limits.WARN_STOPPING
            self.words.append(f"waiting {left:.0f} s more for the ranks to end; Ctrl-C kills them at once")
            self._warn_at = inf
        if now >= self._end_at:
            if self.ended_by and self._rules.launched and not self.ends:
                self.words.append(f"killing the ranks: they have not ended within {limits.STOPPING:.0f} s")
            self.signals.append(signal.SIGKILL if self.is_ending else signal.SIGTERM)
            self.ends, self._short_at = True, inf
            self._end_at = now + limits.GRACE

    def _look_at_launcher(self, now: float, deaf: float) -> None:
        """A site's launcher may fail to start all ranks, or outlive them."""
        n, limit = self._rules.n, self._rules.start_limit
        self._launcher_at = inf
        if limit is None or self.is_ending:
            return
        count = f"the launcher has started {len(self._started)} of {n} ranks"
        if len(self._started) < n:
            if now >= self._start_warning + deaf:
                self._start_warning = inf
                ends = f"; it is killed after {limit:g} s (--start-timeout)" if limit > limits.WARN_START else ""
                self.words.append(f"{count} so far{ends}")
            self._launcher_at = min(self._start_warning, limit or inf) + deaf
            if limit and now >= limit + deaf:
                advice = "see what it waits for, or raise --start-timeout (RING_START_TIMEOUT)"
                self.problem = f"{count} within {limit:g} s; {advice}"
                self._end_within(now, 0.0)
        elif len(self._through) >= n:
            self._launcher_at = self._through_at + limits.OUTLIVING + deaf
            if now >= self._launcher_at:
                self.words.append(f"killing the launcher: all ranks ended {limits.OUTLIVING:g} s ago, and it has not")
                self._end_within(now, 0.0)

    def _signal(self, at: float, number: int) -> None:
        if number in ENDS_NOTHING:
            self.signals.append(number)
            return
        if self._rules.launched and number in self._passed_on:  # mpiexec kills the ranks at a second one
            if number == signal.SIGINT and at - self._passed_on[number] > limits.SAME_SIGNAL:
                self.signals.append(signal.SIGKILL)
            return
        self.signals.append(number)
        self._passed_on.setdefault(number, at)
        if not self.is_ending:
            self._end_at = at + limits.STOPPING
            self._warn_at = at + limits.WARN_STOPPING if self._rules.launched else inf
        self.ended_by = self.ended_by or number

    def _blame_who_has_left(self, now: float) -> None:
        """If all failures are aborts, the ranks that have exited or are exiting have failed: the others needed them."""
        if self.failures and all(failure.aborted for failure in self.failures):
            for how in [*self.finished.values(), *self._leaving.values()]:
                self._fail(now, how)
            self.finished.clear()

    def _fail(self, at: float, how: RankFailure, patience: float | None = None) -> None:
        """A rank has failed. Unless the job continues, all end within ``patience``, by default as its exit demands."""
        where = f" on {how.host}" if how.reason else ""
        rules, failed = self._rules, f"rank {how.rank}{where} failed: {how.how}"
        self.failures.append(how)
        self._members.discard(how.rank)
        left = len(self._members)
        if rules.engines or (rules.min_np and (rules.launched or self._end_at < inf)):
            return
        if not rules.min_np:
            by_end = limits.ABORTED if how.aborted else limits.LINGER if how.code >= 0 else 0.0
            if how.aborted and how.behind >= 0 and how.behind not in self._exited:
                by_end = limits.LOST_LINK
            elif rules.launched:
                by_end = limits.GRACE
            self._end_within(at, by_end if patience is None else patience)
        elif self._apart:
            self.words.append(f"{self._apart}; ending the job")
            self._end_within(at, limits.GRACE)
        elif left < rules.min_np:
            fewer = f"fewer than the {rules.min_np} of --min-np"
            waits = f"; waiting {rules.patience:g} s for others to join" if left and rules.patience else ""
            self.words.append(f"{failed}. {plural(left, 'rank')} of {self._size} left, {fewer}{waits}")
            if waits:
                self._short_at = min(self._short_at, at + rules.patience)
            else:
                self._end_within(at, limits.GRACE)
        else:
            self.words.append(f"{failed}. Continuing with {plural(left, 'rank')} of {self._size}")

    def _end_within(self, at: float, seconds: float) -> None:
        self._end_at = min(self._end_at, at + seconds)


def first_failure(failures: Sequence[RankFailure], n: int = 0) -> RankFailure | None:
    """The rank of ``n`` that failed before all others; None when none has.

    Aborted ranks come after all others, because the clocks of hosts differ. If all ``n`` ranks exit with 0 in the
    middle of the job, none has failed: no rank waited for them.
    """
    if len(failures) == n and not any(failure.code for failure in failures):
        return None
    return min(failures, key=lambda failure: (failure.aborted, failure.time), default=None)


def exit_code(code: int) -> int:
    """The exit code that a shell shows for a subprocess return code: 128 + signal for a signal."""
    return code if code >= 0 else 128 - code


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:  # of realtime signals only the first and the last have names
        above = number - signal.SIGRTMIN
        return f"SIGRTMIN+{above}" if above > 0 else f"signal {number}"


_KILLERS = {
    True: ", probably out of memory",
    False: ", not out of memory",
    None: "; if nobody sent it, the Linux kernel did, out of memory",
}


def describe_exit(code: int, out_of_memory: bool | None = None) -> str:
    """A subprocess return code in words. ``out_of_memory`` is that of `RankFailure`."""
    # Programs give the code of SIGINT themselves.
    if _OF_SHELL < code <= _OF_SHELL + signal.SIGRTMAX and code != _OF_SHELL + signal.SIGINT:
        return f"exit code {code}, that of a shell whose program was {describe_exit(_OF_SHELL - code)}"
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    return f"killed by {name}{_KILLERS[out_of_memory] if name == 'SIGKILL' else ''}"


def judge_late_rank(failed_at: float | None, now: float) -> int:
    """The signal for a rank that has failed and still waits in its exit handlers; 0 while it has time."""
    late = 0.0 if failed_at is None else now - failed_at
    return 0 if late <= limits.RAISED else signal.SIGTERM if late < 2 * limits.RAISED else signal.SIGKILL


def judge_parting(code: int, left_early: bool, aborted: bool, stopping: bool) -> tuple[bool, float, bool]:
    """What the wrapper of a rank does when the rank has exited with ``code``, ``left_early`` or ``aborted`` by others.

    Returns whether it reports a failure; the seconds it waits, so that other ranks report before its exit makes MPI
    kill them; and whether it closes its connection to MPI's launcher, which then ends the others. It does none of this
    while a signal is ``stopping`` the job.
    """
    left_early = left_early and not code
    if stopping:
        return False, 0.0, False
    return bool(code) or left_early, limits.LINGER if left_early or aborted else 0.0, left_early or code > 0


def judge_run(
    now: float,
    *,
    failed_at: float = inf,
    cause_known: bool = False,
    timeout: float = 0.0,
    held: float = 0.0,
    heard: bool = True,
) -> tuple[Literal["", "timeout", "failure"], bool]:
    """Why the ranks of a notebook's run must be interrupted by now, and whether to stop waiting for their reports.

    ``failed_at``: when the first rank failed or died, or later, when a rank that waited for its user has its answer.
    ``cause_known``: a rank has failed by itself, or died. ``timeout``: the limit of the run, without the seconds in
    which the user ``held`` ranks. ``heard``: no rank that still runs may have to be ended, see `judge_stop`.
    """
    patience = limits.ENDING if cause_known and heard else limits.DYING + (0.0 if heard else limits.UNHEARD)
    stopped = now - failed_at > patience
    late = bool(timeout) and now - held > timeout
    return "timeout" if late else "failure" if now - failed_at > limits.ABORTING else "", stopped


def judge_stop(seconds: float, limit: float, unheard: float, where: str) -> str:
    """Why to end a rank of a notebook that continues after an interrupt; empty while it has time.

    The user stopped the run ``seconds`` ago; ``limit`` is RING_STOP_LIMIT. For ``unheard`` seconds the rank has waited
    in code that ignores signals; ``where`` names it, if known.
    """
    if unheard > limits.UNHEARD:
        waits = where or "code of another library"
        return f"was ended: {limits.UNHEARD:g} s after an interrupt it still waited in {waits}, which ignores signals"
    return f"was ended: it had not stopped {limit:g} s after an interrupt (RING_STOP_LIMIT)" if seconds > limit else ""


def judge_answer(now: float, answered_at: float, *, raised: bool, engine_known: bool) -> bool:
    """Whether a rank of a notebook's run has failed because its engine has answered without a record of its end.

    ``raised``: code of the engine itself raised. ``engine_known``: the controller has not lost the engine.
    """
    return now - answered_at > (limits.TELLING if not engine_known else limits.RAISING if raised else limits.REPORTING)


def judge_silence(heard: float, spoke: float, now: float, silence: float) -> tuple[str, bool]:
    """Why the other side of a connection between hosts counts as lost, if it does, and whether to send a sign of life.

    ``heard`` and ``spoke``: when the last sign came and went.
    """
    lost = f"it has not answered for {silence:g} s" if now - heard > silence else ""
    return lost, now - spoke > silence / 6


_ENDED_BY_BATCH_SYSTEM = {
    "TIMEOUT": "reached its time limit; ask for more (--time), and resume from a checkpoint",
    "DEADLINE": "reached its deadline; resume from a checkpoint in a new job",
    "PREEMPTED": "was preempted by another job; submit it again, and resume from a checkpoint",
    "OUT_OF_MEMORY": "ran out of memory; ask for more (--mem)",
    "CANCELLED": "was cancelled (scancel)",
    "PENDING": "was put back into the queue",
    "GONE": "has ended: the batch system does not know it any more",
}


def judge_batch_job(job: str, state: str, reason: str, lost: Sequence[str]) -> str:
    """Who or what has ended a batch job, as a sentence; empty while it runs, and where its state says nothing.

    ``state`` and ``reason`` are Slurm's words, and ``lost`` the hosts that it has lost. A job is ``COMPLETING`` from
    the moment of its end until all of its processes have ended, whatever has ended it.
    """
    if state in ("", "RUNNING", "CONFIGURING", "SUSPENDED", "STAGE_OUT", "STOPPED", "RESIZING", "SIGNALING"):
        return ""
    if reason == "TimeLimit":
        state = "TIMEOUT"
    elif lost and state in ("COMPLETING", "PENDING", "REQUEUED", "CANCELLED"):
        state = "NODE_FAIL"
    elif state == "COMPLETING":
        state = "CANCELLED"
    if state == "NODE_FAIL":
        where = f"host{'s' * (len(lost) > 1)} {', '.join(lost)}" if lost else "a host"
        return f"{job} was ended because it has lost {where}; submit it again, and resume from a checkpoint"
    return f"{job} {_ENDED_BY_BATCH_SYSTEM.get(state, f'has ended ({state})')}"
