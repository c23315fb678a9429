"""The ranks of one host, as their supervisor sees them."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.waiting import until
from ring_notebook.launch.supervisor.local_ranks import Assignment, LocalRanks, raise_file_limit


def test_a_rank_that_exits_before_the_others_have_started_loses_no_output(capfd: pytest.CaptureFixture[str]) -> None:
    """The supervisor of another host may say late that all ranks have been started."""
    program = [sys.executable, "-c", "print('said'); raise SystemExit(4)"]
    assignment = Assignment(program, dict(os.environ), [0], 1, "127.0.0.1")
    ranks = LocalRanks(assignment, lambda *_: {}, raise_file_limit())
    exits: list[tuple[int, int]] = []
    ours, theirs = socket.socketpair()
    with selectors.DefaultSelector() as selector, ours, theirs:
        ranks.watch(selector, lambda how: exits.append((how.rank, how.code)))
        ranks.start(0, theirs)
        os.waitid(os.P_PID, ranks._processes[0].pid, os.WEXITED | os.WNOWAIT)
        for key, _ in selector.select(0):
            key.data()
        ranks.carry_output()

        def exited() -> bool:
            for key, _ in selector.select(0.05):
                key.data()
            return bool(exits)

        until(exited)
        ranks.close()
    assert exits == [(0, 4)]
    assert "said" in capfd.readouterr().out


NEXT_PID = Path("/proc/sys/kernel/ns_last_pid")


@pytest.mark.skipif(not os.access(NEXT_PID, os.W_OK), reason="needs to choose the number of a process")
def test_a_group_that_has_the_number_of_a_rank_that_has_exited_is_left_alone() -> None:
    """Ranks of a long job may have ended hours before it ends what they have left behind."""
    assignment = Assignment([sys.executable, "-c", ""], dict(os.environ), [0], 1, "127.0.0.1")
    ranks = LocalRanks(assignment, lambda *_: {}, raise_file_limit())
    exits: list[int] = []
    ours, theirs = socket.socketpair()
    with selectors.DefaultSelector() as selector, ours, theirs:
        ranks.watch(selector, lambda how: exits.append(how.rank))
        ranks.start(0, theirs)
        number = ranks._processes[0].pid
        ranks.carry_output()
        while not exits:
            for key, _ in selector.select():
                key.data()
        ranks.check()
        with another_group(number) as other:
            ranks.end_children()
            assert other.communicate(b"it lives")[0] == b"it lives"
        ranks.close()


def another_group(number: int) -> subprocess.Popen[bytes]:
    """A process of this number, which leads a group; others may take the number first."""
    while True:
        NEXT_PID.write_text(str(number - 1))
        other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        if other.pid == number:
            return other
        other.kill()
        other.communicate()
