"""What becomes of a job, as a table: its events, and what is sent when, the exit code, and the words a user reads."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from math import inf
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1
from typing import Any

import pytest

from ring_notebook.analysis import time_limits
from ring_notebook.analysis.job_failure import (
    Event,
    Kind,
    RankFailure,
    Rules,
    Verdict,
    describe_exit,
    first_failure,
    judge,
    judge_answer,
    judge_batch_job,
    judge_late_rank,
    judge_parting,
    judge_run,
    judge_silence,
    judge_stop,
)

SCRIPT, ELASTIC, ALL_OF_3, ENGINES = Rules(3), Rules(3, 1), Rules(3, 3), Rules(3, engines=True)
GROWING = Rules(3, 2, patience=60.0)
FEWER = "1 rank of 3 left, fewer than the 2 of --min-np; waiting 60 s for others to join"
OURS, OURS_ELASTIC = Rules(2, launched=True), Rules(2, 1, launched=True)
THEIRS, PATIENT = Rules(2, launched=True, start_limit=60.0), Rules(2, launched=True, start_limit=0.0)
HINT = "killed by SIGKILL; if nobody sent it, the Linux kernel did, out of memory"
WAITING = "waiting 9 s more for the ranks to end; Ctrl-C kills them at once"
KILLING = "killing the ranks: they have not ended within 10 s"
OUTLIVED = "killing the launcher: all ranks ended 30 s ago, and it has not"
NONE_YET = "the launcher has started 0 of 2 ranks so far"
TOO_FEW = "the launcher has started 1 of 2 ranks within 60 s; see what it waits for, or raise --start-timeout"
LOST = "its host is lost: it has not answered for 30 s"
APART = "rank 1 exited (exit code 4) before all ranks had called init()"

Step = tuple[float, Kind, "RankFailure | str | float"] | tuple[float, Kind]


def rank(number: int, code: int = 0, clock: float = 0.0, *, aborted: bool = False, why: str = "") -> RankFailure:
    """How ``number`` has ended, on a host ``h``, by its clock."""
    return RankFailure(number, "h", code, clock, aborted=aborted, reason=why)


def aborted(number: int, clock: float = 0.0, behind: int = -1) -> RankFailure:
    return RankFailure(number, "h", 1, clock, aborted=True, behind=behind)


def play(rules: Rules, steps: Sequence[Step], until: float = 200.0) -> tuple[list[tuple[float, int]], Verdict]:
    """What an owner sends when, that looks at each event and whenever it has to, and its last verdict."""
    events: list[Event] = []
    sent: list[tuple[float, int]] = []
    left = [Event(*step) for step in steps]
    now = deaf = 0.0
    while True:
        while left and left[0].at <= now:
            event = left.pop(0)
            if event.kind == "looked":  # not by the owner: what it has not heard until then
                deaf = float(str(event.value))
            else:
                events.append(event)
        latest = judge(rules, events, now, deaf)
        if latest.due:
            events.append(Event(now, "looked", deaf))
            latest = judge(rules, events, now, deaf)
            assert not latest.due
        sent += [(now, number) for number in latest.signals[len(sent) :]]
        kinds = [event.kind for event in events]
        gone = kinds.count("exited") >= rules.n + kinds.count("started") and not rules.engines and not rules.launched
        if not left and (gone or any(event.kind == "launcher" for event in events)):
            return sent, latest
        now = min(latest.look_at, left[0].at if left else inf)
        if now > until:
            return sent, latest


# fmt: off
ENDS: list[tuple[str, Rules, list[Step], list[tuple[float, int]], int, str, list[str]]] = [
    # Events, signals that are sent, exit code, who failed first, words. Of scripts all ranks end when one fails.
    ("all end well", SCRIPT, [(1, "exited", rank(0)), (2, "exited", rank(1)), (3, "exited", rank(2))], [], 0, "", []),
    ("an exit code", SCRIPT,
     [(1, "exited", rank(1, 3))], [(2, SIGTERM), (7, SIGKILL)], 3, "rank 1 on h failed first: exit code 3", []),
    ("a death leaves the others no time", SCRIPT,
     [(1, "exited", rank(1, -SIGKILL)), (1.5, "exited", rank(0, -SIGTERM)), (1.5, "exited", rank(2, -SIGTERM))],
     [(1, SIGTERM)], 137, f"rank 1 on h failed first: {HINT}", []),
    ("a crash", SCRIPT, [(1, "exited", rank(2, -signal.SIGSEGV))], [(1, SIGTERM), (6, SIGKILL)], 139,
     "rank 2 on h failed first: killed by SIGSEGV", []),
    ("an uncaught KeyboardInterrupt", SCRIPT, [(1, "exited", rank(1, -SIGINT))], [(1, SIGTERM), (6, SIGKILL)], 130,
     "rank 1 on h failed first: killed by SIGINT", []),
    ("the one that aborted another has time to be named", SCRIPT,
     [(1, "exited", aborted(0)), (3.5, "exited", rank(1, 5))], [(4, SIGTERM), (9, SIGKILL)], 5,
     "rank 1 on h failed first: exit code 5", []),
    ("whatever the clocks of two hosts say", SCRIPT,
     [(1, "exited", aborted(0, 10.0)), (1.5, "exited", rank(1, 3, 99.0))], [(2.5, SIGTERM), (7.5, SIGKILL)], 3,
     "rank 1 on h failed first: exit code 3", []),
    ("a host that is silent, behind a link that others have lost", SCRIPT,
     [(1, "exited", aborted(0, behind=2)), (2, "exited", aborted(1, behind=2)), (31, "exited", rank(2, 1, why=LOST))],
     [], 1, f"rank 2 on h failed first: {LOST}", []),
    ("a host of which nothing is ever known", SCRIPT,
     [(1, "exited", aborted(0, behind=2)), (2, "exited", aborted(1, behind=2))], [(36, SIGTERM), (41, SIGKILL)], 1,
     "rank 2 was lost first: rank 0 on h has lost its link to it", []),
    ("a rank that has left, behind a link that another has lost", SCRIPT,
     [(1, "exited", aborted(0, behind=2)), (1.5, "exited", rank(2))], [(4.5, SIGTERM), (9.5, SIGKILL)], 1,
     "rank 2 on h failed first: exit code 0 in the middle of the job", []),
    ("a host that a launcher does not name at once", SCRIPT._replace(launched=True),
     [(1, "exited", aborted(0, behind=2)), (20, "launcher", 1)], [], 1,
     "rank 2 was lost first: rank 0 on h has lost its link to it", []),
    ("of two that failed by themselves, the earlier one", SCRIPT,
     [(1, "exited", rank(0, 4, 12.0)), (1.5, "exited", rank(1, 3, 11.0))], [(2, SIGTERM), (7, SIGKILL)], 3,
     "rank 1 on h failed first: exit code 3", []),
    ("all others were aborted by one that nobody knows", SCRIPT,
     [(1, "exited", aborted(0)), (1.1, "exited", aborted(2))], [(4, SIGTERM), (9, SIGKILL)], 1,
     "rank 0 on h failed first: exit code 1", []),
    ("the others missed a rank that had ended well", SCRIPT,
     [(1, "exited", rank(1)), (2, "exited", aborted(0, 2.0)), (2.1, "exited", aborted(2, 2.0))], [], 1,
     "rank 1 on h failed first: exit code 0 in the middle of the job", []),
    ("or one that is slow to exit", SCRIPT,
     [(1, "exited", aborted(0, 1.0)), (1.1, "exited", aborted(2, 1.0)), (3.9, "leaving", rank(1))],
     [(4, SIGTERM), (9, SIGKILL)], 1, "rank 1 on h failed first: exit code 0 in the middle of the job", []),
    ("a rank that ended well is not blamed while the one that aborted the other has yet to exit", SCRIPT,
     [(1, "exited", rank(2)), (2, "exited", aborted(0, 2.0)), (3, "exited", rank(1, 3, 2.0))], [], 3,
     "rank 1 on h failed first: exit code 3", []),
    ("one that was slow, and has ended well in time", SCRIPT,
     [(1, "leaving", rank(1)), (1.1, "exited", rank(1)), (2, "exited", rank(0, 2, 1.5)), (2.1, "exited", rank(2))],
     [], 2, "rank 0 on h failed first: exit code 2", []),
    ("a rank that others still need", SCRIPT,
     [(1, "exited", rank(1)), (1, "missed", 1)], [(2, SIGTERM), (7, SIGKILL)], 1,
     "rank 1 on h failed first: exit code 0 in the middle of the job", []),
    ("all leave each other at once", SCRIPT,
     [(1, "exited", rank(0)), (1, "exited", rank(1)), (1, "exited", rank(2)), *((1, "missed", n) for n in range(3))],
     [], 0, "", []),
    ("MPI_Abort", SCRIPT,
     [(1, "aborts", rank(1, 7)), (1.2, "exited", rank(1, -SIGKILL))], [(1, SIGTERM), (6, SIGKILL)], 7,
     "rank 1 on h failed first: exit code 7", []),
    ("what ranks exit with when they have to says nothing", SCRIPT,
     [(1, "exited", rank(1, 3, 5.0)), (2.5, "exited", rank(0, 9, 1.0))], [(2, SIGTERM), (7, SIGKILL)], 3,
     "rank 1 on h failed first: exit code 3", []),
    ("a lost host", SCRIPT,
     [(1, "exited", rank(2, 1, why=LOST))], [(2, SIGTERM), (7, SIGKILL)], 1, f"rank 2 on h failed first: {LOST}", []),
    ("a program that a host lacks", SCRIPT,
     [(1, "exited", rank(2, 127, why="there is no program 'x'"))], [(2, SIGTERM), (7, SIGKILL)], 127,
     "rank 2 on h failed first: there is no program 'x'", []),
    ("Ctrl-C", SCRIPT,
     [(1, "signal", SIGINT), *((2, "exited", rank(n, 1)) for n in range(3))], [(1, SIGINT)], 130, "", []),
    ("SIGTERM", SCRIPT, [(1, "signal", SIGTERM)], [(1, SIGTERM), (11, SIGKILL), (16, SIGKILL)], 143, "", []),
    ("each signal is passed on, the first one counts", SCRIPT,
     [(1, "signal", SIGTERM), (2, "signal", SIGINT), (3, "signal", SIGINT)],
     [(1, SIGTERM), (2, SIGINT), (3, SIGINT), (11, SIGKILL), (16, SIGKILL)], 143, "", []),
    ("a signal of the user's own", SCRIPT, [(1, "signal", SIGUSR1)], [(1, SIGUSR1)], 0, "", []),
    ("Ctrl-C after a failure", SCRIPT,
     [(1, "exited", rank(1, 3)), (1.5, "signal", SIGINT)], [(1.5, SIGINT), (11.5, SIGKILL), (16.5, SIGKILL)], 130,
     "rank 1 on h failed first: exit code 3", []),
    # Elastic jobs continue.
    ("one dies", ELASTIC, [(1, "exited", rank(1, -SIGKILL)), (9, "exited", rank(0)), (9, "exited", rank(2))], [], 0,
     f"rank 1 on h failed first: {HINT}", [f"rank 1 failed: {HINT}. Continuing with 2 ranks of 3"]),
    ("nobody is left", ELASTIC,
     [(1, "exited", rank(1, 3, 1.0)), (2, "exited", rank(0, 4, 2.0)), (3, "exited", rank(2, 5, 3.0))], [], 3,
     "rank 1 on h failed first: exit code 3",
     ["rank 1 failed: exit code 3. Continuing with 2 ranks of 3",
      "rank 0 failed: exit code 4. Continuing with 1 rank of 3",
      "rank 2 failed: exit code 5. 0 ranks of 3 left, fewer than the 1 of --min-np"]),
    ("too few are left", ALL_OF_3,
     [(1, "exited", rank(1, -SIGKILL)), (2, "exited", aborted(0))], [(6, SIGTERM), (11, SIGKILL)], 137,
     f"rank 1 on h failed first: {HINT}", [f"rank 1 failed: {HINT}. 2 ranks of 3 left, fewer than the 3 of --min-np"]),
    ("a rank never comes", ELASTIC,
     [(1, "apart", APART), (1, "exited", rank(1, 4))], [(6, SIGTERM), (11, SIGKILL)], 4,
     "rank 1 on h failed first: exit code 4", [f"{APART}; ending the job"]),
    ("no rank ever calls init()", ELASTIC,
     [(1, "apart", "rank 0 exited"), *((1, "exited", rank(n)) for n in range(3))], [], 0, "", []),
    ("the living continue without one that has left", ELASTIC,
     [(1, "exited", rank(1)), (2, "missed", 1), (9, "exited", rank(0)), (9, "exited", rank(2))], [], 0,
     "rank 1 on h failed first: exit code 0 in the middle of the job",
     ["rank 1 failed: exit code 0. Continuing with 2 ranks of 3"]),
    ("one that had left is blamed where nobody could continue", ELASTIC,
     [(1, "exited", rank(1)), (2, "exited", aborted(0, 1.0)), (3, "exited", aborted(2, 1.0))], [], 1,
     "rank 1 on h failed first: exit code 0 in the middle of the job",
     ["rank 0 failed: exit code 1. Continuing with 2 ranks of 3",
      "rank 2 failed: exit code 1. Continuing with 1 rank of 3",
      "rank 1 failed: exit code 0. 0 ranks of 3 left, fewer than the 1 of --min-np"]),
    ("ranks that were through are not blamed for a failure after them", ELASTIC,
     [(1, "exited", rank(0)), (1, "exited", rank(2)), (2, "exited", rank(1, 1))], [], 0,
     "rank 1 on h failed first: exit code 1", ["rank 1 failed: exit code 1. Continuing with 2 ranks of 3"]),
    ("the living continue without a host that has vanished", ELASTIC,
     [(1, "exited", rank(1, 1, why=LOST)), (9, "exited", rank(0)), (9, "exited", rank(2))], [], 0,
     f"rank 1 on h failed first: {LOST}", [f"rank 1 on h failed: {LOST}. Continuing with 2 ranks of 3"]),
    # Ranks join: as many others as there are slots, and those that come for the dead.
    ("a rank joins in place of one that has died", GROWING,
     [(1, "exited", rank(1, 3)), (3, "started", 1), (4, "joined", 1), *((9, "exited", rank(n)) for n in range(3))],
     [], 0, "rank 1 on h failed first: exit code 3",
     ["rank 1 failed: exit code 3. Continuing with 2 ranks of 3", "rank 1 has joined. Continuing with 3 ranks"]),
    ("a rank joins, and then others die", GROWING,
     [(1, "started", 3), (2, "joined", 3), (3, "exited", rank(0, 4)), (4, "exited", rank(1, 4)),
      (9, "exited", rank(2)), (9, "exited", rank(3))], [], 0, "rank 0 on h failed first: exit code 4",
     ["rank 3 has joined. Continuing with 4 ranks", "rank 0 failed: exit code 4. Continuing with 3 ranks of 4",
      "rank 1 failed: exit code 4. Continuing with 2 ranks of 4"]),
    ("too few are left until another one joins", GROWING,
     [(1, "exited", rank(0, 4)), (1, "exited", rank(1, 4)), (30, "started", 1), (55, "joined", 1),
      (150, "exited", rank(1)), (150, "exited", rank(2))], [], 0, "rank 0 on h failed first: exit code 4",
     ["rank 0 failed: exit code 4. Continuing with 2 ranks of 3", f"rank 1 failed: exit code 4. {FEWER}",
      "rank 1 has joined. Continuing with 2 ranks"]),
    ("too few are left, and the one that is to join fails too", GROWING,
     [(1, "exited", rank(0, 4)), (1, "exited", rank(1, 4)), (30, "started", 1), (40, "exited", rank(1, 5))],
     [(61, SIGTERM), (66, SIGKILL)], 4, "rank 0 on h failed first: exit code 4",
     ["rank 0 failed: exit code 4. Continuing with 2 ranks of 3", f"rank 1 failed: exit code 4. {FEWER}",
      f"rank 1 failed: exit code 5. {FEWER}"]),
    ("a rank leaves because its host is not to be used any more", GROWING,
     [(1, "unwanted", 2), (2, "exited", rank(2, -SIGKILL)), (9, "exited", rank(0)), (9, "exited", rank(1))], [], 0, "",
     []),
    # Engines live on, and are killed alone.
    ("an engine dies", ENGINES, [(1, "exited", rank(1, -SIGKILL))], [], 137, f"rank 1 on h failed first: {HINT}", []),
    ("an engine exits", ENGINES,
     [(1, "exited", rank(1))], [], 1, "rank 1 on h failed first: exit code 0 in the middle of the job", []),
    ("an engine that aborts is killed, which is no second failure", ENGINES,
     [(1, "aborts", rank(1, 7)), (1.1, "exited", rank(1, -SIGKILL))], [], 7, "rank 1 on h failed first: exit code 7",
     []),
    ("an engine is ended to be healed", ENGINES,
     [(1, "unwanted", 1), (2, "exited", rank(1, -SIGKILL))], [], 0, "", []),
    ("and dies after that", ENGINES,
     [(1, "unwanted", 1), (2, "exited", rank(1, -SIGKILL)), (9, "exited", rank(1, 3))], [], 3,
     "rank 1 on h failed first: exit code 3", []),
    ("a stop", ENGINES, [(1, "signal", SIGTERM)], [(1, SIGTERM), (11, SIGKILL), (16, SIGKILL)], 143, "", []),
    # Through a launcher: reports of its ranks, and signals to it.
    ("a rank fails", OURS,
     [(1, "exited", rank(1, 3)), (2, "launcher", 3)], [], 3, "rank 1 on h failed first: exit code 3", []),
    ("a rank fails, and its launcher does not end the others", OURS,
     [(1, "exited", rank(1, 3)), (12, "launcher", -SIGKILL)], [(6, SIGTERM), (11, SIGKILL)], 3,
     "rank 1 on h failed first: exit code 3", []),
    ("a report that is read after the launcher has exited", OURS,
     [(1, "launcher", 1), (1, "exited", rank(1, 3))], [], 3, "rank 1 on h failed first: exit code 3", []),
    ("the launcher itself fails", OURS, [(1, "launcher", 2)], [], 2, "", []),
    ("or is killed", OURS, [(1, "launcher", -SIGKILL)], [], 137, "", []),
    ("an elastic job continues", OURS_ELASTIC,
     [(1, "exited", rank(1, 3)), (90, "launcher", 0)], [], 0, "rank 1 on h failed first: exit code 3", []),
    ("ranks end in time after Ctrl-C", OURS,
     [(1, "signal", SIGINT), (1.9, "launcher", 130)], [(1, SIGINT)], 130, "", []),
    ("the user learns that ranks take their time", OURS,
     [(1, "signal", SIGINT), (5, "launcher", 130)], [(1, SIGINT)], 130, "", [WAITING]),
    ("ranks that do not end are killed", OURS_ELASTIC,
     [(1, "signal", SIGTERM), (12, "launcher", -SIGKILL)], [(1, SIGTERM), (11, SIGKILL)], 143, "", [WAITING, KILLING]),
    ("one Ctrl-C that comes twice, as from `timeout`", OURS,
     [(1, "signal", SIGINT), (1.4, "signal", SIGINT), (1.5, "launcher", 1)], [(1, SIGINT)], 130, "", []),
    ("a second Ctrl-C kills", OURS,
     [(1, "signal", SIGINT), (1.6, "signal", SIGINT), (1.7, "launcher", -SIGKILL)], [(1, SIGINT), (1.6, SIGKILL)],
     130, "", []),
    ("a second hangup does not, and what follows it is another signal", OURS,
     [(1, "signal", SIGHUP), (1.8, "signal", SIGHUP), (1.9, "signal", SIGTERM), (1.95, "launcher", 0)],
     [(1, SIGHUP), (1.9, SIGTERM)], 129, "", []),
    ("signals of the user's own come as often as they are sent", OURS,
     [(1, "signal", SIGUSR1), (1, "signal", SIGUSR1), (2, "launcher", 0)], [(1, SIGUSR1), (1, SIGUSR1)], 0, "", []),
    ("nobody waits any more", OURS, [(1, "stopped"), (9, "launcher", 0)], [(1, SIGTERM), (6, SIGKILL)], 0, "", []),
    # Somebody else's launcher may hang.
    ("a launcher that starts one rank of two", THEIRS,
     [(31, "started", 0), (70, "launcher", 0)], [(60, SIGTERM), (65, SIGKILL)], 1, "",
     [f"{NONE_YET}; it is killed after 60 s (--start-timeout)", f"{TOO_FEW} (RING_START_TIMEOUT)"]),
    ("ranks that start late", PATIENT,
     [(500, "started", 0), (500, "started", 1), (501, "ended", 0), (501, "ended", 1), (502, "launcher", 0)], [], 0,
     "", [NONE_YET]),
    ("while nobody reads the output, marks wait behind it", THEIRS,
     [(20, "looked", 15.0), (50, "looked", 40.0), (80, "started", 0), (80, "ended", 1), (99, "launcher", 0)], [], 0,
     "", [f"{NONE_YET}; it is killed after 60 s (--start-timeout)"]),
    ("a launcher that outlives its ranks", THEIRS,
     [(1, "ended", 0), (2, "ended", 1), (35, "launcher", -SIGTERM)], [(32, SIGTERM)], 0, "", [OUTLIVED]),
    ("whose rank had failed", THEIRS,
     [(1, "ended", 0), (2, "exited", rank(1, 7)), (2, "ended", 1), (9, "launcher", -SIGTERM)], [(7, SIGTERM)], 7,
     "rank 1 on h failed first: exit code 7", []),
]
# fmt: on


@pytest.mark.parametrize(
    ("what", "rules", "steps", "signals", "code", "first", "words"), ENDS, ids=[row[0] for row in ENDS]
)
def test_how_a_job_ends(
    what: str,
    rules: Rules,
    steps: list[Step],
    signals: list[tuple[float, int]],
    code: int,
    first: str,
    words: list[str],
) -> None:
    until = signals[-1][0] if signals else 200.0
    sent, latest = play(rules, steps, max(until, steps[-1][0]))
    failure = first_failure(latest.failures, rules.n)
    said = [*latest.words, *([latest.problem] if latest.problem else [])]
    assert (sent, latest.code, failure.sentence if failure else "", said) == (signals, code, first, words), what


def test_what_has_arrived_before_a_look_has_arrived_in_time() -> None:
    """The owner was stopped for a minute, as by Ctrl-Z: the exit that names the culprit has to be read first."""
    events = [Event(1.0, "exited", aborted(0)), Event(61.0, "exited", rank(1, 3))]
    latest = judge(SCRIPT, events, 61.0)
    failure = first_failure(latest.failures)
    assert failure is not None
    assert (failure.rank, latest.signals, latest.due) == (1, [SIGTERM], True)
    late = judge(SCRIPT, [events[0], Event(60.0, "looked"), events[1]], 61.0)
    assert [one.rank for one in late.failures] == [0]


def test_an_engine_is_doomed_until_it_has_exited() -> None:
    events = [Event(1.0, "aborts", rank(1, 7)), Event(1.0, "unwanted", 2)]
    assert judge(ENGINES, events, 1.0).doomed == {1, 2}
    assert judge(ENGINES, [*events, Event(2.0, "exited", rank(2, -SIGKILL))], 2.0).doomed == {1}


@pytest.mark.parametrize(
    ("failed_at", "sent"),
    [(None, 0), (100.0, 0), (95.1, 0), (94.9, SIGTERM), (90.1, SIGTERM), (89.9, SIGKILL)],
)
def test_a_rank_that_waits_for_others_since_it_failed(failed_at: float | None, sent: int) -> None:
    assert judge_late_rank(failed_at, 100.0) == sent


@pytest.mark.parametrize(
    ("code", "left_early", "was_aborted", "stopping", "does"),
    [
        (0, False, False, False, (False, 0.0, False)),
        (0, True, False, False, (True, time_limits.LINGER, True)),  # the others report that they miss it
        (3, False, False, False, (True, 0.0, True)),
        (3, True, False, False, (True, 0.0, True)),
        (1, False, True, False, (True, time_limits.LINGER, True)),  # the one that has aborted it reports first
        (-SIGKILL, True, False, False, (True, 0.0, False)),  # mpiexec sees it
        (3, False, False, True, (False, 0.0, False)),
        (0, True, False, True, (False, 0.0, False)),
    ],
)
def test_the_end_of_a_rank_of_another_launcher(
    code: int, left_early: bool, was_aborted: bool, stopping: bool, does: tuple[bool, float, bool]
) -> None:
    assert judge_parting(code, left_early, was_aborted, stopping) == does


@pytest.mark.parametrize(
    ("heard", "spoke", "lost", "speaks"),
    [
        (100.0, 100.0, "", False),
        (100.0, 94.0, "", True),
        (71.0, 96.0, "", False),
        (69.0, 96.0, "it has not answered for 30 s", False),
    ],
)
def test_the_silence_of_a_host(heard: float, spoke: float, lost: str, speaks: bool) -> None:
    assert judge_silence(heard, spoke, 100.0, 30.0) == (lost, speaks)


# Of a notebook's run: what its kernel knows, when it looks, why it interrupts the ranks, and whether all is over.
RUNS: list[tuple[str, dict[str, float], float, str, bool]] = [
    ("it goes on", {}, 1e6, "", False),
    ("the others have time to abort", {"failed_at": 5.0, "cause_known": True}, 5.2, "", False),
    ("are interrupted", {"failed_at": 5.0, "cause_known": True}, 5.4, "failure", False),
    ("and given up", {"failed_at": 5.0, "cause_known": True}, 5.9, "failure", True),
    ("a rank that others miss may have died", {"failed_at": 5.0}, 7.9, "failure", False),
    ("or has left", {"failed_at": 5.0}, 8.1, "failure", True),
    ("one does not hear of it", {"failed_at": 5.0, "cause_known": True, "heard": False}, 12.9, "failure", False),
    ("and cannot be ended", {"failed_at": 5.0, "cause_known": True, "heard": False}, 13.1, "failure", True),
    ("--timeout", {"timeout": 10.0}, 10.1, "timeout", False),
    ("without the time of a debugger", {"timeout": 10.0, "held": 60.0}, 69.9, "", False),
    ("--timeout of a run that fails", {"timeout": 10.0, "failed_at": 10.0, "cause_known": True}, 11.0, "timeout", True),
]


@pytest.mark.parametrize(
    ("raised", "known", "now", "failed"),
    [
        (False, True, 14.9, False),  # records come after answers, over another connection
        (False, True, 15.1, True),
        (True, True, 5.4, False),  # the engine's own code has failed
        (True, True, 5.6, True),
        (True, False, 24.9, False),  # a lost host is explained late
        (True, False, 25.1, True),
    ],
)
def test_an_answer_without_a_record(raised: bool, known: bool, now: float, failed: bool) -> None:
    assert judge_answer(now, 5.0, raised=raised, engine_known=known) is failed


@pytest.mark.parametrize(
    ("seconds", "unheard", "where", "words"),
    [
        (299.0, 4.9, "dist.recv", ""),
        (-inf, 5.1, "dist.recv", "was ended: 5 s after an interrupt it still waited in dist.recv, which ignores sig"),
        (6.0, 5.1, "", "was ended: 5 s after an interrupt it still waited in code of another library, which ignores"),
        (301.0, 0.0, "dist.recv", "was ended: it had not stopped 300 s after an interrupt (RING_STOP_LIMIT)"),
    ],
)
def test_a_rank_that_does_not_stop(seconds: float, unheard: float, where: str, words: str) -> None:
    how = judge_stop(seconds, 300.0, unheard, where)
    assert how.startswith(words)
    assert bool(how) is bool(words)


@pytest.mark.parametrize(("what", "known", "now", "why", "over"), RUNS)
def test_the_end_of_a_run(what: str, known: dict[str, Any], now: float, why: str, over: bool) -> None:
    assert judge_run(now, **known) == (why, over), what


@pytest.mark.parametrize(
    ("state", "reason", "lost", "words"),
    [
        ("RUNNING", "None", [], ""),
        ("RUNNING", "None", ["n2"], ""),
        ("", "", [], ""),
        ("COMPLETING", "None", [], "Slurm job 7 was cancelled (scancel)"),
        ("CANCELLED", "None", [], "Slurm job 7 was cancelled (scancel)"),
        ("COMPLETING", "TimeLimit", [], "Slurm job 7 reached its time limit; ask for more (--time), and resume from a"),
        ("TIMEOUT", "TimeLimit", ["n2"], "Slurm job 7 reached its time limit; "),
        ("COMPLETING", "None", ["n2"], "Slurm job 7 was ended because it has lost host n2; submit it again"),
        ("NODE_FAIL", "NodeDown", ["n2", "n3"], "Slurm job 7 was ended because it has lost hosts n2, n3; "),
        ("NODE_FAIL", "NodeDown", [], "Slurm job 7 was ended because it has lost a host; "),
        ("PENDING", "BeginTime", ["n2"], "Slurm job 7 was ended because it has lost host n2; "),
        ("PREEMPTED", "None", [], "Slurm job 7 was preempted by another job; "),
        ("GONE", "", [], "Slurm job 7 has ended: the batch system does not know it any more"),
        ("BOOT_FAIL", "None", [], "Slurm job 7 has ended (BOOT_FAIL)"),
    ],
)
def test_who_ended_a_batch_job(state: str, reason: str, lost: list[str], words: str) -> None:
    said = judge_batch_job("Slurm job 7", state, reason, lost)
    assert said.startswith(words)
    assert bool(said) is bool(words)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit code 3"),
        (128 + signal.SIGSEGV, "exit code 139, that of a shell whose program was killed by SIGSEGV"),
        (130, "exit code 130"),
        (255, "exit code 255"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGRTMIN, "killed by SIGRTMIN"),
        (-signal.SIGRTMIN - 1, "killed by SIGRTMIN+1"),
        (-signal.SIGRTMAX, "killed by SIGRTMAX"),
        (2 - signal.SIGRTMIN, f"killed by signal {signal.SIGRTMIN - 2}"),
    ],
)
def test_how_a_rank_ended_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
