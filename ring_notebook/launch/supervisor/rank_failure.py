"""How a rank failed, in words, and as a report on the stderr of its job that the launcher takes out again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ring_notebook.hardware import oom_kills
from ring_notebook.launch.supervisor.rank_mark import RankMark, parse_mark
from ring_notebook.rank.rank_status import RankStatus

__all__ = [
    "RankFailure",
    "describe_exit",
    "exit_code",
    "first_failure",
    "job_exit_code",
    "parse_failure",
    "report_failure",
    "signal_name",
    "split_reports",
]

# A report is one line between two record separators, which programs may print too. A terminal adds the \r.
_REPORT = re.compile(rb"\x1e(\{[^\x1e\n]{,4096}\})\x1e\r?\n")
_UNFINISHED = re.compile(rb"\x1e(\{[^\x1e\n]{,4096}(\}\x1e\r?)?)?\Z")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "rank": int,
    "host": str,
    "code": int,
    "time": (int, float),
    "out_of_memory": bool,
    "aborted": bool,
    "reason": str,
}


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How the program of one rank failed. ``code`` is negative for a signal, as in subprocess.

    It is 0 for a rank that exited in the middle of the job. ``out_of_memory`` says that the Linux kernel of its host
    has killed a process for want of memory meanwhile, ``aborted`` that the rank only ended because another one failed.
    ``reason`` says why, where the code does not: the rank could not be started, or its host is lost.
    """

    rank: int
    host: str
    code: int
    time: float
    out_of_memory: bool = False
    aborted: bool = False
    reason: str = ""

    @property
    def how(self) -> str:
        """How it ended, in words."""
        return self.reason or describe_exit(self.code)

    @classmethod
    def of(cls, rank: int, code: int, status: RankStatus, oom_kills_before: int) -> RankFailure:
        """The failure of a rank of this host that exits now with ``code`` and has reported ``status``."""
        failed_at = status.failed_at(code) or time.time()
        return cls(rank, socket.gethostname(), code, failed_at, oom_kills() > oom_kills_before, status.aborted)


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:  # of the realtime signals only the first and the last have names
        above = number - signal.SIGRTMIN
        return f"SIGRTMIN+{above}" if above > 0 else f"signal {number}"


def describe_exit(code: int) -> str:
    """A subprocess return code in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    hint = "; if nobody sent it, the Linux kernel did, out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def first_failure(failures: Sequence[RankFailure], n: int = 0) -> RankFailure | None:
    """The rank of ``n`` that failed before all others; None when none has.

    Ranks that others have aborted come after those, whatever the clocks of the hosts say. When all ``n`` ranks of a job
    exit with 0 in the middle of it, none has failed: no rank waited for them.
    """
    if len(failures) == n and not any(failure.code for failure in failures):
        return None
    return min(failures, key=lambda failure: (failure.aborted, failure.time), default=None)


def exit_code(code: int) -> int:
    """What a shell shows for a subprocess return code: 128 + signal for a signal."""
    return code if code >= 0 else 128 - code


def job_exit_code(failures: Sequence[RankFailure], n: int) -> int:
    """The exit code of a job of ``n`` ranks, all of which it needs: that of the first failure.

    1 where that rank exited with 0 in the middle of the job.
    """
    first = first_failure(failures, n)
    return 0 if first is None else exit_code(first.code or 1)


def report_failure(failure: RankFailure) -> None:
    """Write ``failure`` to this process's stderr, where the launcher finds it."""
    with contextlib.suppress(OSError):  # nobody reads any more, or the disk is full
        sys.stderr.flush()
        os.write(2, b"\x1e" + json.dumps(asdict(failure)).encode() + b"\x1e\n")


def split_reports(
    data: bytes, on_mark: Callable[[RankMark], None] = lambda _: None
) -> tuple[bytes, list[RankFailure], bytes]:
    """The stderr of a job as (what ranks wrote, the reports in it, an unfinished report for the next call).

    Marks of ranks are taken out too, and given to ``on_mark``.
    """
    text, failures, taken, at = b"", [], 0, 0
    while match := _REPORT.search(data, at):
        at = match.end(1)  # text that is no report may end where a report begins
        failure, mark = parse_failure(match[1]), parse_mark(match[1])
        if failure:
            failures.append(failure)
        elif mark:
            on_mark(mark)
        else:
            continue
        text += data[taken : match.start()]
        taken = at = match.end()
    rest = _UNFINISHED.search(data, at)
    end = rest.start() if rest else len(data)
    return text + data[taken:end], failures, data[end:]


def parse_failure(body: bytes) -> RankFailure | None:
    """The failure that a report holds; None when a program has printed something that looks like one."""
    try:
        failure = RankFailure(**json.loads(body))
    except (ValueError, TypeError, RecursionError):
        return None
    return failure if all(isinstance(getattr(failure, name), kind) for name, kind in _KINDS.items()) else None
