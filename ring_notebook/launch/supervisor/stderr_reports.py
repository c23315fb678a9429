"""Reports of ranks that failed, started or ended: on the stderr of a job, from which the launcher takes them again."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ring_notebook.analysis.job_failure import RankFailure
from ring_notebook.analysis.time_breakdown import RankTimes
from ring_notebook.machine.hardware import oom_kills
from ring_notebook.protocol.field_types import check_fields
from ring_notebook.rank.rank_status import RankStatus, report_to_job

# A report is one line between two record separators, which programs may print too. A terminal adds the \r. That of a
# rank itself comes with the tag of its output.
_REPORT = re.compile(rb"(?:\x1d\d{1,9}:)?\x1e(\{[^\x1e\n]{,4096}\})\x1e\r?\n")
_UNFINISHED = re.compile(rb"\x1e(\{[^\x1e\n]{,4096}(\}\x1e\r?)?)?\Z")

_BOOTED = time.time() - time.monotonic()
_RECENT = 30.0  # seconds: a process that is killed for its memory takes some of them to end


@dataclass(frozen=True, slots=True)
class RankMark:
    """A rank of a launcher that is not ours has started, or ``ended``."""

    rank: int
    ended: bool


class MemoryKills:
    """Whether the Linux kernel has killed a process here for lack of memory in the last half minute to minute.

    Only recent kills count, because the kernel counts those of all users and containers of the machine.
    """

    def __init__(self) -> None:
        self._before = self._newer = oom_kills()
        self._read_at = time.monotonic()

    def look(self) -> None:
        """To be called every second or so."""
        if time.monotonic() - self._read_at >= _RECENT:
            self._before, self._newer, self._read_at = self._newer, oom_kills(), time.monotonic()

    @property
    def recent(self) -> bool | None:
        """None where the kernel does not count them."""
        now = oom_kills()
        return None if now is None or self._before is None else now > self._before


def failure_of(rank: int, code: int, status: RankStatus, kills: MemoryKills) -> RankFailure:
    """The failure of a rank of this host that exits now with ``code`` and has reported ``status``."""
    # Hosts share only the wall clock. Setting it must not change the order of failures on one host.
    failed_at = _BOOTED + (status.failed_at(code) or time.monotonic())
    return RankFailure(rank, socket.gethostname(), code, failed_at, kills.recent, status.aborted, behind=status.behind)


def report(what: RankFailure | RankMark) -> None:
    """Write ``what`` to this process's stderr, where the launcher finds it."""
    report_to_job(asdict(what))


def split_reports(
    data: bytes, on_mark: Callable[[RankMark | RankTimes], None] = lambda _: None
) -> tuple[bytes, list[RankFailure], bytes]:
    """The stderr of a job as (what ranks wrote, the reports in it, an unfinished report for the next call).

    Marks and times of ranks are taken out too, and given to ``on_mark``.
    """
    text, failures, taken, at = b"", [], 0, 0
    while match := _REPORT.search(data, at):
        at = match.end(1)  # text that is no report may end where a report begins
        found = parse_report(match[1])
        if found is None:
            continue
        if isinstance(found, RankFailure):
            failures.append(found)
        else:
            on_mark(found)
        text += data[taken : match.start()]
        taken = at = match.end()
    rest = _UNFINISHED.search(data, at)
    end = rest.start() if rest else len(data)
    return text + data[taken:end], failures, data[end:]


def parse_report(body: bytes) -> RankFailure | RankMark | RankTimes | None:
    """What a report holds; None when a program has printed something that looks like one."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        values = json.loads(body)
        kind = RankMark if "ended" in values else RankTimes if "steps" in values else RankFailure
        found: RankFailure | RankMark | RankTimes = kind(**values)
        check_fields(type(found), values)
        return found if found.rank >= 0 else None
    return None
