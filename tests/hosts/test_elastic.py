"""Elastic jobs over two and three hosts: the living train on in place, from the last commit, and others come."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic import test_dying as on_one_host
from elastic import test_growing
from harness.programs import RINGRUN, executable, ran
from harness.two_hosts import NAMES, TwoHosts, hosts_or_skip
from harness.waiting import LIMIT
from hosts.test_over_ssh import SETUP, assert_nothing_is_left

pytestmark = pytest.mark.usefixtures("forked_on_hosts")
PROGRAM = Path(on_one_host.__file__).with_name("training.py")
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
    yield from hosts_or_skip(3)


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
    ("2", "agent", HERE_FIRST),
    ("1", "agent", FAR_FIRST),
    ("0", "cut", FAR_FIRST),
    ("0", "SIGKILL", THREE_SINGLE),
    ("0", "agent", THREE_FAR_FIRST),
    ("4", "cut", THREE),
    ("2,4", "SIGKILL", THREE),
    ("3", "cut", HERE_FIRST),
]


@pytest.mark.parametrize(("victims", "how", "where"), CELLS)
def test_the_living_train_on(request: pytest.FixtureRequest, victims: str, how: str, where: str) -> None:
    hosts: TwoHosts = request.getfixturevalue("three" if "ring-c" in where else "hosts")
    per_host = 1 if where == THREE_SINGLE else 2
    dead = {int(rank) for rank in victims.split(",")}
    if how in ("agent", "cut"):
        first = min(dead) // per_host * per_host
        dead = set(range(first, first + per_host))
    with links_come_back(hosts):
        done = train(hosts, where, victims, how)
    on_one_host.check(done, per_host * where.count("ring"), dead, per_host=per_host)
    assert ("failed: its host is lost: " in done.stderr) == (how in ("agent", "cut")), done.stderr
    assert_nothing_is_left(hosts)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["int8", "auto"])
@pytest.mark.parametrize(("victims", "how"), [("1", "SIGKILL"), ("3", "SIGKILL"), ("2", "agent")])
def test_compressed_gradients_go_on(hosts: TwoHosts, compression: str, victims: str, how: str) -> None:
    """What rounding has left goes with the last commit; ranks stay equal, and near to one process."""
    program = ["python", str(PROGRAM), victims, "step", how, compression]
    done = ringrun(hosts, "--no-prefix", "--elastic", "-np", "4", "-H", HERE_FIRST, *program)
    dead = {2, 3} if how == "agent" else {int(victims)}
    on_one_host.check(done, 4, dead, per_host=2, width=240, error=0.01)
    assert_nothing_is_left(hosts)


def grow(hosts: TwoHosts, folder: Path, where: str, victims: str, how: str, n: int = 2) -> list[dict[str, object]]:
    """What the ranks of a job say that begins with ``n`` on the first host of ``where``; a script names all."""
    script = executable(folder / "hosts.sh", "#!/bin/sh\n" + "".join(f"echo {host}\n" for host in where.split(",")))
    wanted = where.count("ring") * 2
    options = ["-np", str(n), "--min-np", "2", "-H", where.split(",")[0], "--host-discovery-script", str(script)]
    done = ringrun(hosts, "--no-prefix", *options, "python", test_growing.PROGRAM, str(wanted), victims, how)
    reports = test_growing.check(done, wanted)
    assert_nothing_is_left(hosts)
    assert done.stderr.count("has joined") == wanted - n + (2 if how == "agent" else len(victims.split(","))), (
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
        ("3", "agent", HERE_FIRST),  # that of the second host, which comes back
        ("0,1", "rank", FAR_FIRST),
        ("0", "agent", THREE_FAR_FIRST),  # that of rank 0
        ("2,5", "rank", THREE),
    ],
)
def test_hosts_join_in_the_middle_and_come_back(
    request: pytest.FixtureRequest, tmp_path: Path, victims: str, how: str, where: str
) -> None:
    hosts: TwoHosts = request.getfixturevalue("three" if "ring-c" in where else "hosts")
    reports = grow(hosts, tmp_path, where, victims, how)
    first = int(victims[0]) // 2 * 2
    dead = {first, first + 1} if how == "agent" else {int(rank) for rank in victims.split(",")}
    assert [report["joined"] for report in reports] == [rank > 1 or rank in dead for rank in range(len(reports))]
