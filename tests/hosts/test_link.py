"""The two hosts are two: names, shared memory and the link that MPI's messages take."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran
from harness.two_hosts import NAMES, TwoHosts, two_hosts

HELLO = """
import os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
host = world.Split_type(MPI.COMM_TYPE_SHARED)
data = bytearray(1 << 20) if world.rank == 0 else None
received = world.bcast(data, root=0)
os.write(1, f"{world.rank} {world.size} {socket.gethostname()} {host.size} {len(received)}\\n".encode())
"""


def test_ranks_are_on_two_hosts_and_their_messages_cross_the_link(hosts: TwoHosts) -> None:
    before = hosts.bytes_sent(0)
    lines = sorted(hosts.run(["-c", HELLO]).splitlines())
    assert lines == ["0 2 ring-a 1 1048576", "1 2 ring-b 1 1048576"]
    assert 1 << 20 <= hosts.bytes_sent(0) - before < 2 << 20


@pytest.mark.slow
def test_ranks_of_one_host_share_it(hosts: TwoHosts) -> None:
    lines = sorted(hosts.run(["-c", HELLO], per_host=2).splitlines())
    assert lines == [f"{rank} 4 {name} 2 1048576" for rank, name in enumerate(["ring-a", "ring-a", "ring-b", "ring-b"])]


def test_the_link_has_its_rate_and_goes_away(hosts: TwoHosts) -> None:
    assert hosts.prefix in namespaces()
    timed = HELLO.replace("1 << 20", "4 << 20").replace("data =", "import time; began = time.time(); data =", 1)
    with two_hosts("80mbit") as slow:
        said = slow.run(["-c", timed + "os.write(2, f'took {time.time() - began}'.encode())"])
        assert slow.prefix in namespaces()
    took = max(float(piece.split()[0]) for piece in said.split("took ")[1:])
    assert 0.35 < took < 60  # 4 MiB at 10 MB/s, less the burst that passes at once
    assert slow.prefix not in namespaces()


def namespaces() -> str:
    return ran(["ip", "netns", "list"], check=True).stdout


@pytest.mark.slow
def test_a_slow_link_is_named(hosts: TwoHosts, tmp_path: Path) -> None:
    """The link of the second host carries a tenth of the other's, and both ranks wait for it."""
    program = tmp_path / "train.py"
    program.write_text(
        "import time, torch, ring_notebook.torch as ring\n"
        "ring.init()\n"
        "gradients, ends = torch.ones(500_000), time.monotonic() + 6\n"
        "for step in range(1000):\n"
        "    ring.allreduce_(gradients)\n"
        "    ring.log(step, loss=1.0)\n"
        "    if ring.broadcast_object(time.monotonic() > ends): break\n"
    )
    where = ["-np", "2", "-H", f"{NAMES[0]}:1,{NAMES[1]}:1"]
    with hosts.limited(1, "100mbit"):
        said = hosts.on_first(["sh", "-c", '"$@"', "sh", *RINGRUN, *where, str(program)], 90.0)
    assert "ringrun: the link from the host of rank 1 to that of rank 0 carries " in said
