"""Each process and host of a job or cluster is killed at some moment: words, exit code, who lives, what is left."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.numpy_framework import numpy_framework
from harness.programs import ran
from harness.two_hosts import TwoHosts, hosts_or_skip
from harness.waiting import LIMIT
from hosts.test_over_ssh import assert_nothing_is_left

SCRIPT, NOTEBOOK, TRAINING, HEALS = (
    str(Path(__file__).with_name(name))
    for name in ("killed.py", "killed_cells.py", "killed_trainings.py", "killed_heals.py")
)
pytestmark = pytest.mark.slow
SILENCE = 6
"""Seconds without a sign of life until a host is lost."""
WHERE = {1: "", 2: "ring-a:2,ring-b:2", 3: "ring-b:1,ring-a:2,ring-c:1"}
"""The hosts of the four ranks. The supervisor is on ring-a, with three hosts not on the host of rank 0."""
PLACES = {1: "aaaa", 2: "aabb", 3: "baac"}


class Victim(NamedTuple):
    """``who`` is a rank, an agent, a host or the supervisor, of the rank ``of``; ``dead`` ranks end with it."""

    who: str
    of: int
    dead: list[int]

    @property
    def has_the_supervisor(self) -> bool:
        return len(self.dead) == 4


def victim(name: str, count: int) -> Victim:
    """``name`` is "0" to "3", "supervisor", "home" for its host, or "agent 3" or "host 3" for those of this rank."""
    places = PLACES[count]
    if name in ("supervisor", "home"):
        return Victim("supervisor" if name == "supervisor" else "host", places.index("a"), [0, 1, 2, 3])
    who, _, of = name.rpartition(" ")
    number = int(of)
    return Victim(
        who or "rank", number, [rank for rank in range(4) if places[rank] == places[number]] if who else [number]
    )


VICTIMS = {
    1: ["0", "3", "supervisor"],
    2: ["0", "3", "supervisor", "home", "agent 2", "host 2"],
    3: ["0", "2", "supervisor", "home", "agent 0", "host 3"],
}
WHEN = ["start", "collective", "between", "end"]
EACH = pytest.mark.parametrize(("count", "name"), [(count, name) for count, names in VICTIMS.items() for name in names])


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[TwoHosts]:
    yield from hosts_or_skip(3)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH: all processes give up a silent host soon."""
    folder = tmp_path_factory.mktemp("impatient")
    (folder / "sitecustomize.py").write_text(
        f"import ring_notebook.analysis.time_limits\nring_notebook.analysis.time_limits.SILENCE = {SILENCE}\n"
    )
    return str(folder)


