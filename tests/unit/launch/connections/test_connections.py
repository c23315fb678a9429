"""The sockets between a supervisor and ranks that close them, do not read, or send nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from ring_notebook.launch.connections.connections import MpiConnections, RendezvousConnections

RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli"]


@pytest.fixture
def mpi() -> Iterator[tuple[MpiConnections, socket.socket]]:
    """The connections of one rank, and its end."""
    connections = MpiConnections(f"ring-test-{os.getpid()}", [0])
    _, theirs = connections.pair(0)
    with theirs:
        yield connections, theirs
    connections.close()


def waits_for_none(call: Callable[[], bool]) -> bool:
    """What ``call`` returns; an error when it waits for a rank that will never do what it waits for."""
    result: list[bool] = []
    thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
    thread.start()
    thread.join(15)
    assert result, "the supervisor waits for one rank"
    return result[0]


def test_a_rank_that_has_sent_nothing_is_not_waited_for(mpi: tuple[MpiConnections, socket.socket]) -> None:
    connections, theirs = mpi
    assert waits_for_none(lambda: connections.receive(0)), "more may come"
    theirs.sendall(b"cmd=get_appnum\n")
    assert connections.receive(0)
    assert theirs.recv(100) == b"cmd=appnum appnum=0 rc=0\n"
    theirs.shutdown(socket.SHUT_WR)
    assert not connections.receive(0)


def test_a_rank_that_reads_no_answer_does_not_stop_the_others(mpi: tuple[MpiConnections, socket.socket]) -> None:
    connections, theirs = mpi
    for _ in range(20):
        theirs.sendall(b"cmd=get_maxes\n" * 1000)
        assert waits_for_none(lambda: connections.receive(0))


def test_ranks_of_an_elastic_job_that_read_nothing_do_not_stop_it() -> None:
    connections = RendezvousConnections(2)
    (_, first), (_, second) = connections.pair(0), connections.pair(1)
    with first, second:
        for _ in range(400):
            first.send(b'{"card": [1, 2, 3]}')
            assert waits_for_none(lambda: connections.receive(0))
    connections.close()


@pytest.mark.parametrize("close", ["import os; os.closerange(3, 100)", ""], ids=["closed", "not inherited"])
def test_a_socket_that_a_program_in_between_has_closed_is_said(close: str) -> None:
    start = "from ring_notebook.core import world; world.init()"
    inherited = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {start!r}]).returncode)"
    command = [*RINGRUN, "--elastic", "-np", "2", "python", "-c", f"{close}\n{start}" if close else inherited]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "RingError: rank 0 failed to initialize: the socket to its supervisor, descriptor " in done.stderr
    assert "start this one with `exec`, or with close_fds=False" in done.stderr
