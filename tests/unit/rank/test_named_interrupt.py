"""An interrupt that names what it is to end reaches a rank that still executes that, and no other."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from harness.waiting import until
from ring_notebook.rank.named_interrupt import interrupt
from ring_notebook.rank.rank_status import LONGEST_NAME, StatusFile

RANK = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
from ring_notebook.rank import named_interrupt
from ring_notebook.rank.rank_status import report_status
print("there", flush=True)
for line in sys.stdin:
    what, _, name = line.strip().partition(" ")
    if what == "begin":
        named_interrupt.tell_executions(name)
    elif what == "execute":
        named_interrupt.tell_execution(name)
    report_status("initialized")
    print("done", flush=True)
"""


class Rank:
    """A process that tells in its status file what it executes."""

    def __init__(self) -> None:
        self.file = StatusFile()
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.file.variables},
        )
        assert self.says() == "there"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> list[str]:
        """What it says until the request has been carried out."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        said = [self.says()]
        while said[-1] != "done":
            said.append(self.says())
        return said[:-1]

    def interrupt(self, name: str) -> None:
        interrupt(self.process.pid, self.file.path, name)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    with rank.process:  # which closes its input at the end, and waits for it
        yield rank
    rank.file.close()


def test_only_what_it_names(rank: Rank) -> None:
    rank.interrupt("one")  # it has told nothing yet
    assert rank.says() == "interrupted"
    rank.ask(f"begin {rank.file.path}")
    rank.interrupt("one")  # it executes nothing
    assert rank.ask("execute one") == []
    rank.interrupt("one")
    assert rank.says() == "interrupted"
    rank.ask("execute two")
    rank.interrupt("one")
    assert rank.ask("nothing") == []
    os.kill(rank.process.pid, signal.SIGINT)  # as a user does
    assert rank.says() == "interrupted"
    assert rank.file.read().times.keys() == {"initialized"}


def test_what_is_under_way_arrives_before_the_next(rank: Rank) -> None:
    """The sender has compared and is not yet through when the rank wants to execute something else."""
    rank.ask(f"begin {rank.file.path}")
    rank.ask("execute one")
    file = os.open(rank.file.path, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    assert rank.process.stdin is not None
    rank.process.stdin.write("execute two\n")
    rank.process.stdin.flush()
    with pytest.raises(AssertionError):
        until(lambda: os.pread(file, LONGEST_NAME, 0).rstrip(b"\0") == b"two", 0.2)
    os.close(file)
    assert rank.says() == "done"


def test_a_sender_that_is_stopped_holds_nobody_up(rank: Rank) -> None:
    rank.ask(f"begin {rank.file.path}")
    file = os.open(rank.file.path, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    began = time.monotonic()
    rank.ask("execute one")
    assert time.monotonic() - began > 0.9
    rank.interrupt("one")
    assert rank.says() == "interrupted"
    os.close(file)
