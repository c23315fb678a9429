"""Reports of ranks that failed, started or ended, and why ranks cannot be started.

Reports are on the stderr of a job; the launcher takes them out again. Exit codes are those that shells use.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ring_notebook.analysis.job_failure import RankFailure
from ring_notebook.analysis.time_breakdown import RankTimes
from ring_notebook.machine.hardware import oom_kills
from ring_notebook.machine.os_calls import resource_limits
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


_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class NoProgramError(OSError):
    """A rank cannot be started for a reason that lies in its program, not in this host."""


def explain_start(
    command: Sequence[str], path: str | None = None, error: OSError | None = None
) -> tuple[int, str] | None:
    """The exit code and the reason why ``command`` cannot be started on this host; None when nothing speaks against it.

    Programs are looked up in ``path`` (default: PATH). ``error`` is the error of a failed start; with it there always
    is a reason.
    """
    program = command[0]
    if shutil.which(program, path=path) is None:
        if not os.path.exists(program):
            return _NOT_FOUND, f"there is no program {program!r}"
        if os.path.isdir(program):
            return _NOT_EXECUTABLE, f"{program} is a directory"
        if not os.access(program, os.X_OK):
            return _NOT_EXECUTABLE, f"{program} is not executable"
        return _NOT_FOUND, f"there is no program {program!r} on the PATH; did you mean: ./{program}"
    if error is None:
        return None
    hint = f"; did you mean: python {shlex.join(command)}" if program.endswith(".py") else ""
    if error.errno == errno.ENOENT:
        return _NOT_EXECUTABLE, f"the first line of {program} names an interpreter that does not exist{hint}"
    if error.errno == errno.ENOEXEC:
        return _NOT_EXECUTABLE, f"{program} cannot be started: {_not_a_program(shutil.which(program, path=path))}{hint}"
    return _NOT_EXECUTABLE, f"{program} cannot be started: {error.strerror}{hint}"


def _not_a_program(file: str | None) -> str:
    with contextlib.suppress(OSError), open(file or "", "rb") as opened:
        if opened.read(4) == b"\x7fELF":
            return "it was built for another processor or system"
    return "its first line names no interpreter, such as #!/bin/sh"


def explain_start_error(program: Sequence[str], error: OSError) -> tuple[int, str]:
    """The exit code and the reason why a start of a rank of ``program`` has failed."""
    code, reason = 1, f"this host cannot start the ranks: {error.strerror}"
    if isinstance(error, NoProgramError):
        code, reason = explain_start(program, error=error) or (code, reason)
    elif error.errno == errno.EMFILE:
        files, _ = resource_limits(resource.RLIMIT_NOFILE)
        reason += f"; this process may have {files}, raise it with `ulimit -n`"
    elif error.filename:
        reason += f": {error.filename}"
    return code, reason


def report_start_error(program: Sequence[str], error: OSError) -> int:
    """Write to stderr why a rank of ``program`` cannot be started, and return the exit code for it."""
    code, reason = explain_start_error(program, error)
    os.write(2, f"ringrun: {reason}\n".encode())
    return code
