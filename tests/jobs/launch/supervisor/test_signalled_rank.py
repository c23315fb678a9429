"""The process of one rank: what a signal does to it, and to what it has printed."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from ring_notebook.launch.supervisor.start_and_signal import send_signal, start_rank
from ring_notebook.launch.supervisor.tagged_output import carry


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_when_a_rank_has_just_exited_loses_no_output(
    signum: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also before the output is carried; a handler may send it at any moment."""
    rank = start_rank([sys.executable, "-c", "print('said'); raise SystemExit(4)"], os.environ, None, [])
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    send_signal(rank, signum)
    output = carry(rank)
    assert rank.wait() == 4
    output.join()
    assert capfd.readouterr().out == "said\n"
    send_signal(rank, signum)  # whose number may be another process's by now
