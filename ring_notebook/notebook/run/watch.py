"""Watches the ranks of one run until it has ended: passes interrupts on, keeps the time limits, reaches the verdict."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from math import inf
from threading import Event, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ipyparallel import RemoteError
from IPython.core.getipython import get_ipython

from ring_notebook.analysis.job_failure import judge_answer, judge_run, judge_stop
from ring_notebook.config import config
from ring_notebook.errors import ClusterError
from ring_notebook.notebook.panel.waits import whereabouts
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.answering import Answering
from ring_notebook.notebook.run.failures import MISSING, brief, own_failures
from ring_notebook.notebook.run.knob_changes import let_go
from ring_notebook.notebook.run.notifications import Notices
from ring_notebook.notebook.run.run_outcome import Verdict, verdict_of
from ring_notebook.notebook.run.takeover import FollowedLog
from ring_notebook.protocol.records import Ended, Failure, Record, Status, encode
from ring_notebook.text.error_text import error_text, printable

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engines

_TICK = 0.05


class Watch:
    """Watches a run in a thread of its own; ``ended`` is set when `verdict` is final.

    ``futures`` are the engines' answers by rank, empty for a run that another kernel has sent. While one of
    ``questions`` waits, time limits are suspended. ``on_end`` is called before ``ended`` is set. ``regularly`` is a
    period in seconds (0: never) and what is called after each.
    """

    def __init__(
        self,
        engines: Engines,
        log: RunLog | FollowedLog,
        futures: Sequence[Any],
        timeout: float,
        questions: Answering,
        on_end: Callable[[], None],
        regularly: tuple[float, Callable[[], None]] = (0.0, lambda: None),
    ) -> None:
        self.verdict = Verdict("running", None)
        self.ended = Event()
        self._engines = engines
        self._log = log
        self._futures = futures
        self._timeout = timeout
        self._questions = questions
        self._notices = Notices(log)
        self._held = 0.0  # seconds in which a rank waited for its user; time limits do not count them
        self._on_end = on_end
        self._period, self._regularly = regularly
        self._next = self._period or inf
        self._ranks = range(log.size)
        self._started = monotonic()
        self._left = False
        self._signalled: set[int] | None = None  # ranks that the last interrupt was passed on to; None before the first
        self._interrupted = False  # by the user, not by a failure
        self._stops_since = inf  # when the user stopped it, or a rank last waited for its user after that
        self.ended_ranks: list[int] = []
        """The engines that were ended because they did not stop, by their ranks in the cluster."""
        self._failed_at = inf
        self._let_go = False
        self._timed_out = False
        self._where: list[str] = []  # where ranks were then
        self._died: dict[int, object] = {}  # by rank of the run: why it died
        self._overdue: dict[int, int] = {}  # see `_caught_up`: messages by rank, -1 for all
        self._answered: dict[int, float] = {}  # when the engines of ranks that have not ended answered
        self._silent: set[int] = set()  # ranks that are recorded as failed because of that
        Thread(target=self._run, name=f"ring-run-{log.run}", daemon=True).start()

    def interrupt(self) -> None:
        """Interrupt every rank; returns at once. Callable from any thread."""
        self._interrupted = True
        self._signalled = set()

    def leave(self) -> None:
        """Stop watching; the run continues."""
        self._left = True

    @property
    def busy(self) -> list[int]:
        """The engines that still execute this run, by their ranks in the cluster."""
        if self._futures:
            ranks = [rank for rank, future in zip(self._ranks, self._futures, strict=False) if not future.done()]
        else:  # another kernel has sent it
            ranks = [] if self.ended.is_set() else [rank for rank in self._ranks if rank not in self._log.ended()]
        deaths = self._engines.deaths()
        return [engine for rank in ranks if (engine := self._engines.all[rank].rank) not in deaths]

    @property
    def held(self) -> bool:
        """Whether a rank waits for its user, which suspends time limits."""
        return self._questions.held(self._gone())

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no engine executes this run any more; False when one still does after ``timeout`` seconds."""
        deadline = monotonic() + timeout
        while self.busy and monotonic() < deadline:
            sleep(0.005)
        return not self.busy

    def _run(self) -> None:
        """End the run with a verdict, even after an unexpected error."""
        try:
            self._wait()
            self.verdict = self._judge()
            if self.verdict.status == "running":
                self._log.close()
            else:
                self._log.finish(self.verdict.status, self.verdict.text, self.verdict.shown)
        except BaseException as error:
            self.verdict = _no_verdict(error)
        try:
            self._on_end()
        except BaseException as error:
            self._log.trouble = f"the report could not be shown: {type(error).__name__}: {error_text(error)}"
        finally:
            self.ended.set()
            self._questions.close()
        self._notices.end(self.verdict.text)

    def _wait(self) -> None:
        """Return when all ranks have ended, or nothing more can arrive from them."""
        before = 0.0
        while not self._log.wait_ended(self._ranks, _TICK):
            self._notices.look()
            now, held = monotonic() - self._started, self.held
            self._held += now - before if held else 0.0
            before = now
            self._stop_with_one_that_was_interrupted()
            self._note_deaths()
            if now >= self._next:
                self._next = now + self._period
                self._regularly()
            self._questions.poll()
            self._questions.pass_on_hold(self._gone())
            self._note_silent_engines(now)
            if self._failed_at < inf and not self._let_go:
                self._let_go = True  # ranks that are paused do not notice that another one has failed
                let_go(self._engines)
            # A user may debug one rank for as long as it takes.
            if held if self._failed_at < inf else self._failures() or self._died:
                self._failed_at = now
            why, over = judge_run(
                now,
                failed_at=self._failed_at,
                cause_known=self._cause_known(),
                timeout=self._timeout,
                held=self._held,
                heard=self._all_heard(),
            )
            if why == "timeout" and not self._timed_out:
                self._timed_out = True
                self._where = whereabouts(self._log.view(), self._log.code_at)
                self.interrupt()
            elif why and self._signalled is None:
                self._signalled = set()
            if self._left or ((over or self._engines.trouble()) and self._caught_up(-1)):
                break
            self._pass_on_interrupt()
            self._end_those_that_do_not_stop(now)

    def _note_deaths(self) -> None:
        """Record the end of ranks that have died, which they cannot send themselves."""
        deaths, ended = self._engines.deaths(), self._log.ended()
        for rank in self._ranks:
            engine = self._engines.all[rank].rank
            if engine in deaths and rank in self._died:
                self._died[rank] = deaths[engine]  # its advice changes when no other rank is left
            elif engine in deaths and rank not in ended:
                self._died[rank] = deaths[engine]
                if isinstance(self._log, RunLog):
                    seconds = self._log.now() - self._log.started
                    self._log.put(encode([Ended(self._log.run, rank, "died", seconds)]))

    def _note_silent_engines(self, now: float) -> None:
        """Record the failure of ranks whose engines have answered without a record of how the cell ended."""
        if not isinstance(self._log, RunLog):
            return
        gone = {*self._log.ended(), *self._died, *self._silent}
        all_answered = all(future.done() for future in self._futures)
        for rank, future in enumerate(self._futures):
            if rank in gone or not future.done():
                continue
            why = _raised(future)
            if not why and not all_answered:  # its record may wait behind records of ranks that still run
                continue
            at = self._answered.setdefault(rank, now)
            # The controller answers for an engine that it has lost; the cause of its death comes from elsewhere.
            known = self._engines.known_to_controller() and not why.startswith("EngineError")
            if not judge_answer(now, at, raised=bool(why), engine_known=known):
                continue
            if self._caught_up(rank):
                self._silent.add(rank)
                seconds = self._log.now() - self._log.started
                self._log.put(encode(_failure_of_engine(self._log.run, rank, why, seconds)))

    def _caught_up(self, rank: int) -> bool:
        """Whether the log has read all that had arrived at the first call: a record may still be in its queue."""
        return self._log.taken >= self._overdue.setdefault(rank, self._log.received)

    def _failures(self) -> list[Failure]:
        """The ranks' failures. Ranks that stopped together with an interrupted one have not failed."""
        failures = self._log.failures()
        return failures if not self._interrupted or self._cause_known() else []

    def _cause_known(self) -> bool:
        return bool(self._died or own_failures(self._log.failures()))

    def _pass_on_interrupt(self) -> None:
        """Interrupt the ranks that execute the cell. One that has not begun is interrupted when it does."""
        signalled = self._signalled
        if signalled is None:
            return
        ended = self._log.ended()
        # A run of another kernel began before it was followed.
        begun = self._log.statuses() if self._futures else self._ranks
        wanted = [rank for rank in begun if rank not in ended and rank not in signalled]
        signalled.update(wanted)
        self._engines.interrupt(self._log.run, wanted)

    def _end_those_that_do_not_stop(self, now: float) -> None:
        """End ranks that run on for too long after an interrupt, where they can start again."""
        limit, end = config().stop_limit, self._engines.end
        if self._interrupted and (self._stops_since == inf or self.held):
            self._stops_since = now
        if not limit or end is None or self.held:
            return
        for rank, status in self._running().items():
            waits = (status.waiting or {}) if status else {}
            unheard = (status.extra.get("unheard") or 0.0) if status else 0.0
            engine = self._engines.all[rank].rank
            if self._engines.living() == [rank]:
                # The supervisor would end with its last rank, and this rank's collective failed when the others ended.
                unheard = 0.0
            if how := judge_stop(now - self._stops_since, limit, unheard, waits.get("operation", "")):
                self.ended_ranks.append(engine)
                with suppress(ClusterError):  # its supervisor has ended, and all ranks with it
                    end(engine, how)

    def _all_heard(self) -> bool:
        """Whether all ranks that still run have noticed their interrupt, or cannot be ended."""
        if not config().stop_limit or self._engines.end is None:
            return True
        return all(status is not None and status.extra.get("unheard") == 0.0 for status in self._running().values())

    def _running(self) -> dict[int, Status | None]:
        """The ranks that have not ended, with their newest status."""
        statuses, gone = self._log.statuses(), self._gone()
        ranks = [rank for rank in self._ranks if rank not in gone]
        return {rank: statuses.get(rank) for rank in ranks if self._engines.all[rank].rank not in self.ended_ranks}

    def _gone(self) -> set[int]:
        """The ranks that have ended or died."""
        return {*self._log.ended(), *self._died}

    def _stop_with_one_that_was_interrupted(self) -> None:
        """A rank whose debugger was quit stops all, as an interrupt of the kernel does."""
        if self._signalled is None and any(end.status == "interrupted" for end in self._log.ended().values()):
            self.interrupt()

    def _judge(self) -> Verdict:
        self._stop_with_one_that_was_interrupted()
        return verdict_of(
            len(self._ranks),
            self._log.ended(),
            self._log.failures(),
            detached=self._left,
            interrupted=self._interrupted,
            timed_out=self._timeout if self._timed_out else 0.0,
            where=self._where,
            died=self._died,
            ended_by_us={rank for rank in self._died if self._engines.all[rank].rank in self.ended_ranks},
            trouble=self._engines.trouble(),
            replaced=self._replaced(),
            notebook=_own_names(),
        )

    def _replaced(self) -> dict[int, float]:
        """When ranks replaced others, by rank; empty if they miss a name that older ranks do not have either."""
        when = {rank: engine.replaced for rank, engine in enumerate(self._engines.all) if engine.replaced}
        names = (MISSING.match(failure.message) for failure in self._log.failures() if failure.rank in when)
        missing = {name[1] for name in names if name}
        others = [rank for rank in self._engines.living() if rank not in when]
        if missing and others:
            with suppress(ClusterError):
                found = self._engines.call_beside("ring_notebook.engine.namespace:names", ranks=others)
                return when if missing & {name for known in found for name in known or ()} else {}
        return when


