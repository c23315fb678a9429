"""Why a rank or a whole cluster died: by which signal, out of memory or not, and the end of the log."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from ring_notebook.analysis.job_failure import RankFailure, describe_exit, first_failure
from ring_notebook.files.rank_logs import of_last_cell
from ring_notebook.launch.own_batch_job import who_ended_it
from ring_notebook.launch.supervisor.stderr_reports import split_reports
from ring_notebook.text.error_text import CELL, name_cells

_TAIL = 30  # lines
# How lines of MPICH's launcher, of faulthandler and of Slurm begin.
_NOISE = ("=", "Extension modules: ", "srun: ", "slurmstepd")
# What faulthandler writes: the innermost call first.
_STACK = "Stack (most recent call first):"
_CALL = "  File "
# Stacks that `%ring stacks` asked for do not explain a death.
_ASKED_FOR = re.compile(r"Stack .*:\n(  .*\n)*Native stack .*:\n(  .*\n)*End of native stack\n?")
_HEAL = "The other ranks keep their variables; `%ring heal` starts this one again"
_RESTART = "`%ring restart` brings the cluster back"
_NEW_JOB = "`%ring start` in a new job starts a cluster"


@dataclass(frozen=True, slots=True)
class Death:
    """What ended a rank, or a cluster.

    ``rank`` is -1 when no rank failed; ``log`` is the end of what that rank has written since its last cell began.
    ``advice`` says what to do next.
    """

    reason: str
    rank: int = -1
    log: str = ""
    advice: str = _RESTART

    def __str__(self) -> str:
        tail = f"\nThe end of its log:\n{self.log}" if self.log else ""
        return f"{self.reason}. {self.advice}.{tail}"


def explain(ended: str, output: str, logs: Path) -> Death:
    """The death of ``ended`` (``controller`` or ``engines``), from the engines' common output and log files.

    ``logs`` holds what each rank wrote (`engine.descriptors`), on other hosts only where the hosts share the disk.
    """
    if ended == "controller":
        return Death("the controller of the cluster died, and the engines were stopped")
    text, failures, _ = split_reports(output.encode())
    first = first_failure(failures)
    if first is None:
        words = tail(text.decode(errors="replace"))
        return Death("the launcher of the engines died, and all engines with it", log=words)
    return Death(f"{explain_failure(first)}, and no other rank is left", first.rank, _log(first.rank, text, logs))


def explain_rank(failure: RankFailure, output: str, logs: Path, alone: bool) -> Death:
    """The death of one rank, from the engines' common output and log files. ``alone``: no other one lives."""
    text, _, _ = split_reports(output.encode())
    log = _log(failure.rank, text, logs)
    if alone:
        return Death(f"{explain_failure(failure)}, and no other rank is left", failure.rank, log)
    return Death(explain_failure(failure), failure.rank, log, _HEAL)


def without_others(death: Death) -> Death:
    """The same death, now that no other rank is left."""
    return replace(death, advice=_RESTART) if death.advice == _HEAL else death


def by_batch_system(death: Death) -> Death:
    """The same death, or what has ended the batch job of all ranks; asks the batch system."""
    ended = who_ended_it()
    return replace(death, reason=ended, log="", advice=_NEW_JOB) if ended else death


def failures_of(output: str, rank: int) -> list[RankFailure]:
    """Every report of a failure of ``rank`` in the common ``output`` of the engines, oldest first."""
    return [failure for failure in split_reports(output.encode())[1] if failure.rank == rank]


def explain_failure(failure: RankFailure) -> str:
    """How a rank has ended, in words."""
    how = f"failed: {failure.reason}" if failure.reason else f"exited with code {failure.code}"
    if failure.code < 0:
        how = f"was {describe_exit(failure.code, failure.out_of_memory)}"
    return f"rank {failure.rank} on {failure.host} {how}"


def _log(rank: int, text: bytes, logs: Path) -> str:
    # A rank has a log of its own once it has started; before that it writes to the output of all ranks.
    own = of_last_cell(logs, rank)
    return tail(text.decode(errors="replace") if own is None else own)


def not_started(reason: str, output: str) -> str:
    """Why a cluster did not start, with the end of the engines' common ``output`` and what to do next."""
    text, _, _ = split_reports(output.encode())
    log = tail(text.decode(errors="replace"))
    return (
        f"{reason}.\n"
        + (f"The end of the engines' log:\n{log}\n" if log else "The engines have written nothing.\n")
        + "`%ring doctor` checks everything that engines need; `%ring start` tries again."
    )


def tail(output: str) -> str:
    """The last lines of a log that are the user's: no banner of MPICH, no calls of the engine in a crash's stack."""
    output = _ASKED_FOR.sub("", output)
    lines = [line for line in output.strip().splitlines() if not line.startswith(_NOISE)]
    cells = [index for index, line in enumerate(lines) if line.startswith(_CALL) and CELL.search(line)]
    if cells and _STACK in lines[: cells[0]]:
        outside = len(list(takewhile(lambda line: line.startswith(_CALL), lines[cells[-1] + 1 :])))
        del lines[cells[-1] + 1 : cells[-1] + 1 + outside]
    return name_cells("\n".join(lines[-_TAIL:])).strip()
