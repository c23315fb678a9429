"""Another host of the network attacks the ports of a job, while it starts and while it runs: it goes on as if alone."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.two_hosts import ADDRESSES, NAMES, TwoHosts, hosts_or_skip
from harness.waiting import LIMIT, until
from ring_notebook.rank import known_callers

FLOOD = Path(__file__).with_name("flood.py")
RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix"]
BOTH = ["-np", "4", "-H", f"{NAMES[0]}:2,{NAMES[1]}:2"]
SUMS = """
import glob, os, time
from ring_notebook.api.basics import init, rank, shutdown
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core.communicator import ReduceOp
ends = time.monotonic() + {seconds}
step, going = 0, 1
while going:
    init()
    for _ in range(20):
        step += 1
        assert allreduce_numbers([step * (rank() + 1)], ReduceOp.SUM, "numbers") == [step * 10]
        time.sleep(0.01)
    attacked = len(glob.glob({marks!r})) >= {attackers} and time.monotonic() > ends
    going = not allreduce_numbers([int(attacked)], ReduceOp.MIN, "attacked")[0]
    if {again}: shutdown()
os.write(1, b"all is well\\n")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    yield from hosts_or_skip()


@contextlib.contextmanager
def attacked(hosts: TwoHosts, times: int, folder: Path) -> Iterator[str]:
    """Each host attacks the other one for the length of the block; the pattern of files of those that did so often."""
    spaces = [f"{hosts.prefix}-{place}" for place in "ab"]
    commands = [
        ["ip", "netns", "exec", own, sys.executable, str(FLOOD), str(LIMIT), str(times), str(folder / own), other]
        for own, other in (spaces, spaces[::-1])
    ]
    with contextlib.ExitStack() as stack:
        attackers = [stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)) for command in commands]
        try:
            yield str(folder / f"{hosts.prefix}-*")
        finally:
            for attacker in attackers:
                attacker.communicate(timeout=LIMIT)


@pytest.mark.slow
def test_a_job_whose_ports_are_flooded(hosts: TwoHosts, tmp_path: Path) -> None:
    """Its ranks connect, reduce, and connect anew in every round, until both hosts have attacked them."""
    with attacked(hosts, 200, tmp_path) as marks:
        program = SUMS.format(seconds=2, again=True, marks=marks, attackers=2)
        said = hosts.on_first([*RINGRUN, *BOTH, sys.executable, "-c", program], LIMIT)
    assert said.count("all is well") == 4, said


def test_strangers_do_not_keep_run_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` over several hosts listens for results; one that says nothing is not waited for."""
    for name in ("SECONDS_TO_PROVE", "_SECONDS_TO_END"):  # one wait for a stranger would be one for ever
        monkeypatch.setattr(known_callers, name, 1e6)
    callers = known_callers.KnownCallers(("127.0.0.1", 0), b"key", lambda _: None)
    host, _, port = callers.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, int(port))))
        closing = threading.Thread(target=callers.close, daemon=True)
        closing.start()
        until(lambda: not closing.is_alive())


@pytest.mark.slow
def test_a_rendezvous_that_is_flooded(hosts: TwoHosts, tmp_path: Path) -> None:
    """That of processes which anything has started, on the port that all know: from before its first rank comes."""
    env = {"RING_RENDEZVOUS": f"{ADDRESSES[0]}:29450", "RING_SIZE": "4", "RING_RENDEZVOUS_SECRET": "s" * 32}
    with attacked(hosts, 1000, tmp_path) as marks, contextlib.ExitStack() as stack:
        program = SUMS.format(seconds=10, again=False, marks=marks, attackers=1)
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [str(hosts.folder / "launcher"), NAMES[rank // 2], shlex.join([sys.executable, "-c", program])],
                    env={**os.environ, **env, "RING_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for rank in range(4)
        ]
        try:
            said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert said == ["all is well\n"] * 4
