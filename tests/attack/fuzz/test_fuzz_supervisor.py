"""Whatever bytes ranks send to their supervisor, it answers, hangs up or ends the job, and loses no line of output."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from attack.fuzz.fuzz import damaged
from harness.programs import ran
from ring_notebook.analysis.job_failure import RankFailure, exit_code
from ring_notebook.launch.connections.pmi import PmiServer
from ring_notebook.launch.supervisor.stderr_reports import split_reports

SECONDS = 3.0
"""Bound of each test, however slow the machine."""
COUNT = 3000
RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix"]
TALK = b"""cmd=init pmi_version=1 pmi_subversion=1
cmd=get_maxes
cmd=get_my_kvsname
cmd=put kvsname=job key=address-1 value=10.0.0.1:99#a=b c
cmd=barrier_in
cmd=get kvsname=job key=address-0
mcmd=spawn
nprocs=2
execname=/bin/true
endcmd
cmd=abort exitcode=3
cmd=finalize
"""
REPORT = b'\x1e{"rank": 1, "host": "a", "code": -11, "time": 2.0, "out_of_memory": false, "aborted": true}\x1e\n'


def bounded(versions: Iterator[bytes]) -> Iterator[bytes]:
    until = time.monotonic() + SECONDS
    for version in versions:
        yield version
        if time.monotonic() > until:
            return


def pieces(data: bytes, source: random.Random) -> Iterator[bytes]:
    while data:
        at = source.randint(1, 80)
        yield data[:at]
        data = data[at:]


def talk(data: bytes, source: random.Random) -> tuple[list[bytes], PmiServer]:
    """What rank 0 of two hears when it sends ``data`` in pieces, until it is hung up."""
    server, heard = PmiServer("job", [0, 0]), []
    with suppress(ValueError):
        for piece in pieces(data, source):
            replies = server.receive(0, piece)
            assert replies.keys() <= {0, 1}
            heard += replies.get(0, b"").splitlines(keepends=True)
    return heard, server


def test_damaged_pmi() -> None:
    source = random.Random(5)
    for data in bounded(damaged(TALK, COUNT, seed=5)):
        heard, server = talk(data, source)
        assert all(line.startswith(b"cmd=") and line.endswith(b"\n") for line in heard)
        assert all(0 < code < 256 for code in server.aborted.values()), data


def test_pmi_in_pieces_is_pmi() -> None:
    """Of a talk that is not damaged every piecewise delivery has the same answers."""
    answers = {tuple(talk(TALK, random.Random(seed))[0]) for seed in range(50)}
    assert len(answers) == 1
    assert len(answers.pop()) == 7


def test_damaged_reports() -> None:
    """However output arrives in pieces, the same text and the same failures come out of it."""
    source = random.Random(9)
    stream = b"one\n" + REPORT + b"two" + REPORT + REPORT + b"\x1e{\x1e three\n" + REPORT.replace(b"\n", b"\r\n")
    for data in bounded(damaged(stream, COUNT, seed=9)):
        expected, failures, rest = split_reports(data)
        text, found, kept = b"", list[RankFailure](), b""
        for piece in pieces(data, source):
            piece_text, piece_failures, kept = split_reports(kept + piece)
            text, found = text + piece_text, found + piece_failures
        assert (text + kept, found) == (expected + rest, failures), data
        assert all(isinstance(exit_code(failure.code), int) for failure in found)


RANK = """
import os, socket, sys
channel = socket.socket(fileno=int(os.environ["PMI_FD"]))
channel.sendall(bytes.fromhex(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\xff\x00" * 5000, 0),
        (b"x" * 100_000, 0),
        (b"cmd=abort exitcode=256\n", 1),
        (b"cmd=abort exitcode=" + b"9" * 5000 + b"\n", 1),
        ("cmd=abort exitcode=²\n".encode(), 1),
        (b"cmd=abort exitcode=259\n", 3),
    ],
    ids=["noise", "a line without end", "256", "5000 digits", "superscript", "259"],
)
def test_a_rank_that_sends_nonsense(sent: bytes, code: int) -> None:
    """The job ends as its ranks do; a rank that aborts it never ends it with 0."""
    if len(sent) > 20_000:  # more than a command line takes
        program = RANK.replace("bytes.fromhex(sys.argv[1])", f"b'x' * {len(sent)}")
        command = [*RINGRUN, "-np", "2", "python", "-c", program.replace("sendall(", "send(")]
    else:
        command = [*RINGRUN, "-np", "2", "python", "-c", RANK, sent.hex()]
    done = ran(command)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
