"""Reports of ranks that failed, started or ended, on the stderr of their job; the launcher takes them out again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ring_notebook.field_types import check_fields
from ring_notebook.hardware import oom_kills
from ring_notebook.rank.rank_status import RankStatus
from ring_notebook.verdict import RankFailure

__all__ = ["RankMark", "failure_of", "parse_report", "report", "split_reports"]

# A report is one line between two record separators, which programs may print too. A terminal adds the \r.
_REPORT = re.compile(rb"\x1e(\{[^\x1e\n]{,4096}\})\x1e\r?\n")
_UNFINISHED = re.compile(rb"\x1e(\{[^\x1e\n]{,4096}(\}\x1e\r?)?)?\Z")


@dataclass(frozen=True, slots=True)
class RankMark:
    """A rank of somebody else's launcher has started, or ``ended``."""

    rank: int
    ended: bool


def failure_of(rank: int, code: int, status: RankStatus, oom_kills_before: int) -> RankFailure:
    """The failure of a rank of this host that exits now with ``code`` and has reported ``status``."""
    failed_at = status.failed_at(code) or time.time()
    return RankFailure(rank, socket.gethostname(), code, failed_at, oom_kills() > oom_kills_before, status.aborted)


def report(what: RankFailure | RankMark) -> None:
    """Write ``what`` to this process's stderr, where the launcher finds it."""
    with contextlib.suppress(OSError):  # nobody reads any more, or the disk is full
        sys.stderr.flush()
        os.write(2, b"\x1e" + json.dumps(asdict(what)).encode() + b"\x1e\n")


def split_reports(
    data: bytes, on_mark: Callable[[RankMark], None] = lambda _: None
) -> tuple[bytes, list[RankFailure], bytes]:
    """The stderr of a job as (what ranks wrote, the reports in it, an unfinished report for the next call).

    Marks of ranks are taken out too, and given to ``on_mark``.
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


def parse_report(body: bytes) -> RankFailure | RankMark | None:
    """The failure or mark that a report holds; None when a program has printed something that looks like one."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        values = json.loads(body)
        found = RankMark(**values) if "ended" in values else RankFailure(**values)
        check_fields(type(found), values)
        return found if found.rank >= 0 else None
    return None
