"""The ranks of one host, as their supervisor sees them."""

from __future__ import annotations

import os
import selectors
import socket
import sys

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
