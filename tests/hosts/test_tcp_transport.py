"""Ranks of two hosts that our own supervisor has started: over TCP connections of ours, without MPI."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.programs import ran
from harness.two_hosts import ADDRESSES, TwoHosts
from hosts.test_over_ssh import BOTH, assert_nothing_is_left, job_that_waits, ringrun

pytestmark = pytest.mark.usefixtures("forked_on_hosts")
PROGRAM = Path(__file__).with_name("collectives.py")
FACE = "import sys; from ring_notebook.api.basics import init; from ring_notebook.api.basics import barrier"
BESIDE = """
import os, sys, torch
import ring_notebook.torch as ring
ring.init()
rank = ring.rank()
assert ring.size() == 4 and ring.local_size() == 2
assert ring.allreduce(torch.ones(3), op=ring.Sum).tolist() == [4.0] * 3
assert "mpi4py.MPI" not in sys.modules
for sets in ([0, 2], [3, 1]), ([1, 2], [3, 0]), ([0, 1], [2, 3]):
    (members,) = (one for one in sets if rank in one)
    for _ in range(3):
        ring.shutdown()
        ring.init(members)
        assert members[ring.rank()] == rank
        assert ring.allgather(torch.tensor([rank])).tolist() == members
ring.shutdown()
ring.init()
from mpi4py import MPI
assert MPI.COMM_WORLD.allgather(rank) == [0, 1, 2, 3] and MPI.COMM_WORLD.rank == rank
ring.allreduce(torch.ones(1 << 20))
os.write(1, b"all is well\\n")
"""
WAITS = """
import os, time, torch
import ring_notebook.torch as ring
ring.init()
ring.allreduce(torch.ones(3))
os.write(1, b"ready\\n")
time.sleep(100)
"""


@pytest.mark.slow
def test_every_collective(hosts: TwoHosts) -> None:
    said = ringrun(hosts, *BOTH, sys.executable, str(PROGRAM), "over the link")
    assert said.count("on 2 hosts: all is well") == 4, said


@pytest.mark.slow
def test_subsets_and_mpi_beside_it(hosts: TwoHosts) -> None:
    said = ringrun(hosts, *BOTH, sys.executable, "-c", BESIDE)
    assert said.count("all is well") == 4, said


@pytest.mark.slow
def test_ranks_that_are_told_to_use_mpi(hosts: TwoHosts) -> None:
    code = f"{FACE}; init(); barrier(); print('mpi4py.MPI' in sys.modules)"
    said = ringrun(hosts, *BOTH, sys.executable, "-c", code, shell='RING_TRANSPORT=mpi "$@"')
    assert said.split("code")[0].split() == ["True"] * 4, said


@pytest.mark.slow
def test_what_listens_and_what_it_says(hosts: TwoHosts) -> None:
    """One port of each rank, on the address of the link; it tells a stranger nothing, and the job goes on."""
    with job_that_waits(hosts, program=WAITS):
        for place, address, other in (("a", ADDRESSES[0], "b"), ("b", ADDRESSES[1], "a")):
            shown = in_namespace(hosts, place, "ss", "-Hlntup").splitlines()
            ours = [line.split()[4] for line in shown if '"sshd"' not in line]
            assert len(ours) == 2, shown
            for name in ours:
                assert name.startswith(f"{address}:"), shown
                code = STRANGER.format(address=address, port=int(name.rpartition(":")[2]))
                assert in_namespace(hosts, other, sys.executable, "-c", code) == "b''\n"
    assert_nothing_is_left(hosts)


STRANGER = """
import socket
with socket.create_connection(({address!r}, {port}), 30) as channel:
    said = b""
    try:
        channel.sendall(b"cmd=init pmi_version=1\\n" * 10)
        while piece := channel.recv(100): said += piece
    except ConnectionError:  # it has hung up
        pass
    print(said)
"""


def in_namespace(hosts: TwoHosts, place: str, *command: str) -> str:
    return ran(["ip", "netns", "exec", f"{hosts.prefix}-{place}", *command], check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.environ['RING_RANK'] == '3' and sys.exit(0); init()", "rank 3 exited .* before all ranks"),
        (
            "from ring_notebook.rank import tcp_connections; tcp_connections._SECONDS_TO_CONNECT = 1.0; init(); "
            "barrier()",
            r"link: rank \d cannot be reached at 127.0.0.1, port \d+, within 1 s .*RING_INTERFACE",
        ),
    ],
    ids=["a rank exits", "no way"],
)
def test_ranks_that_do_not_find_each_other(hosts: TwoHosts, code: str, words: str) -> None:
    program = f"{FACE}; {code}"
    interface = "RING_INTERFACE=lo " if "SECONDS" in code else ""
    said = ringrun(hosts, *BOTH, sys.executable, "-c", program, shell=f'{interface}"$@"')
    assert not said.endswith("code 0\n"), said

    assert re.search(words, said), said