def execute(hosts: TwoHosts, folder: str, *command: str, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
    paths = filter(None, [folder, str(Path(SCRIPT).parents[1]), os.environ.get("PYTHONPATH")])
    try:
        return ran(
            [str(hosts.folder / "launcher"), "ring-a", f"exec {shlex.join([sys.executable, *command])}"],
            env={**os.environ, **hosts.environment, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            timeout=limit,
        )
    finally:
        assert_nothing_is_left(hosts)
        for name in hosts.names:
            hosts.revive(name)


@EACH
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kind", ["plain", "elastic"])
def test_a_job(
    hosts: TwoHosts, three_hosts: TwoHosts, impatient: str, count: int, name: str, when: str, kind: str
) -> None:
    killed = victim(name, count)
    where = ["-H", WHERE[count]] if count > 1 else []
    ringrun = ["-m", "ring_notebook.launch.cli", "--no-prefix", *(["--elastic"] if kind == "elastic" else [])]
    dead = ",".join(map(str, killed.dead))
    program = ["python", SCRIPT, killed.who, str(killed.of), dead, when, kind]
    done = execute(three_hosts if count == 3 else hosts, impatient, *ringrun, "-np", "4", *where, *program)
    ended = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    host = rf"(ring-{PLACES[count][killed.of]}|localhost)"
    if kind == "elastic" and when != "start" and not killed.has_the_supervisor:
        living = [rank for rank in range(4) if rank not in killed.dead]
        left = range(4) if when == "end" else living
        lines = [f"rank {rank} of 4 ended as number {left.index(rank)} of {len(left)}" for rank in living]
        assert ended == lines, done.stderr
        assert done.returncode == 0, done.stderr
        for rank in killed.dead:
            assert re.search(rf"ringrun: rank {rank}( on \S+)? failed: ", done.stderr), done.stderr
        return
    if when != "end":  # at the end the others may have ended before
        assert ended == [], done.stderr
    if name == "home":
        assert done.returncode == -9, done.stderr
        return
    assert done.returncode == (1 if killed.who in ("agent", "host") else 137), done.stderr
    words = {
        "rank": f"rank {killed.of} on {host} failed first: killed by SIGKILL",
        "supervisor": "the launcher of the ranks failed",
    }
    lost = f"rank [{dead}] on {host} failed first: its host is lost"
    assert re.search(words.get(killed.who, lost), done.stderr), done.stderr


@EACH
def test_a_notebook(
    hosts: TwoHosts, three_hosts: TwoHosts, impatient: str, numpy_site: Path, count: int, name: str
) -> None:
    """One cluster for all moments, healed after each; another one where the kernel's own host dies."""
    killed = victim(name, count)
    there = three_hosts if count == 3 else hosts
    moments = [[when] for when in WHEN] if name == "home" else [WHEN]
    with numpy_framework(numpy_site):
        for whens in moments:
            dead = ",".join(map(str, killed.dead))
            network = [there.prefix, str(there.folder), ",".join(there.names)]
            command = [NOTEBOOK, killed.who, str(killed.of), dead, WHERE[count], PLACES[count], *network, *whens]
            done = execute(there, impatient, *command)
            if name == "home":
                assert done.returncode == -9, done.stderr
                assert "survived" not in done.stdout
            else:
                assert done.returncode == 0, done.stdout + done.stderr
                assert done.stdout.splitlines() == [f"survived {when}" for when in whens], done.stderr


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("rounds", "seed"), [(10, seed) for seed in range(2)])
def test_a_heal_is_struck(hosts: TwoHosts, impatient: str, numpy_site: Path, rounds: int, seed: int) -> None:
    """The new rank, its agent or its host goes at some moment of a heal, which ends; survivors keep their variables."""
    with numpy_framework(numpy_site):
        network = [hosts.prefix, str(hosts.folder), ",".join(hosts.names)]
        done = execute(hosts, impatient, HEALS, *network, str(rounds), str(seed), limit=1200)
    print(done.stdout)  # noqa: T201 - pytest -rP shows when each was struck, and what became of it
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("survived") == rounds


RANKS = [f"rank {rank}" for rank in range(4)]


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("where", "joins", "cells"),
    [
        # The kernel is on ring-a, rank 0 also elsewhere.
        ("ring-a:2,ring-b:2", "", ["rank 0", "rank 3", "agent 2", "host 3", "cut 2"]),
        ("ring-b:2,ring-a:2", "", ["rank 0", "rank 3", "agent 1", "host 0", "cut 1"]),
        ("ring-b:1,ring-a:2,ring-c:1", "", [*RANKS, "agent 3", "host 0", "host 3", "cut 3", "cut 0"]),
        ("ring-a:2,ring-b:2", "ring-a:1,ring-b:1", ["rank 3", "rank 0", "host 1"]),
        ("ring-a:1,ring-b:2,ring-c:1", "ring-a:1,ring-b:2", ["rank 3", "host 3", "cut 1"]),
    ],
    ids=["a b", "b a", "b a c", "slots join", "a host joins"],
)
def test_a_training_in_a_notebook(
    hosts: TwoHosts, three_hosts: TwoHosts, impatient: str, where: str, joins: str, cells: list[str]
) -> None:
    """The living train on, the dead are healed and those who join take part: weights of one process."""
    there = three_hosts if "ring-c" in where else hosts
    ranks = joins or where
    places = "".join(host[len("ring-")] * int(host.partition(":")[2]) for host in ranks.split(","))
    if joins:  # who joins gets the next numbers
        free = {host[len("ring-")]: int(host.partition(":")[2]) for host in where.split(",")}
        places += "".join(letter * (slots - places.count(letter)) for letter, slots in free.items())
    network = [there.prefix, str(there.folder), ",".join(there.names)]
    done = execute(there, impatient, TRAINING, where, places, *network, joins, *cells, limit=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"survived {cell}" for cell in (["joins"] if joins else []) + cells]
