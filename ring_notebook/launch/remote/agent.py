"""Starts and watches the ranks of this host for a supervisor elsewhere: ``python -m ...agent WAY``, by ssh or srun.

The two talk in frames over the agent's standard input and output, which are protected as WAY says; nothing listens. The
ranks are killed when the stream ends, when the supervisor is silent for too long, and when the agent is killed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from typing import Any, cast

from ring_notebook import __version__
from ring_notebook.analysis.job_failure import RankFailure
from ring_notebook.analysis.operation_log import TRACE, pack
from ring_notebook.analysis.time_limits import SECONDS_TO_BE_ASSIGNED
from ring_notebook.launch.connections.mpi_host import MpiHost
from ring_notebook.launch.remote.frames import Channels, Frame, FrameStream, Inlet, Kind, Window, take_streams
from ring_notebook.launch.remote.network import network_variables
from ring_notebook.launch.remote.peer_certificate import Way, forget
from ring_notebook.launch.supervisor.inherited_variables import take_environment
from ring_notebook.launch.supervisor.local_ranks import Assignment, LocalRanks, raise_file_limit
from ring_notebook.launch.supervisor.start_and_signal import FORWARDED, end_session
from ring_notebook.launch.supervisor.start_errors import explain_start_error
from ring_notebook.launch.supervisor.tagged_output import Carrier, carry

_CAPACITY = 1 << 16


def greeting() -> dict[str, str]:
    """An agent's first message: its host, and the versions that must equal the supervisor's."""
    return {
        "host": socket.gethostname(),
        "ring_notebook": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


class Agent:
    """Serves the supervisor at the other end of ``stream``."""

    def __init__(self, stream: FrameStream, session: int) -> None:
        self._stream = stream
        self._session = session
        self._selector = selectors.DefaultSelector()
        self._silence = SECONDS_TO_BE_ASSIGNED
        self._ranks: LocalRanks | None = None
        self._mpi: MpiHost | None = None
        self._channels = Channels(stream)
        self._windows = {1: Window(), 2: Window()}
        self._program: list[str] = []
        self._refusal: OSError | None = None  # why this host can start no rank
        self._input_ends: tuple[int, int] | None = None  # of rank 0's standard input
        self._input: Inlet | None = None
        self._over = False  # all ranks have exited and what they printed is sent
        self._lost = False  # the supervisor is gone

    def run(self) -> int:
        """Serve until the supervisor ends the job. Returns the exit code: 1 when the supervisor is gone."""
        self._stream.watch(self._selector, self._take, self._lose)
        self._stream.send(Kind.HELLO, payload=json.dumps(greeting()).encode())
        while not self._lost and not (self._over and not self._stream.unsent):
            for key, _ in self._selector.select(0.5):
                key.data()
            if self._ranks is not None:
                self._ranks.check()
            self._lost = self._lost or bool(self._stream.check(self._silence))
        if self._lost and self._ranks is not None:
            self._ranks.send(signal.SIGKILL)
        return int(self._lost)

    def pass_on(self, signum: int) -> None:
        """A batch system has sent this process a signal, which is meant for the ranks."""
        if self._ranks is not None:
            self._ranks.send(signum)

    def _lose(self, why: str) -> None:
        self._lost = True
        if why:
            os.write(2, f"{why}\n".encode())

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.ASSIGNMENT:
            self._assign(json.loads(frame.payload))
        elif frame.kind == Kind.START:
            self._start(frame.number, json.loads(frame.payload or b"{}"))
        elif frame.kind == Kind.STARTED:
            self._carry_on()
        elif frame.kind == Kind.MESSAGE:
            self._channels.take(frame.number, frame.payload)
        elif frame.kind == Kind.SIGNAL:
            self._job.send(signal.Signals(frame.number))
        elif frame.kind == Kind.KILL:
            self._job.kill(frame.number)
        elif frame.kind == Kind.INTERRUPT:
            self._job.interrupt(frame.number, frame.payload.decode())
        elif frame.kind == Kind.INPUT and self._input is not None:
            self._input.put(frame.payload)
        elif frame.kind == Kind.TAKEN:
            size = int(frame.payload or b"0")
            self._windows[frame.number].give(size) if size else self._windows[frame.number].close()
        elif frame.kind == Kind.END:
            if frame.number and self._ranks is not None:
                self._ranks.end_children()
            threading.Thread(target=self._finish, daemon=True).start()

    @property
    def _job(self) -> LocalRanks:
        if self._ranks is None:
            raise ValueError("no ranks have been assigned")
        return self._ranks

    def _assign(self, given: dict[str, Any]) -> None:
        """Become a process of the job: its environment, its folder, its ranks."""
        forget()
        assignment = Assignment(**given["assignment"])
        self._program = assignment.program
        self._silence = float(given["silence"])
        take_environment(assignment.environment, assignment.given)
        try:
            os.chdir(given["folder"])
            files = raise_file_limit()
            at_death = functools.partial(end_session, self._session) if self._session else None
            network = network_variables(given["others"])
            self._mpi = MpiHost(given["job"], len(assignment.ranks), network, bool(assignment.min_np), at_death)
            if 0 in assignment.ranks:
                self._input_ends = os.pipe()
        except OSError as error:
            self._refusal = error
            return
        stdin = self._input_ends[0] if self._input_ends else None
        assignment = replace(assignment, environment=dict(os.environ))
        self._ranks = LocalRanks(assignment, self._mpi.variables, files, self._carry, stdin)
        self._ranks.watch(self._selector, self._tell_exit, self._speak)

    def _start(self, rank: int, now: dict[str, Any]) -> None:
        if self._ranks is None:
            assert self._refusal is not None
            self._refuse(rank, self._refusal)
            return
        if now:
            self._ranks.assign(now["ranks"], now["size"])
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._ranks.start(rank, theirs, int(now.get("formation", 0)))
            except OSError as error:
                ours.close()
                self._refuse(rank, error)
                return
        self._channels.add(rank, ours, self._selector)

    def _refuse(self, rank: int, error: OSError) -> None:
        code, reason = explain_start_error(self._program, error)
        self._stream.send(Kind.REFUSED, rank, json.dumps({"code": code, "reason": reason}).encode())

    def _carry_on(self) -> None:
        """All ranks have been started: from now on there may be threads."""
        if self._ranks is not None:
            self._ranks.carry_output()
        if self._input_ends is not None:
            theirs, ours = self._input_ends
            os.close(theirs)
            self._input = Inlet(
                functools.partial(_write_all, ours),
                lambda size: self._stream.send(Kind.TAKEN, 0, b"%d" % size),
                functools.partial(os.close, ours),
            )

    def _carry(self, process: subprocess.Popen[bytes], rank: int | None) -> Carrier:
        return carry(process, rank, self._send_output)

    def _send_output(self, fd: int, data: bytes) -> None:
        for at in range(0, len(data), _CAPACITY):
            piece = data[at : at + _CAPACITY]
            self._windows[fd].take(len(piece))
            self._stream.send(Kind.OUTPUT, fd, piece)

    def _speak(self) -> None:
        self._stream.check(self._silence)  # a silent supervisor is noticed when the agent reads again

    def _tell_exit(self, how: RankFailure) -> None:
        while self._channels.pass_on(how.rank):
            pass  # its MPI_Finalize may still lie in the socket
        self._channels.close(how.rank)
        status = self._job.status(how.rank)
        report: dict[str, Any] = {"failure": asdict(how), "times": status.times}
        if TRACE in os.environ:
            report["operations"] = pack(self._job.operations(how.rank))
        self._stream.send(Kind.EXIT, how.rank, json.dumps(report).encode())

    def _finish(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        if self._mpi is not None:
            self._mpi.close()
        self._over = True
        self._stream.wake()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _own_session() -> int:
    """The session that this process and its ranks have to themselves; 0 when it shares one with others."""
    with contextlib.suppress(OSError):  # sshd has made one, or the shell that it starts
        os.setsid()
    return os.getsid(0) if os.getsid(0) == os.getpid() else 0


def main() -> None:
    """Serve the supervisor that has started this process, and exit when the job is over."""
    agent = Agent(FrameStream(*take_streams(), cast(Way, sys.argv[1]), agent=True), _own_session())
    for signum in FORWARDED:
        signal.signal(signum, lambda number, _: agent.pass_on(number))
    os._exit(agent.run())  # the threads that carry output may wait for a supervisor that is gone


if __name__ == "__main__":
    main()
