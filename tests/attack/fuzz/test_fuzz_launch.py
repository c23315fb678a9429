"""Whatever a rank and its launcher send one another, status lines or rendezvous messages, the reader goes on."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from attack.fuzz.fuzz import damaged, with_other_values
from ring_notebook.errors import RingError
from ring_notebook.rank.rank_status import LONGEST_NAME, RankStatus, StatusFile
from ring_notebook.rank.rendezvous import Rendezvous
from ring_notebook.rank.rendezvous_server import Gathering

COUNT = 3000
LINES = b"12\tinitialized\t100.5\n13\traised\t102.0\n12\traised\t103.25\n12\texiting\t104.0\n"
ANSWERS = [
    {"values": [[1], [2]], "key": "00" * 32, "elastic": False, "generation": 0, "step": 0},
    {"error": "rank 1 has exited", "generation": 0, "step": 0},
]
REQUEST = {"generation": 1, "step": 0, "members": [0, 1], "last": False, "value": ["a", 1]}


@pytest.fixture
def status_file() -> Iterator[tuple[StatusFile, int]]:
    """The launcher's side, and the file as a rank has it."""
    status = StatusFile()
    file = os.open(status.path, os.O_RDWR)
    yield status, file
    os.close(file)
    for path in status.variables.values():
        os.close(int(path.rpartition("/")[2]))


def write(file: int, data: bytes) -> None:
    os.ftruncate(file, LONGEST_NAME)
    os.pwrite(file, data, LONGEST_NAME)


def test_damaged_status_lines(status_file: tuple[StatusFile, int]) -> None:
    status, file = status_file
    write(file, LINES)
    times = {"initialized": 100.5, "raised": 103.25, "exiting": 104.0}
    assert status.read() == RankStatus(times)
    for data in damaged(LINES, COUNT, seed=3):
        write(file, data)
        reported = status.read()
        assert all(type(when) is float for when in reported.times.values())
        assert isinstance(reported.failed_at(1), float)


def test_a_line_that_is_none_leaves_the_others(status_file: tuple[StatusFile, int]) -> None:
    status, file = status_file
    write(file, b"\xff\xfe\nhello\n7\tinitialized\n\n7\tinitialized\tx\n" + LINES + b"12\texit")
    assert status.read().times["exiting"] == 104.0


def test_a_rank_that_writes_without_end(status_file: tuple[StatusFile, int]) -> None:
    """A sparse file of a terabyte."""
    status, file = status_file
    write(file, LINES)
    os.ftruncate(file, 1 << 40)
    assert status.read().times["initialized"] == 100.5


def test_damaged_requests() -> None:
    """A supervisor hangs up where it is asked nonsense, and answers ranks alone."""
    for request in with_other_values(REQUEST):
        gathering = Gathering(2)
        with suppress(ValueError):
            assert gathering.take(1, request).keys() <= {0, 1}


def answers() -> Iterator[bytes]:
    for number, message in enumerate(ANSWERS):
        line = b"cmd=ring_gathered value=" + json.dumps(message).encode() + b"\n"
        yield from damaged(line, COUNT // 20, seed=number)
        yield from (line[:24] + json.dumps(other).encode() + b"\n" for other in with_other_values(message))


def test_a_rank_that_hears_nonsense_does_not_begin() -> None:
    for data in answers():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(data[:60000])
            ours.shutdown(socket.SHUT_WR)
            with suppress(RingError):
                assert isinstance(Rendezvous(theirs, 1, 2).gather(None), list)
