"""Elastic jobs over two hosts: the living of both train on in place, from the last commit."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elastic import test_dying as on_one_host
from elastic import test_growing
from harness.two_hosts import NAMES, TwoHosts
from hosts.test_over_ssh import SETUP, assert_nothing_is_left

pytestmark = pytest.mark.usefixtures("forked_on_hosts")
PROGRAM = Path(on_one_host.__file__).with_name("training.py")
LIMIT = 120.0
"""Seconds until a job counts as stuck."""
HERE_FIRST, FAR_FIRST = "ring-a:2,ring-b:2", "ring-b:2,ring-a:2"
SILENCE = 3
"""Seconds without a sign of life until a host is lost."""


def train(
    hosts: TwoHosts, victims: str, when: str, how: str, where: str = HERE_FIRST
) -> subprocess.CompletedProcess[str]:
    """The training of `elastic.training` on two ranks of each host, started on the first one."""
    options = ["--no-prefix", "--elastic", "-np", "4", "-H", where]
    return ringrun(hosts, *options, "python", str(PROGRAM), victims, when, how)


def ringrun(hosts: TwoHosts, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``ringrun`` on the first host."""
    command = [sys.executable, "-m", "ring_notebook.launch.cli", *arguments]
    return subprocess.run(
        [str(hosts.folder / "launcher"), NAMES[0], shlex.join(command)],
        env={**os.environ, **hosts.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize(
    ("victims", "how", "where"),
    [
        ("2,3", "SIGKILL", HERE_FIRST),
        pytest.param("0", "leave", FAR_FIRST, marks=pytest.mark.slow),
        pytest.param("3", "SIGKILL", HERE_FIRST, marks=pytest.mark.slow),
        pytest.param("0,2", "SIGKILL", HERE_FIRST, marks=pytest.mark.slow),
        pytest.param("0,1", "SIGKILL", FAR_FIRST, marks=pytest.mark.slow),
        pytest.param("2", "raise", HERE_FIRST, marks=pytest.mark.slow),
    ],
)
def test_the_living_train_on(hosts: TwoHosts, victims: str, how: str, where: str) -> None:
    done = train(hosts, victims, "step", how, where)
    on_one_host.check(done, 4, {int(rank) for rank in victims.split(",")}, per_host=2)
    assert_nothing_is_left(hosts)


def test_a_job_grows_to_another_host(hosts: TwoHosts, tmp_path: Path) -> None:
    """It begins on one; a script names two. The ranks of the second host die once, and others come for them."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho ring-a:2\necho ring-b:2\n")
    script.chmod(0o755)
    options = ["--no-prefix", "-np", "2", "--min-np", "2", "-H", "ring-a:2", "--host-discovery-script", str(script)]
    program = ["python", test_growing.PROGRAM, "4", "2,3"]
    done = ringrun(hosts, *options, *program)
    reports = test_growing.check(done, 4)
    assert [report["joined"] for report in reports] == [False, False, True, True]
    assert sorted(report["local"] for report in reports) == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert done.stderr.count("has joined") == 4
    assert_nothing_is_left(hosts)


VANISHES = f"""
import os, torch
from ring_notebook import verdict
verdict.SILENCE = {SILENCE}
import ring_notebook.torch as hvd
hvd.init()
me = hvd.rank()
state = hvd.elastic.TorchState(steps=0)
@hvd.elastic.run
def train(state):
    while hvd.size() > 2 or state.steps < 100:
        hvd.allreduce(torch.ones(1))
        state.steps += 1
        if state.steps % 10 == 0:
            state.commit()
        if state.steps == 50:
            os.write(1, b"ready\\n")
train(state)
os.write(1, b"rank %d ended as one of %d\\n" % (me, hvd.size()))
"""


def test_a_host_that_vanishes_is_a_death_of_its_ranks(hosts: TwoHosts) -> None:
    """Nothing is closed: supervisor, agent and connections are silent. The ranks there end, and the others go on."""
    code = f"{SETUP}SILENCE = {SILENCE}; supervise.main()"
    command = [sys.executable, "-c", code, "4", "1", "", HERE_FIRST, sys.executable, "-c", VANISHES]
    started = hosts.start(command)
    with started as job:
        try:
            assert job.stdout is not None
            said = [job.stdout.readline() for _ in range(4)]
            assert said == ["ready\n"] * 4
            hosts.set_link(1, "down")
            rest = job.communicate(timeout=LIMIT)[0]
        finally:
            hosts.set_link(1, "up")
            job.kill()
    assert [line for line in sorted(rest.splitlines()) if line.startswith("rank")] == [
        "rank 0 ended as one of 2",
        "rank 1 ended as one of 2",
    ], rest
    assert "ringrun: rank 2 failed: exit code 1. Continuing with 3 ranks of 4" in rest
    assert job.returncode == 0
    assert_nothing_is_left(hosts)
