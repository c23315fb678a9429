"""The sockets between a supervisor and ranks that close them, do not read, or send nothing."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.programs import executable, ran
from ring_notebook.launch.connections.connections import Connections

RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix"]


@pytest.fixture
def mpi() -> Iterator[tuple[Connections, socket.socket]]:
    """The connections of one rank, and its end."""
    connections = Connections(f"ring-test-{os.getpid()}", [0])
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


def test_a_rank_that_has_sent_nothing_is_not_waited_for(mpi: tuple[Connections, socket.socket]) -> None:
    connections, theirs = mpi
    assert waits_for_none(lambda: connections.receive(0)), "more may come"
    theirs.sendall(b"cmd=get_appnum\n")
    assert connections.receive(0)
    assert theirs.recv(100) == b"cmd=appnum appnum=0 rc=0\n"
    theirs.shutdown(socket.SHUT_WR)
    assert not connections.receive(0)


def test_a_rank_that_reads_no_answer_does_not_stop_the_others(mpi: tuple[Connections, socket.socket]) -> None:
    connections, theirs = mpi
    for _ in range(20):
        theirs.sendall(b"cmd=get_maxes\n" * 1000)
        assert waits_for_none(lambda: connections.receive(0))


def test_ranks_that_read_no_answer_of_the_others_do_not_stop_them() -> None:
    connections = Connections("job", [0, 0], elastic=True)
    (_, first), (_, second) = connections.pair(0), connections.pair(1)
    request = b'cmd=ring_gather value={"formation": 0, "step": 0, "value": "%s"}\n' % (b"x" * 3000)
    with first, second:
        for _ in range(200):
            for rank, channel in enumerate((first, second)):
                channel.send(request)
                assert waits_for_none(lambda rank=rank: connections.receive(rank))
    connections.close()


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [["--elastic"], []], ids=["elastic", "with MPI"])
@pytest.mark.parametrize("close", ["import os; os.closerange(3, 100)", ""], ids=["closed", "not inherited"])
def test_a_socket_that_a_program_in_between_has_closed_is_said(close: str, elastic: list[str]) -> None:
    start = "from ring_notebook.core import world; world.init()"
    inherited = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {start!r}]).returncode)"
    done = ran([*RINGRUN, *elastic, "-np", "2", "python", "-c", f"{close}\n{start}" if close else inherited])
    assert done.returncode == 1
    assert re.search(r"RingError: rank \d failed to initialize: the socket to its supervisor, descriptor ", done.stderr)
    assert "start this one with `exec`, or with close_fds=False" in done.stderr


MUCH = """
from ring_notebook.rank.rendezvous import Rendezvous
found = Rendezvous.take().gather("x" * 60_000)
print(len("".join(found)))
"""


def test_an_answer_that_no_socket_takes_at_once_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of some thousand ranks, here and where an agent carries it."""
    monkeypatch.setenv("RING_REMOTE_SHELL", str(executable(tmp_path / "ssh", '#!/bin/sh\nshift\nexec sh -c "$*"\n')))
    done = ran([*RINGRUN, "-np", "6", "-H", "localhost:1,127.0.1.1:5", "python", "-c", MUCH])
    assert (done.returncode, done.stdout.splitlines()) == (0, 6 * ["360000"]), done.stderr
