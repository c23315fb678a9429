"""How a run ended: its status, and the exception that its cell raises."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

from ring_notebook.errors import ClusterError, RunTimeout
from ring_notebook.notebook.record.run_record import RunStatus
from ring_notebook.notebook.run.failures import as_exception, brief, describe, describe_deaths, in_a_line, own_failures
from ring_notebook.protocol.records import Ended, Failure
from ring_notebook.text.words import ranks


class Verdict(NamedTuple):
    """The status of a run that has ended or was detached from, and the exception for its cell; None for ``ok``."""

    status: RunStatus
    error: BaseException | None
    text: str = ""
    """The type of the exception and what it says, in one line."""
    shown: str = ""
    """What the cell shows of it."""


def verdict_of(
    size: int,
    ended: Mapping[int, Ended],
    failures: Sequence[Failure],
    *,
    detached: bool = False,
    interrupted: bool = False,
    timed_out: float = 0.0,
    where: Sequence[str] = (),
    died: Mapping[int, object] | None = None,
    ended_by_us: Collection[int] = (),
    trouble: str = "",
    replaced: Mapping[int, float] | None = None,
    notebook: Container[str] = (),
) -> Verdict:
    """The verdict on a run of ``size`` ranks.

    ``detached``: this kernel stopped watching it. ``interrupted``: the user stopped it. ``timed_out``: its --timeout
    in seconds, when that stopped it, and ``where`` ranks were then. ``died``: why ranks have died; the ranks
    ``ended_by_us`` among them did not stop, and have not made others fail. ``trouble``: why the cluster gives no
    answers any more. ``replaced``: when ranks were started again after a death. ``notebook``: the names of the
    notebook's own variables.
    """
    missing = [rank for rank in range(size) if rank not in ended]
    own = own_failures(failures)
    if missing and detached:
        message = "this notebook has left the cluster; the run continues there, and `%ring attach` shows it again"
        return _raised("running", ClusterError(message))
    if missing and trouble and not own:
        return _raised("failed", ClusterError(trouble))
    died = died or {}
    lines = [_first_line(str(story)) for story in died.values()]
    deaths = describe_deaths(trouble or "\n".join(map(str, died.values())), failures, missing)
    dead = _raised("failed", ClusterError(deaths), " ".join(lines))
    if not set(died) <= set(ended_by_us):
        return dead
    if failures and (own or not interrupted):
        calls = {rank: int(end.summary.get("calls", 0)) for rank, end in ended.items()}
        return _failed(failures, "\n".join([describe(failures, missing, calls, replaced, notebook), *lines]))
    if timed_out:
        text = "\n".join([f"the run exceeded --timeout {timed_out:g} s and was stopped", *where, *lines])
        return _raised("failed", RunTimeout(text))
    if died:
        return dead
    if missing:
        message = f"no record of how {ranks(missing)} ended; their engines gave no answer"
        return _raised("failed", ClusterError(message))
    stopped = [end for end in ended.values() if end.status == "interrupted"]
    if stopped:
        places = sorted({int(end.summary["line"]) for end in stopped} - {0})
        at = f"at line{'s' * (len(places) > 1)} {', '.join(map(str, places))} of the cell"
        place = at if places else "before the first line of the cell, or after its last"
        message = f"stopped {place}; variables and cluster are kept"
        return _raised("interrupted", KeyboardInterrupt(message))
    if failures:  # ranks that stopped together with one whose cell continued after the interrupt
        return _failed(failures, describe(failures))
    if broken := [rank for rank, end in ended.items() if end.status != "ok"]:
        message = f"{ranks(broken)} failed and sent no exception"
        return _raised("failed", ClusterError(message))
    return Verdict("ok", None)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _failed(failures: Sequence[Failure], text: str) -> Verdict:
    return Verdict("failed", as_exception(failures, text), in_a_line(failures), text)


def _raised(status: RunStatus, error: BaseException, reason: str = "") -> Verdict:
    """The verdict of an exception of our own; ``reason`` is what it says in one line, by default its first."""
    shown = f"{type(error).__name__}: {error}"
    text = f"{type(error).__name__}: {reason}" if reason else _first_line(shown)
    return Verdict(status, brief(error, shown), text, shown)