def _own_names() -> Container[str]:
    """The names of the notebook's variables; none if there is no notebook."""
    shell = get_ipython()
    return shell.user_ns if shell is not None else ()


def _raised(future: Any) -> str:
    """What ended the call on an engine outside of the cell; empty if it returned."""
    result = future.result()
    return f"{result.ename}: {result.evalue}" if isinstance(result, RemoteError) else ""


def _failure_of_engine(run: str, rank: int, why: str, seconds: float) -> list[Record]:
    """The records that an engine has not sent. ``why``: what it raised, empty if it returned."""
    what = f"its engine failed outside of the cell: {why}" if why else "its engine sent no record of how the cell ended"
    error = ClusterError(f"rank {rank}: {what}; run the cell again, and if that fails `%ring restart` the cluster")
    shown = printable(f"ClusterError: {error}")
    pickled = pickle.dumps(error).hex()
    failure = Failure(run, rank, "ClusterError", ClusterError.__module__, str(error), (), shown, False, pickled)
    return [failure, Ended(run, rank, "failed", seconds)]


def _no_verdict(error: BaseException) -> Verdict:
    """The verdict on a run whose end could not be recorded or read."""
    message = f"the end of the run could not be read or recorded: {type(error).__name__}: {error_text(error)}"
    shown = f"ClusterError: {message}"
    return Verdict("failed", brief(ClusterError(message), shown), shown, shown)
