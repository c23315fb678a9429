"""Starts the ranks of a job, connects them, feeds `verdict` with what becomes of them, and carries out what it says."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence

from ring_notebook.launch.connections.connections import Connections
from ring_notebook.launch.supervisor.local_ranks import HostRanks
from ring_notebook.launch.supervisor.rank_failure import report
from ring_notebook.launch.supervisor.start_and_signal import FORWARDED
from ring_notebook.verdict import Event, Kind, RankFailure, Rules, describe_exit, judge

_LOOK = 0.5  # seconds: hosts are checked so often


class Supervisor:
    """The job of the ranks of ``hosts``, which find each other through ``connections``."""

    def __init__(self, hosts: Sequence[HostRanks], connections: Connections, rules: Rules) -> None:
        self._hosts = hosts
        self._host_of = {rank: host for host in hosts for rank in host.ranks}
        self._rules = rules
        self._connections = connections
        self._began = time.monotonic()
        self._events: list[Event] = []
        self._verdict = judge(rules, (), 0.0)
        self._selector = selectors.DefaultSelector()
        self._channels: dict[int, socket.socket] = {}
        self._running = set(self._host_of)
        # A signal waits until it can be passed on to all ranks.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        self._catch_signals()
        for host in hosts:
            host.watch(self._selector, self._handle_exit)
        for rank in range(rules.n):
            self._start(rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for host in hosts:
            host.carry_output()

    def run(self) -> int:
        """Wait for all ranks; the exit code of the job.

        0 when all finished, of an elastic job ``min_np``; else that of the first failure, 128 + signal for a signal.
        """
        while self._running:
            for key, _ in self._selector.select(max(0.0, min(_LOOK, self._verdict.look_at - self._now()))):
                key.data()
            for host in self._hosts:
                host.check()
            self._look()
        if self._verdict.is_ending:
            for host in self._hosts:
                host.end_children()
        self._connections.close()
        for host in self._hosts:
            host.close()
        return self._verdict.code

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _start(self, rank: int, again: bool = False) -> None:
        ours, theirs = self._connections.pair(rank)
        with theirs:
            self._host_of[rank].start(rank, theirs, again)
        self._channels[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._read_message(rank))

    def _read_message(self, rank: int) -> None:
        if not self._connections.receive(rank):
            self._hang_up(rank)
        code = self._connections.take_abort(rank)
        if code is not None:
            self._note("aborts", self._host_of[rank].failure(rank, code))

    def _hang_up(self, rank: int) -> None:
        if channel := self._channels.pop(rank, None):
            self._selector.unregister(channel)
            channel.close()

    def _handle_exit(self, how: RankFailure) -> None:
        self._running.discard(how.rank)
        self._connections.exited(how.rank, describe_exit(how.code))
        if self._connections.error:
            self._note("apart", self._connections.error)
        self._note("exited", how)

    def _note(self, kind: Kind, value: RankFailure | str | float = 0.0) -> None:
        self._events.append(Event(self._now(), kind, value))

    def _look(self) -> None:
        """Carry out what is due."""
        now, before = self._now(), self._verdict
        verdict = judge(self._rules, self._events, now)
        if verdict.finished:
            statuses = [self._host_of[rank].status(rank) for rank in range(self._rules.n)]
            if missed := self._connections.deserters([*verdict.finished], statuses).intersection(verdict.finished):
                for rank in missed:
                    self._note("missed", rank)
                verdict = judge(self._rules, self._events, now)
        if verdict.due:
            for rank in sorted(self._running):
                if (status := self._host_of[rank].status(rank)).is_leaving:
                    self._note("leaving", self._host_of[rank].failure(rank, status.leaves_with))
            self._note("looked")
            verdict = judge(self._rules, self._events, now)
        self._verdict = verdict
        for failure in verdict.failures[len(before.failures) :]:
            report(failure)
        for text in verdict.words[len(before.words) :]:
            with contextlib.suppress(OSError):  # nobody reads any more, or the disk is full
                os.write(2, f"ringrun: {text}\n".encode())
        for signum in verdict.signals[len(before.signals) :]:
            for host in self._hosts:
                host.send(signum)

    def _catch_signals(self) -> None:
        wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.eventfd_read(wake))

        def note(signum: int, _frame: object) -> None:
            self._note("signal", signum)
            os.eventfd_write(wake, 1)

        for signum in FORWARDED:
            signal.signal(signum, note)
