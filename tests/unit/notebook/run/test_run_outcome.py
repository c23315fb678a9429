"""How a run of a notebook ended, as a table: what its kernel knows, the status, and what the cell raises."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from ring_notebook.notebook.run.run_outcome import verdict_of
from ring_notebook.protocol.records import Ended, Failure

LEFT = "rank 1 was ended: 5 s after an interrupt it still waited in dist.recv"
STORY = "rank 1 on h was killed by SIGSEGV. The other ranks keep their variables"


def ended(status: Literal["ok", "failed", "interrupted", "died"], line: int = 0) -> Ended:
    return Ended("r", 0, status, 1.0, {"line": line})


def failure(rank: int, *, aborted: bool = False) -> Failure:
    return Failure("r", rank, "ValueError", "builtins", "bad", (("<cell>", 3, "<module>", ""),), "Traceback", aborted)


WELL, STOPPED, BROKEN, DIED = ended("ok"), ended("interrupted", 4), ended("failed"), ended("died")
OWN, OTHER = failure(0), failure(1, aborted=True)
BAD = "ValueError: bad"
ROWS: list[tuple[str, list[Ended | None], list[Failure], dict[str, Any], str, str]] = [
    ("all end well", [WELL, WELL], [], {}, "ok", ""),
    ("this notebook has left", [WELL, None], [], {"detached": True}, "running", "ClusterError: this notebook has left"),
    ("all had ended before", [WELL, WELL], [], {"detached": True}, "ok", ""),
    ("a rank raises, another stops", [BROKEN, BROKEN], [OWN, OTHER], {}, "failed", BAD),
    ("a rank raises while the user stops", [BROKEN, STOPPED], [OWN], {"interrupted": True}, "failed", BAD),
    ("the cluster is gone", [WELL, None], [], {"trouble": "the controller died.\nlog"}, "failed",
     "ClusterError: the controller died."),
    ("it is gone after a failure", [BROKEN, None], [OWN], {"trouble": "the controller died."}, "failed", BAD),
    ("a rank dies, another misses it", [None, BROKEN], [OTHER], {"died": {0: STORY}}, "failed",
     f"ClusterError: {STORY}"),
    ("another stays in a library, and is ended", [BROKEN, DIED], [OWN], {"died": {1: LEFT}, "ended_by_us": {1}},
     "failed", BAD),
    ("one dies, another is ended", [DIED, DIED], [], {"died": {0: STORY, 1: LEFT}, "ended_by_us": {1}}, "failed",
     f"ClusterError: {STORY}"),
    ("the user stops, one is ended", [STOPPED, DIED], [], {"interrupted": True, "died": {1: LEFT}, "ended_by_us": {1}},
     "failed", f"ClusterError: {LEFT}"),
    ("--timeout", [STOPPED, STOPPED], [], {"interrupted": True, "timed_out": 2.0}, "failed",
     "RunTimeout: the run exceeded --timeout 2 s and was stopped"),
    ("--timeout, and where ranks were", [STOPPED, STOPPED], [], {"timed_out": 2.0, "where": ["rank 0 at line 3"]},
     "failed", "RunTimeout: the run exceeded --timeout 2 s and was stopped\nrank 0 at line 3"),
    ("--timeout of one that is ended", [STOPPED, DIED], [], {"interrupted": True, "timed_out": 2.0, "died": {1: LEFT},
     "ended_by_us": {1}}, "failed", f"RunTimeout: the run exceeded --timeout 2 s and was stopped\n{LEFT}"),
    ("no record, no answer", [WELL, None], [], {}, "failed", "ClusterError: no record of how rank 1 ended; "),
    ("the user stops", [STOPPED, ended("interrupted", 7)], [], {"interrupted": True}, "interrupted",
     "KeyboardInterrupt: stopped at lines 4, 7 of the cell"),
    ("before it begins", [ended("interrupted"), WELL], [], {"interrupted": True}, "interrupted",
     "KeyboardInterrupt: stopped before the first line of the cell"),
    ("ranks that stop with one that went on", [WELL, BROKEN], [OTHER], {"interrupted": True}, "failed", BAD),
    ("a failure without its exception", [WELL, BROKEN], [], {}, "failed", "ClusterError: rank 1 failed and sent no"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "ends", "failures", "known", "status", "raised"), ROWS, ids=[row[0] for row in ROWS])
def test_how_a_run_ended(
    what: str,
    ends: list[Ended | None],
    failures: list[Failure],
    known: dict[str, Any],
    status: str,
    raised: str,
) -> None:
    verdict = verdict_of(2, {rank: end for rank, end in enumerate(ends) if end}, failures, **known)
    error = f"{type(verdict.error).__name__}: {verdict.error}" if verdict.error else ""
    assert verdict.status == status, what
    assert error.startswith(raised), what
    assert bool(error) == bool(raised)
