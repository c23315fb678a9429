"""A host whose agent is killed: what its ranks have failed for, and that a new agent starts one again meanwhile."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.programs import executable
from ring_notebook.analysis.job_failure import RankFailure
from ring_notebook.launch.remote.remote_ranks import RemoteRanks, connect
from ring_notebook.launch.supervisor.local_ranks import Assignment

REMOTE_SHELL = '#!/bin/sh\nshift\nexec sh -c "$*"\n'
PROGRAM = "import os, time; open(f'rank-{os.environ[\"RING_RANK\"]}-{os.getpid()}', 'w').close(); time.sleep(60)"


@pytest.fixture
def remote_shell(tmp_path: Path, settings: Callable[..., None]) -> None:
    """This host is reached by a shell, whatever an earlier test of this process has read of the settings."""
    settings(remote_shell=executable(tmp_path / "ssh", REMOTE_SHELL))


@pytest.mark.usefixtures("remote_shell")
def test_a_rank_is_started_again_while_its_host_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one lost with it fails for the reason that it did, and not for none."""
    monkeypatch.chdir(tmp_path)
    failures: list[RankFailure] = []
    ours: dict[int, socket.socket] = {}

    def start(rank: int, formation: int = 0) -> None:
        ours[rank], theirs = socket.socketpair()
        with theirs:
            host.start(rank, theirs, formation)

    def fail(how: RankFailure) -> None:
        ours.pop(how.rank).close()
        failures.append(how)
        if len(failures) == 1:
            start(how.rank, formation=1)

    def serve(starts: int, fails: int) -> None:
        deadline = time.monotonic() + 60
        while len([*tmp_path.glob("rank-*")]) < starts or len(failures) < fails:
            assert time.monotonic() < deadline, (failures, host.lost)
            for key, _ in selector.select(0.1):
                key.data()
            host.check()

    program = [sys.executable, "-c", PROGRAM]
    host = RemoteRanks("127.0.1.1", Assignment(program, dict(os.environ), [1, 2], 3, "127.0.0.1"), [], "ring-test")
    connect([host])
    with selectors.DefaultSelector() as selector:
        host.watch(selector, fail)
        start(1)
        start(2)
        host.carry_output()
        serve(starts=2, fails=0)
        engine = int(next(tmp_path.glob("rank-2-*")).name.split("-")[2])
        os.kill(psutil.Process(engine).ppid(), signal.SIGKILL)
        serve(starts=3, fails=2)
        assert [how.rank for how in failures] == [1, 2]
        assert "ssh ended: exit code 137" in failures[0].reason
        assert failures[1].reason == failures[0].reason
        host.kill(1)
        serve(starts=3, fails=3)
        assert (failures[2].rank, failures[2].code) == (1, -signal.SIGKILL)
        assert {key.data for key in selector.get_map().values() if isinstance(key.fileobj, socket.socket)} == set()
        host.close()
        for stream in (host._stdout, host._stderr):
            stream.close()
