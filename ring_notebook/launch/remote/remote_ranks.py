"""The ranks of another host: an agent of ours there starts them, and frames over the streams of ssh go both ways."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ring_notebook.analysis import time_limits
from ring_notebook.analysis.job_failure import RankFailure, describe_exit
from ring_notebook.analysis.operation_log import unpack
from ring_notebook.config import config
from ring_notebook.launch.remote.agent import greeting
from ring_notebook.launch.remote.frames import Channels, Frame, FrameStream, Inlet, Kind, Window
from ring_notebook.launch.remote.peer_certificate import forget
from ring_notebook.launch.remote.remote_shell import agent_command, command_on, is_relay, shell_environment, way_to
from ring_notebook.launch.supervisor.local_ranks import Assignment, HostRanks, nothing
from ring_notebook.launch.supervisor.parent_death import bind_to_parent
from ring_notebook.launch.supervisor.stderr_reports import parse_report
from ring_notebook.launch.supervisor.tagged_output import put
from ring_notebook.rank.rank_status import RankStatus

_CAPACITY = 1 << 16
_LAST_WORDS = 4096  # bytes of what ssh says


class HostsLostError(Exception):
    """Hosts cannot be reached, or have no agent of this version."""

    def __init__(self, hosts: Sequence[RemoteRanks]) -> None:
        super().__init__("; ".join(f"{host.name}: {host.lost}" for host in hosts))
        self.hosts = hosts


class RemoteRanks(HostRanks):
    """An agent on the host ``name``, which `connect` waits for.

    ``others`` are the names of the other hosts of ``job``. On a host that was lost a new agent starts a rank again.
    """

    def __init__(self, name: str, assignment: Assignment, others: Sequence[str], job: str) -> None:
        super().__init__(assignment)
        self.name = name
        self.unusable: RankFailure | None = None
        """The failure of its first rank, where it was lost before its agent had answered."""
        self._others = list(others)
        self._host = name  # its own name, once its agent has sent it
        self._job = job
        self._command = agent_command(name)
        self._running: set[int] = set()
        self._statuses: dict[int, RankStatus] = {}
        self._operations: dict[int, bytes] = {}
        self._asked_to_end = self._ended = False
        self._input = Window()
        self._outputs: dict[int, Inlet] = {}  # what its ranks print, once they have been started
        self._start_agent()

    def _start_agent(self) -> None:
        for output in self._outputs.values():
            output.put(b"")
        self._outputs = {}
        self.lost = ""
        """Why the host is lost."""
        self.ready = False
        """Whether its agent has answered."""
        self._words = b""
        self._unsent: list[tuple[Kind, int, bytes]] = []  # to the agent, until it has answered
        parent = os.getpid()

        def in_shell() -> None:
            os.setpgid(0, 0)  # a signal to the group of the job is not meant for it
            bind_to_parent(parent)

        self._process = subprocess.Popen(
            self._command,
            env=shell_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=in_shell,
        )
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        os.set_blocking(stderr.fileno(), False)
        self._stream = FrameStream(stdout.fileno(), stdin.fileno(), way_to(), agent=False)
        self._channels = Channels(self._stream)

    def watch(
        self,
        selector: selectors.BaseSelector,
        on_exit: Callable[[RankFailure], None],
        while_starting: Callable[[], None] = nothing,
    ) -> None:
        super().watch(selector, on_exit, while_starting)
        self._watch_agent()

    def _watch_agent(self) -> None:
        self._selector.register(self._stderr, selectors.EVENT_READ, self._read_words)
        self._stream.watch(self._selector, self._take, self.lose)

    def unwatch(self) -> None:
        """Let go of the selector, until `watch` is called again."""
        with contextlib.suppress(KeyError):  # it has ended
            self._selector.unregister(self._stderr)
        self._stream.unwatch()

    def start(self, rank: int, channel: socket.socket, formation: int = 0) -> None:
        if self.lost:
            with contextlib.suppress(KeyError):  # it has ended
                self._selector.unregister(self._stderr)
            for stream in (self._stdin, self._stdout, self._stderr):
                stream.close()
            self._start_agent()
            self._watch_agent()
        if formation and not self._outputs:  # the first rank of this agent
            self._carry_output()
        self._statuses.pop(rank, None)
        self._operations.pop(rank, None)
        self._running.add(rank)
        self._channels.add(rank, channel.dup(), self._selector)
        now = {"ranks": self.ranks, "size": self._assignment.size, "formation": formation}
        self._send(Kind.START, rank, json.dumps(now).encode() if formation else b"")

    def _send(self, kind: Kind, number: int = 0, payload: bytes = b"") -> None:
        if self.ready:
            self._stream.send(kind, number, payload)
        else:
            self._unsent.append((kind, number, payload))

    def carry_output(self) -> None:
        self._carry_output()
        if 0 in self.ranks:
            threading.Thread(target=self._send_input, name="ring-input", daemon=True).start()

    def _carry_output(self) -> None:
        self._send(Kind.STARTED)
        self._outputs = {
            fd: Inlet(functools.partial(put, fd), functools.partial(self._tell_taken, fd)) for fd in (1, 2)
        }

    def send(self, signum: int) -> None:
        self._send(Kind.SIGNAL, signum)

    def kill(self, rank: int) -> None:
        self._send(Kind.KILL, rank)

    def interrupt(self, rank: int, name: str) -> None:
        self._send(Kind.INTERRUPT, rank, name.encode())

    def status(self, rank: int) -> RankStatus:
        return self._statuses.get(rank, RankStatus())

    def operations(self, rank: int) -> bytes:
        return self._operations.get(rank, b"")

    def failure(self, rank: int, code: int) -> RankFailure:
        return RankFailure(rank, self._host, code, time.time())

    def end_children(self) -> None:
        self._end(1)

    def close(self) -> None:
        self._end(0)
        while not self.lost and not self._ended:  # the agent closes the stream when it has sent everything
            for key, _ in self._selector.select(0.5):
                key.data()
            self.check()
        for output in self._outputs.values():
            output.put(b"")
            output.join()
        self._stdin.close()
        forget()
        try:
            self._process.wait(time_limits.SECONDS_TO_HANG_UP)
        except subprocess.TimeoutExpired:
            self._kill()

    def check(self) -> None:
        if lost := self._stream.check(time_limits.SILENCE):
            self.lose(lost)

    def speak(self) -> None:
        if not self.lost:
            self._stream.check(time_limits.SILENCE)

    def _end(self, children: int) -> None:
        if not self._asked_to_end:
            self._asked_to_end = True
            self._send(Kind.END, children)

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.HELLO:
            self._greet(json.loads(frame.payload))
        elif frame.kind == Kind.MESSAGE:
            self._channels.take(frame.number, frame.payload)
        elif frame.kind == Kind.EXIT:
            self._handle_exit(frame.number, json.loads(frame.payload))
        elif frame.kind == Kind.REFUSED:
            refusal = json.loads(frame.payload)
            self._fail(frame.number, int(refusal["code"]), str(refusal["reason"]))
        elif frame.kind == Kind.OUTPUT:
            self._outputs[frame.number].put(frame.payload)
        elif frame.kind == Kind.TAKEN:
            size = int(frame.payload)
            self._input.give(size) if size else self._input.close()

    def _greet(self, hello: dict[str, str]) -> None:
        expected = greeting()
        for what in ("ring_notebook", "Python"):
            if hello[what] != expected[what]:
                self.lose(
                    f"it has {what} {hello[what]}, and {expected['host']} has {expected[what]}",
                    "install the same environment at the same path on every host",
                )
                return
        if not self._stream.known:
            raise ValueError("a greeting that is not encrypted")
        self._host = hello["host"]
        self.ready = True
        given = {
            "assignment": asdict(self._assignment),
            "folder": os.getcwd(),
            "others": self._others,
            "job": self._job,
            "silence": time_limits.SILENCE,
        }
        self._stream.send(Kind.ASSIGNMENT, payload=json.dumps(given).encode())
        for frame in self._unsent:
            self._stream.send(*frame)
        self._unsent = []

    def _handle_exit(self, rank: int, report: dict[str, Any]) -> None:
        failure = parse_report(json.dumps(report["failure"]).encode())
        if not isinstance(failure, RankFailure) or failure.rank != rank or rank not in self._running:
            raise ValueError(f"a report of rank {rank} is invalid")
        self._statuses[rank] = RankStatus(dict(report["times"]))
        self._operations[rank] = unpack(str(report.get("operations", "")))
        self._running.discard(rank)
        self._channels.close(rank)
        self._on_exit(failure)

    def _fail(self, rank: int, code: int, reason: str) -> None:
        """Rank ``rank`` has ended for a reason that no exit code tells."""
        self._running.discard(rank)
        self._channels.close(rank)
        self._on_exit(replace(self.failure(rank, code), reason=reason))

    def lose(self, why: str, advice: str = "") -> None:
        """The stream has ended or is silent: the agent has finished, or the host is lost."""
        if self._asked_to_end and not why:
            self._ended = True
            return
        if self.lost:
            return
        self.lost = why or self._why_it_ended()
        self._stream.unwatch()
        self._kill()
        if not self.ready:
            advice = advice or f"try `{shlex.join(command_on(self.name, [sys.executable, '-V']))}`"
            why = f"its host cannot be used: {self.lost.rstrip('.')}; {advice}"
            self.unusable = replace(self.failure(self.ranks[0], 1), reason=why)
        reason = f"its {'place' if is_relay(self._command) else 'host'} is lost: {self.lost}"
        ranks = sorted(self._running)
        for rank in ranks:
            self._channels.close(rank)
        for rank in ranks:  # each may be started again at once, by a new agent
            self._fail(rank, 1, reason)

    def _why_it_ended(self) -> str:
        """The last words of the remote shell, which has closed its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(time_limits.SECONDS_TO_HANG_UP)
        self._read_words()
        if is_relay(self._command):
            return self._words.decode(errors="replace").strip() or "the process there has ended"
        shell, code = self._command[0], self._process.returncode
        how = f"{shell} ended: {describe_exit(code)}" if code else f"{shell} closed the connection"
        last = self._words.decode(errors="replace").strip().splitlines()[-1:]
        return ": ".join([how, *last])

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read_words(self) -> None:
        """What the remote shell and the agent write to standard error: kept, and shown once the agent answers."""
        try:
            data = os.read(self._stderr.fileno(), _CAPACITY)
        except BlockingIOError:
            return
        self._words = (self._words + data)[-_LAST_WORDS:]
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._stderr)
        elif self.ready:
            with contextlib.suppress(OSError):
                put(2, data)

    def _tell_taken(self, fd: int, size: int) -> None:
        self._stream.send(Kind.TAKEN, fd, b"%d" % size)

    def _send_input(self) -> None:
        """Send standard input to rank 0 as fast as it reads."""
        data = b"."
        with contextlib.suppress(OSError):  # rank 0 reads no more, or this process has no standard input
            while data:
                data = os.read(0, _CAPACITY)
                self._input.take(len(data))
                self._stream.send(Kind.INPUT, 0, data)


def connect(hosts: Sequence[RemoteRanks]) -> None:
    """Wait until the agents of all ``hosts`` have answered, as long as RING_START_TIMEOUT says.

    Raises HostsLostError with those that have not.
    """
    limit = config().start_limit(time_limits.SECONDS_TO_CONNECT)
    until = time.monotonic() + limit
    with selectors.DefaultSelector() as selector:
        for host in hosts:
            host.watch(selector, lambda how: None)
        while any(not host.ready and not host.lost for host in hosts):
            for key, _ in selector.select(max(0.0, until - time.monotonic())):
                key.data()
            if time.monotonic() >= until:
                for host in hosts:
                    if not host.ready:
                        host.lose(f"no answer within {limit:g} s")
        for host in hosts:
            if not host.lost:
                host.unwatch()
    forget()
    if lost := [host for host in hosts if host.lost]:
        raise HostsLostError(lost)
