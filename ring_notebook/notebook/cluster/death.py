"""Why a cluster died: which rank, by which signal, out of memory or not, and the end of its log."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from ring_notebook.launch.supervisor.rank_failure import first_failure, signal_name, split_reports
from ring_notebook.notebook.record.run_files import read_text

__all__ = ["Death", "explain", "not_started", "tail"]

_TAIL = 30  # lines


@dataclass(frozen=True, slots=True)
class Death:
    """What ended a cluster. ``rank`` is -1 when no rank failed; ``log`` is the end of that rank's log."""

    reason: str
    rank: int = -1
    log: str = ""

    def __str__(self) -> str:
        tail = f"\nThe end of its log:\n{self.log}" if self.log else ""
        return f"{self.reason}. `%ring restart` brings the cluster back.{tail}"


def explain(ended: str, output: str, logs: Path) -> Death:
    """The death of ``ended`` (``controller`` or ``engines``), from the engines' common output and log files.

    ``logs`` holds ``rank-N.log`` files, those of ranks on other hosts only where the hosts share the disk.
    """
    if ended == "controller":
        return Death("the controller of the cluster died, and the engines were stopped")
    text, failures, _ = split_reports(output.encode())
    first = first_failure(failures)
    if first is None:
        return Death("the launcher of the engines died, and all engines with it", log=tail(output))
    how = f"exited with code {first.code}"
    if first.code < 0:
        how = f"was killed by {signal_name(-first.code)}"
        if -first.code == signal.SIGKILL:
            how += ", out of memory" if first.out_of_memory else ", not by the Linux kernel for want of memory"
    return Death(
        f"rank {first.rank} on {first.host} {how}, and the others were ended",
        first.rank,
        # A rank has a log of its own once it has started; before that it writes to the output of all ranks.
        tail(read_text(logs / f"rank-{first.rank}.log") or text.decode(errors="replace")),
    )


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
    """The last lines of a log, without MPICH's banner about a rank that failed."""
    lines = [line for line in output.strip().splitlines() if not line.startswith("=")]
    return "\n".join(lines[-_TAIL:]).strip()
