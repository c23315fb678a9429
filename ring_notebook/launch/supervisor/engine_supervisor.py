"""Supervises the engines of a notebook: the others live when one dies, and it is started again on request.

Requests come through a named pipe in a folder that only its owner can enter; `request` writes to it, from whatever
notebook uses the engines now.
"""

from __future__ import annotations

import os
import re
import selectors
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ring_notebook.analysis.job_failure import RankFailure, Rules
from ring_notebook.launch.connections.connections import Connections
from ring_notebook.launch.supervisor.supervisor import Hosts, Supervisor

Request = Literal["start", "end", "interrupt", "size", "slots"]
"""Start a rank again, or the first time, for a formation; end one; interrupt a run on one; have so many ranks, or slots
on a host; 0 slots: start none there, unless it is to start again."""
_REQUEST = re.compile(rb"(start|end|interrupt|size|slots) (\d{1,9})(?: (\S{1,255}))?")
_CAPACITY = 1 << 12  # bytes


def make_requests(path: Path) -> None:
    """Make the pipe through which a supervisor that starts later takes requests."""
    os.mkfifo(path, 0o600)


def request(path: Path, what: Request, number: int, name: str = "") -> None:
    """Send a request to the supervisor at the pipe ``path``; ``number`` is a rank or a count, ``name`` a host, run or
    formation.

    Raises OSError when no supervisor reads from it.
    """
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        os.write(pipe, f"{what} {number} {name}".rstrip().encode() + b"\n")
    finally:
        os.close(pipe)


class EngineSupervisor(Supervisor):
    """Runs ``program`` on ``n`` engines; others continue when one ends. ``requests`` is the pipe."""

    def __init__(self, hosts: Hosts, connections: Connections, n: int, program: list[str], requests: str) -> None:
        self._wanted: dict[int, int] = {}  # the formation for which to start a rank again when its process has ended
        self._dropped: set[int] = set()  # ranks that the cluster has done without since: they have no host yet
        self._unread = b""
        super().__init__(hosts, connections, Rules(n, engines=True), program)
        # For writing too: so the pipe has a writer when all kernels have closed it, and never reads as closed.
        self._requests = os.open(requests, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._selector.register(self._requests, selectors.EVENT_READ, self._read_requests)

    def _read_requests(self) -> None:
        with suppress(BlockingIOError):
            *lines, rest = (self._unread + os.read(self._requests, _CAPACITY)).split(b"\n")
            self._unread = rest[-_CAPACITY:]
            for line in lines:
                if (match := _REQUEST.fullmatch(line)) and not self._verdict.is_ending:
                    self._carry_out(match[1].decode(), int(match[2]), (match[3] or b"").decode(errors="replace"))

    def _carry_out(self, what: str, number: int, name: str) -> None:
        if what == "slots" and name:
            if number:
                self._hosts.slots[name] = number
            elif len(self._hosts.slots) > 1:
                self._hosts.slots.pop(name, None)
        elif what == "size":
            self._resize(number)
        elif number >= self._connections.size:
            return
        elif what == "end":
            self._end(number)
        elif what == "interrupt":
            self._hosts.of(number).interrupt(number, name)
        elif number in self._running:
            self._wanted[number] = _formation(name)
        else:
            self._start_engine(number, _formation(name))

    def _end(self, rank: int) -> None:
        self._wanted.pop(rank, None)
        if rank in self._running:
            self._note("unwanted", rank)

    def _resize(self, size: int) -> None:
        """The engines are ranks 0 to ``size`` - 1 from now on; those after them end, more are started one by one."""
        for rank in range(size, self._connections.size):
            self._end(rank)
            self._dropped.add(rank)
        self._connections.resize(size)
        self._hosts.resize(size)

    def _start_engine(self, rank: int, formation: int) -> None:
        name = "" if rank in self._dropped else self._hosts.names([rank]).get(rank, "")
        name = name or self._hosts.free(self._running)
        self._dropped.discard(rank)
        self._start_again(rank, name, formation)

    def _handle_exit(self, how: RankFailure) -> None:
        super()._handle_exit(how)
        if how.rank in self._wanted and not self._verdict.is_ending:
            self._start_engine(how.rank, self._wanted.pop(how.rank))


def _formation(name: str) -> int:
    """The formation that a request names for a new engine, or 1."""
    return max(1, int(name)) if name.isascii() and name.isdecimal() else 1
