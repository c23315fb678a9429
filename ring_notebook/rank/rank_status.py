"""What a rank reports to the launcher that started it: that it initialized, raised or exited, or lost a link.

A rank writes lines to a file that its launcher holds, after the name of what it executes now (`named_interrupt`). An
exit code alone does not tell a rank that has finished from one that left in the middle of the job. In another such file
it keeps its last operations.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ring_notebook.analysis import operation_log
from ring_notebook.config import config
from ring_notebook.errors import CollectiveAborted
from ring_notebook.machine.os_calls import memory_file
from ring_notebook.rank.rank_variables import OF_LAUNCHERS

Event = Literal["initialized", "raised", "aborted", "exiting"]

LONGEST_NAME = 64
"""Bytes at the beginning of a status file, for the name of what the rank executes."""
_LOST_LINK = re.compile(r"link: rank (\d{1,9}) ")  # what the core says of it, on all ranks that this aborts
_LONGEST = 1 << 20  # bytes that are read of a file: more than any rank reports


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank has reported so far: when each event happened (`time.monotonic`)."""

    times: dict[str, float] = field(default_factory=dict)
    code: int = 1
    """What it exits with if it has raised."""
    behind: int = -1
    """The rank to which it has lost its link, if it knows no other cause of its abort."""

    @property
    def aborted(self) -> bool:
        """Whether the exception that ended it only says that another rank has failed."""
        return "aborted" in self.times

    @property
    def left_early(self) -> bool:
        """Whether it joined the job and never reached the end of its program."""
        return "initialized" in self.times and "exiting" not in self.times

    @property
    def is_leaving(self) -> bool:
        """Whether its program has ended, and not for another rank's failure. Its exit handlers may take long."""
        return bool(self.times.keys() & {"exiting", "raised"}) and not self.aborted

    @property
    def leaves_with(self) -> int:
        return self.code if "raised" in self.times else 0

    def failed_at(self, code: int) -> float:
        """When the failure that ended it with ``code`` happened; 0 when it has not reported that.

        The process itself may end later than the ranks that it aborted: it still runs its exit handlers.
        """
        # A rank that a signal kills after it began to exit may have begun long before: it waits for the others there.
        exiting = self.times.get("exiting", 0.0) if code >= 0 else 0.0
        return self.times.get("raised") or self.times.get("aborted") or exiting


class StatusFile:
    """The launcher's side, for one rank."""

    def __init__(self) -> None:
        self._file = memory_file("rank-status")  # has no name, so nothing is left behind
        os.truncate(self._file, LONGEST_NAME)
        self._log = memory_file("rank-operations")

    @property
    def path(self) -> str:
        """Where any process of this host finds the file."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that make the rank report."""
        return {
            "RING_STATUS_FILE": self.path,
            "RING_OPERATIONS_FILE": f"/proc/{os.getpid()}/fd/{self._log}",
        }

    def close(self) -> None:
        """The rank has ended, and its status is of no use any more."""
        os.close(self._file)
        os.close(self._log)

    def operations(self) -> bytes:
        """The log of the rank's last operations (`ring_notebook.analysis.operation_log`), also when it was killed."""
        return os.pread(self._log, operation_log.MOST_BYTES, 0)

    def read(self) -> RankStatus:
        """What the rank has reported so far. Reports of its children, which inherit its environment, are ignored."""
        data = os.pread(self._file, _LONGEST, LONGEST_NAME).decode(errors="replace")
        own, times, code, behind = "", dict[str, float](), 1, -1
        for line in data.splitlines():
            try:
                pid, event, text, *rest = line.split("\t")
                when, numbers = float(text), [int(number) for number in rest]
            except ValueError:  # the rank's code has written something else here
                continue
            own = own or pid
            if pid == own:
                times[event] = when
                if event == "raised":
                    code = next((number for number in numbers if 0 < number < 256), 1)
                elif event == "aborted":
                    behind = next(iter(numbers), -1)
        return RankStatus(times, code, behind)


def report_status(event: Event, *number: int) -> None:
    """Report ``event`` to the launcher, if it wants to know.

    ``number``: the exit code of a rank that raised, or the rank to which an aborted rank has lost its link.
    """
    if not config().status_file:
        return
    with suppress(OSError), open(config().status_file, "a") as file:
        file.write("\t".join(map(str, (os.getpid(), event, time.monotonic(), *number))) + "\n")


def report_error(error: BaseException) -> None:
    if isinstance(error, CollectiveAborted):
        lost = _LOST_LINK.search(str(error))
        report_status("aborted", *([int(lost[1])] if lost else []))
    else:
        report_status("raised", exit_code_of(error))


def report_to_job(values: Mapping[str, Any]) -> None:
    """Write a report to stderr, where the job takes it out again, also when this rank is on another host."""
    with suppress(OSError):  # nobody reads any more, or the disk is full
        sys.stderr.flush()
        os.write(2, b"\x1e" + json.dumps(values).encode() + b"\x1e\n")


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that ``error`` ends, as Python and the system have it."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT  # as a shell has it: Python ends by the signal, once its exit handlers have
    if not isinstance(error, SystemExit):
        return 1
    code = 0 if error.code is None else error.code
    return code & 0xFF if isinstance(code, int) else 1


def rank_of_process() -> int:
    """The rank that a launcher gave to this process; 0 when none did."""
    for name in ("RING_RANK", *OF_LAUNCHERS):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0
