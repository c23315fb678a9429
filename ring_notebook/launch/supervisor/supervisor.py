"""Starts and connects the ranks of a job, passes events to `judge`, and carries out its verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ring_notebook.analysis.job_failure import Event, Kind, RankFailure, Rules, first_failure, judge
from ring_notebook.analysis.operation_log import as_events, complete, parse, parting
from ring_notebook.config import config
from ring_notebook.launch.connections.connections import Connections
from ring_notebook.launch.supervisor.growth import Discovery, Growth
from ring_notebook.launch.supervisor.local_ranks import HostRanks
from ring_notebook.launch.supervisor.start_and_signal import FORWARDED
from ring_notebook.launch.supervisor.start_errors import report_start_error
from ring_notebook.launch.supervisor.stderr_reports import report
from ring_notebook.machine.os_calls import Wake

_LOOK = 0.5  # seconds: hosts are checked so often


Make = Callable[[str, list[int], int, Iterable[str]], HostRanks]


class Hosts:
    """The hosts of a job by name, and the host of each rank; ``slots``: of all hosts that the job may use.

    ``make(name, ranks, size, others)`` makes another one, for these ranks of a job of ``size`` on the hosts ``others``.
    """

    def __init__(self, make: Make, by_name: Mapping[str, HostRanks], slots: Mapping[str, int]) -> None:
        self.by_name = dict(by_name)
        self.slots = dict(slots)
        self._make = make
        self._name_of = {rank: name for name, host in by_name.items() for rank in host.ranks}

    def of(self, rank: int) -> HostRanks:
        return self.by_name[self._name_of[rank]]

    def names(self, ranks: Iterable[int]) -> dict[int, str]:
        return {rank: self._name_of[rank] for rank in ranks if rank in self._name_of}

    def resize(self, size: int) -> None:
        for host in self.by_name.values():
            host.assign([rank for rank in host.ranks if rank < size], size)

    def assign(self, rank: int, name: str, size: int) -> HostRanks | None:
        """``rank`` of a job of ``size`` is on the host ``name`` from now on; returns that one if it is a new one.

        Raises OSError when nothing can be started there.
        """
        made = None if name in self.by_name else self._make(name, [rank], size, self.by_name)
        if self._name_of.get(rank, name) != name:
            host = self.of(rank)
            host.assign([one for one in host.ranks if one != rank], size)
        self._name_of[rank] = name
        if made is not None:
            self.by_name[name] = made
            return made
        host = self.by_name[name]
        host.assign(host.ranks if rank in host.ranks else [*host.ranks, rank], size)
        return None

    def free(self, ranks: Iterable[int]) -> str:
        """The first host that has a slot beside ``ranks``; where none has, the least full one."""
        used = Counter(self.names(ranks).values())
        return min(self.slots, key=lambda name: max(0.0, (1 + used[name] - self.slots[name]) / self.slots[name]))


class Supervisor:
    """The job of the ranks of ``hosts``, which find each other through ``connections``, and run ``program``.

    With a ``growth`` others are started while the job runs; ``ask`` says once a second which slots there are.
    """

    def __init__(
        self,
        hosts: Hosts,
        connections: Connections,
        rules: Rules,
        program: list[str],
        growth: Growth | None = None,
        ask: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._hosts = hosts
        self._program = program
        self._rules = rules
        self._connections = connections
        self._growth = growth
        self._joining: set[int] = set()  # started ranks that the elastic job has yet to admit
        self._began = time.monotonic()
        self._events: list[Event] = []
        self._verdict = judge(rules, (), 0.0)
        self._selector = selectors.DefaultSelector()
        self._channels: dict[int, socket.socket] = {}
        self._slow: set[int] = set()  # ranks that have not taken all that was sent to them
        self._running = set(range(rules.n))
        # A signal waits until it can be passed on to all ranks.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        self._catch_signals()
        for host in hosts.by_name.values():
            host.watch(self._selector, self._handle_exit, self._speak)
        for rank in range(rules.n):
            self._start(rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for host in hosts.by_name.values():
            host.carry_output()
        if growth is not None:
            connections.gathering.least = rules.min_np
        if ask is not None:
            self._discovery = Discovery(ask, _say)
            self._selector.register(self._discovery.changed, selectors.EVENT_READ, self._take_slots)
            self._discovery.start()

    def run(self) -> int:
        """Wait for all ranks; the exit code of the job.

        0 when all ranks finished, in an elastic job ``min_np``; else the first failure's, 128 + signal for a signal.
        """
        while self._running:
            for key, _ in self._selector.select(max(0.0, min(_LOOK, self._verdict.look_at - self._now()))):
                key.data()
            for host in [*self._hosts.by_name.values()]:
                host.check()
            self._look()
            self._grow()
            self._await_room()
        if self._verdict.is_ending:
            for host in self._hosts.by_name.values():
                host.end_children()
        self._connections.close()
        if (path := config().trace_on_error) and self._verdict.code:
            logs = {rank: host.operations(rank) for host in self._hosts.by_name.values() for rank in host.ranks}
            _say(_write_trace(Path(path), logs, self._verdict.failures))
        for host in self._hosts.by_name.values():
            host.close()
        return self._verdict.code

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _start(self, rank: int, formation: int = 0) -> None:
        ours, theirs = self._connections.pair(rank)
        with theirs:
            self._hosts.of(rank).start(rank, theirs, formation)
        self._channels[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._read_message(rank))

    def _speak(self) -> None:
        """Give all other hosts a sign of life, while the ranks of this one are started."""
        for host in self._hosts.by_name.values():
            host.speak()

    def _start_again(self, rank: int, name: str, formation: int = 1) -> None:
        """Start a process on the host ``name`` as ``rank`` in place of one that has exited, or as one more rank."""
        self._hang_up(rank)
        self._note("started", rank)
        try:
            size = max(self._connections.size, rank + 1)
            if made := self._hosts.assign(rank, name, size):
                made.watch(self._selector, self._handle_exit, self._speak)
            self._connections.resize(size)
            self._start(rank, formation)
        except OSError as error:
            code = report_start_error(self._program, error)
            self._note("exited", RankFailure(rank, name, code, time.time()))
            if self._growth is not None:
                self._growth.fail(name, self._now())
            return
        self._running.add(rank)

    def _grow(self) -> None:
        """Start ranks in new slots, and end ranks whose slots are gone."""
        growth = self._growth
        if growth is None or self._verdict.is_ending:
            return
        gathering = self._connections.gathering
        while gathering.joined:
            rank = gathering.joined.pop()
            self._joining.discard(rank)
            self._note("joined", rank)
        while gathering.dismissed:
            self._note("unwanted", gathering.dismissed.pop())
        if self._verdict.finished or self._running <= self._joining:  # no rank is left that could admit them
            for rank in self._joining & self._running:
                self._note("unwanted", rank)
            return
        if not gathering.has_formed:
            return
        places = self._hosts.names(self._running)
        self._connections.dismiss(growth.surplus(places) - self._joining)
        for rank, name in growth.due(places, self._now()).items():
            self._joining.add(rank)
            self._start_again(rank, name)

    def _take_slots(self) -> None:
        self._discovery.changed.clear()
        assert self._growth is not None
        self._growth.slots = self._discovery.slots

    def _read_message(self, rank: int) -> None:
        if not self._connections.receive(rank):
            self._hang_up(rank)
        code = self._connections.take_abort(rank)
        if code is not None:
            self._note("aborts", self._hosts.of(rank).failure(rank, code))

    def _await_room(self) -> None:
        """Have the selector say when ranks take more of the answers that were too long for their sockets."""
        unsent = self._connections.unsent.keys() & self._channels.keys()
        for rank in unsent ^ (self._slow & self._channels.keys()):
            key = self._selector.get_key(self._channels[rank])
            self._selector.modify(key.fileobj, key.events ^ selectors.EVENT_WRITE, key.data)
        self._slow = unsent

    def _hang_up(self, rank: int) -> None:
        self._slow.discard(rank)
        if channel := self._channels.pop(rank, None):
            self._selector.unregister(channel)
            channel.close()

    def _handle_exit(self, how: RankFailure) -> None:
        self._running.discard(how.rank)
        if self._growth is not None and how.code and how.rank not in self._verdict.doomed:
            self._growth.fail(self._hosts.names([how.rank])[how.rank], self._now())
        self._connections.exited(how.rank, how.how)
        if error := self._connections.gathering.error:
            self._note("apart", error)
        self._note("exited", how)

    def _note(self, kind: Kind, value: RankFailure | str | float = 0.0) -> None:
        self._events.append(Event(self._now(), kind, value))

    def _look(self) -> None:
        now, before = self._now(), self._verdict
        verdict = judge(self._rules, self._events, now)
        if verdict.finished:
            statuses = {rank: self._hosts.of(rank).status(rank) for rank in verdict.finished}
            if missed := self._connections.deserters(statuses).intersection(statuses):
                for rank in missed:
                    self._note("missed", rank)
                verdict = judge(self._rules, self._events, now)
        if verdict.due:
            for rank in sorted(self._running):
                if (status := self._hosts.of(rank).status(rank)).is_leaving:
                    self._note("leaving", self._hosts.of(rank).failure(rank, status.leaves_with))
            self._note("looked")
            verdict = judge(self._rules, self._events, now)
        self._verdict = verdict
        for failure in verdict.failures[len(before.failures) :]:
            report(failure)
        for text in verdict.words[len(before.words) :]:
            _say(text)
        for signum in verdict.signals[len(before.signals) :]:
            for host in self._hosts.by_name.values():
                host.send(signum)
        for rank in verdict.doomed & self._running:
            self._hosts.of(rank).kill(rank)

    def _catch_signals(self) -> None:
        wake = Wake()
        self._selector.register(wake, selectors.EVENT_READ, wake.clear)

        def note(signum: int, _frame: object) -> None:
            self._note("signal", signum)
            wake.set()

        for signum in FORWARDED:
            signal.signal(signum, note)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more, or the disk is full
        os.write(2, f"ringrun: {text}\n".encode())


def _write_trace(path: Path, logs: Mapping[int, bytes], failures: Sequence[RankFailure]) -> str:
    """Write the operations in the ``logs`` of ranks to ``path``, for ui.perfetto.dev. Returns what to say of it."""
    operations = [one for rank, log in sorted(logs.items()) for one in parse(log, rank)]
    if not operations:
        return f"{path} was not written: no rank has called an operation"
    first = first_failure(failures)
    # A rank prints its own exception.
    ends = {first.rank: f"ended ({first.how})"} if first and (first.reason or first.code != 1) else {}
    events = complete(as_events(operations), ends)
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        return f"the trace {path} cannot be written: {error.strerror}"
    found = parting(operations, ends)
    lost = sorted(set(logs) - {one.rank for one in operations})
    missing = f"; nothing is known of {', '.join(f'rank {rank}' for rank in lost)}" if lost else ""
    return f"{found.text if found else 'the ranks kept step'}{missing}. {path} has the last operations of all ranks"
