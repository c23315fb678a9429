"""Elastic jobs over two and three hosts: the living train on in place, from the last commit, and others come."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic import test_dying as on_one_host
from elastic import test_growing
from harness.programs import RINGRUN, ran
from harness.two_hosts import NAMES, TwoHosts, missing, two_hosts
from hosts.test_over_ssh import SETUP, assert_nothing_is_left

pytestmark = pytest.mark.usefixtures("forked_on_hosts")
PROGRAM = Path(on_one_host.__file__).with_name("training.py")
LIMIT = 200.0
"""Seconds until a job counts as stuck."""
HERE_FIRST, FAR_FIRST = "ring-a:2,ring-b:2", "ring-b:2,ring-a:2"
SILENCE = 5
"""Seconds without a sign of life until a host is lost."""


def ringrun(hosts: TwoHosts, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``ringrun`` on the first host."""
    return on_first(hosts, [*RINGRUN, *arguments])


def on_first(hosts: TwoHosts, command: list[str]) -> subprocess.CompletedProcess[str]:
    """``command`` on the first host."""
    return ran(
        [str(hosts.folder / "launcher"), NAMES[0], shlex.join(command)],
        env={**os.environ, **hosts.environment},
        stdin=subprocess.DEVNULL,
        timeout=LIMIT,
    )


@pytest.fixture(scope="module")
def three() -> Iterator[TwoHosts]:
    """Three hosts behind a switch."""
    if reason := missing():
        pytest.skip(reason)
    with two_hosts("1gbit", 3) as made:
        yield made


@contextmanager
def links_come_back(hosts: TwoHosts) -> Iterator[None]:
    try:
        yield
    finally:
        for number in range(len(hosts.names)):
            hosts.set_link(number, "up")


def train(hosts: TwoHosts, where: str, victims: str, how: str) -> subprocess.CompletedProcess[str]:
    """The training of `elastic.training` in the slots of ``where``, started on the first host."""
    n = sum(int(host.partition(":")[2]) for host in where.split(","))
    program = ["python", str(PROGRAM), victims, "step", how]
    if how != "cut":
        return ringrun(hosts, "--no-prefix", "--elastic", "-np", str(n), "-H", where, *program)
    code = f"{SETUP}SILENCE = {SILENCE}; supervise.main()"
    return on_first(hosts, [sys.executable, "-c", code, str(n), "1", "", where, sys.executable, *program[1:]])


THREE_SINGLE, THREE = "ring-b:1,ring-a:1,ring-c:1", "ring-a:2,ring-b:2,ring-c:2"
THREE_FAR_FIRST = "ring-c:2,ring-a:2,ring-b:2"
CELLS = [
    # victims, how, where
    *((rank, "SIGKILL", HERE_FIRST) for rank in ("0", "3")),
    *((rank, "SIGKILL", FAR_FIRST) for rank in ("0", "2")),
    ("0,2", "SIGKILL", HERE_FIRST),
    ("0,1", "SIGKILL", FAR_FIRST),
    ("0", "leave", FAR_FIRST),
    ("2", "raise", HERE_FIRST),
    ("2", "host", HERE_FIRST),
    ("1", "host", FAR_FIRST),
    ("3", "cut", HERE_FIRST),
    ("0", "cut", FAR_FIRST),
    ("0", "SIGKILL", THREE_SINGLE),
    ("0", "host", THREE_FAR_FIRST),
    ("4", "cut", THREE),
    ("2,4", "SIGKILL", THREE),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "how", "where"),
    CELLS,
)
def test_the_living_train_on(request: pytest.FixtureRequest, victims: str, how: str, where: str) -> None:
    hosts: TwoHosts = request.getfixturevalue("three" if "ring-c" in where else "hosts")
    per_host = 1 if where == THREE_SINGLE else 2
    dead = {int(rank) for rank in victims.split(",")}
    if how in ("host", "cut"):
        first = min(dead) // per_host * per_host
        dead = set(range(first, first + per_host))
    with links_come_back(hosts):
        done = train(hosts, where, victims, how)
    on_one_host.check(done, per_host * where.count("ring"), dead, per_host=per_host)
    assert_nothing_is_left(hosts)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["int8", "auto"])
@pytest.mark.parametrize(("victims", "how"), [("1", "SIGKILL"), ("3", "SIGKILL"), ("2", "host")])
def test_compressed_gradients_go_on(hosts: TwoHosts, compression: str, victims: str, how: str) -> None:
    """What rounding has left goes with the last commit; ranks stay equal, and near to one process."""
    program = ["python", str(PROGRAM), victims, "step", how, compression]
    done = ringrun(hosts, "--no-prefix", "--elastic", "-np", "4", "-H", HERE_FIRST, *program)
    dead = {2, 3} if how == "host" else {int(victims)}
    on_one_host.check(done, 4, dead, per_host=2, width=240, error=0.01)
    assert_nothing_is_left(hosts)


def grow(hosts: TwoHosts, folder: Path, where: str, victims: str, how: str, n: int = 2) -> list[dict[str, object]]:
    """What the ranks of a job say that begins with ``n`` on the first host of ``where``; a script names all."""
    script = folder / "hosts.sh"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {host}\n" for host in where.split(",")))
    script.chmod(0o755)
    wanted = where.count("ring") * 2
    options = ["-np", str(n), "--min-np", "2", "-H", where.split(",")[0], "--host-discovery-script", str(script)]
    done = ringrun(hosts, "--no-prefix", *options, "python", test_growing.PROGRAM, str(wanted), victims, how)
    reports = test_growing.check(done, wanted)
    assert_nothing_is_left(hosts)
    assert done.stderr.count("has joined") == wanted - n + (2 if how == "host" else len(victims.split(","))), (
        done.stderr
    )
    return reports


@pytest.mark.slow
def test_a_job_grows_to_another_host(hosts: TwoHosts, tmp_path: Path) -> None:
    """It begins on one; a script names two. The ranks of the second host die once, and others come for them."""
    reports = grow(hosts, tmp_path, HERE_FIRST, "2,3", "rank")
    assert [report["joined"] for report in reports] == [False, False, True, True]
    assert sorted(report["local"] for report in reports) == [[0, 2], [0, 2], [1, 2], [1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "how", "where"),
    [
        ("3", "host", HERE_FIRST),  # the second host fails, and comes back
        ("0,1", "rank", FAR_FIRST),
        ("0", "host", THREE_FAR_FIRST),  # that of rank 0
        ("2,5", "rank", THREE),
    ],
)
def test_hosts_join_in_the_middle_and_come_back(
    request: pytest.FixtureRequest, tmp_path: Path, victims: str, how: str, where: str
) -> None:
    hosts: TwoHosts = request.getfixturevalue("three" if "ring-c" in where else "hosts")
    reports = grow(hosts, tmp_path, where, victims, how)
    first = int(victims[0]) // 2 * 2
    dead = {first, first + 1} if how == "host" else {int(rank) for rank in victims.split(",")}
    assert [report["joined"] for report in reports] == [rank > 1 or rank in dead for rank in range(len(reports))]


VANISHES = f"""
import os, torch
from ring_notebook.analysis import job_failure
job_failure.SILENCE = {SILENCE}
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
    assert re.search(r"ringrun: rank 2 on \S+ failed: its host is lost: .*\. Continuing with 3 ranks of 4", rest), rest
    assert job.returncode == 0
    assert_nothing_is_left(hosts)
