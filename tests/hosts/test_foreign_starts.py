"""Ranks of two hosts that nothing of ours has started: they have an address and a secret."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from harness.sniffer import recorded
from harness.two_hosts import ADDRESSES, NAMES, TwoHosts
from harness.waiting import LIMIT

DRIVER = """
import sys
from ring_notebook import RendezvousServer
with RendezvousServer(4, sys.argv[1]) as server:
    print(server.variables["RING_RENDEZVOUS"], server.variables["RING_RENDEZVOUS_SECRET"], flush=True)
    sys.stdin.read()
"""
SUM = """
import os, sys
from ring_notebook.api.basics import cross_rank, init, local_rank, rank, size
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core import world
from ring_notebook.core.communicator import ReduceOp
init()
total = allreduce_numbers([rank() + 1], ReduceOp.SUM, "numbers")
link = type(world.prepare_host().link).__name__
os.write(1, f"{rank()} of {size()}, local {local_rank()}, cross {cross_rank()}, sum {total}, {link}\\n".encode())
"""
TRAIN = """
import sys, torch, torch.distributed as dist
dist.init_process_group("ring")
ones = torch.ones(1 << 20)
dist.all_reduce(ones)
assert (ones == 4).all() and "mpi4py.MPI" not in sys.modules
from ring_notebook.core import world
print(f"rank {dist.get_rank()} has {type(world.prepare_host().link).__name__}", flush=True)
if "killed" in sys.argv and dist.get_rank() == 3:
    import os; os.kill(os.getpid(), 9)
dist.barrier()
"""


@contextmanager
def start(hosts: TwoHosts, host: str, *command: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process on ``host``, whose secrets are on no command line."""
    process = subprocess.Popen(
        [str(hosts.folder / "launcher"), host, f"exec {shlex.join(command)}"],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def secret() -> dict[str, str]:
    return {"RING_RENDEZVOUS_SECRET": secrets.token_hex(32)}


@pytest.mark.parametrize("given", [False, True], ids=["ranks are assigned", "ranks are given"])
def test_plain_processes(hosts: TwoHosts, given: bool) -> None:
    """They come in any order, and count from 0 host by host."""
    with start(hosts, NAMES[0], sys.executable, "-c", DRIVER, f"{ADDRESSES[0]}:0", env={}) as driver:
        assert driver.stdout is not None
        where, key = driver.stdout.readline().split()
        job = {"RING_RENDEZVOUS": where, "RING_RENDEZVOUS_SECRET": key}
        said = []
        with (
            start(hosts, NAMES[0], sys.executable, "-c", SUM, env=job | ({"RING_RANK": "3"} if given else {})) as one,
            start(hosts, NAMES[1], sys.executable, "-c", SUM, env=job | ({"RING_RANK": "1"} if given else {})) as two,
            start(hosts, NAMES[0], sys.executable, "-c", SUM, env=job | ({"RING_RANK": "2"} if given else {})) as three,
            start(hosts, NAMES[1], sys.executable, "-c", SUM, env=job | ({"RING_RANK": "0"} if given else {})) as four,
        ):
            said = [process.communicate(timeout=LIMIT)[0] for process in (one, two, three, four)]
    found = [
        tuple(map(int, re.findall(r"(\d) of 4, local (\d), cross (\d), sum \[10\], TcpLink", text)[0])) for text in said
    ]
    assert sorted(rank for rank, *_ in found) == [0, 1, 2, 3], said
    if given:
        assert found == [(3, 1, 1), (1, 1, 0), (2, 0, 1), (0, 0, 0)]
    for here, there in ((0, 2), (1, 3)):  # processes of one host
        assert abs(found[here][0] - found[there][0]) == 1, said
        assert {found[here][1], found[there][1]} == {0, 1}
        assert found[here][2] == found[there][2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "killed"])
def test_torchrun_on_both(hosts: TwoHosts, tmp_path: Path, how: str) -> None:
    """`torchrun` on each host as ever, and two variables: rank 0 serves. A rank that dies ends the job."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    port = 29410 + bool(how)
    env = {"RING_RENDEZVOUS": f"{NAMES[0]}:{port}", "GLOO_SOCKET_IFNAME": "link0", **secret()}
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--max-restarts", "0"]
    job = [*options, "--rdzv-endpoint", f"{NAMES[0]}:{port + 10}", str(script), how]
    command = [sys.executable, "-m", "torch.distributed.run", *job]
    with start(hosts, NAMES[0], *command, env=env) as one, start(hosts, NAMES[1], *command, env=env) as two:
        said = [process.communicate(timeout=LIMIT)[0] for process in (one, two)]
    assert sorted(re.findall(r"rank (\d) has TcpLink", "".join(said))) == ["0", "1", "2", "3"], said
    assert [bool(process.returncode) for process in (one, two)] == [bool(how)] * 2, said


def test_a_rank_that_is_killed_while_another_waits_for_it(hosts: TwoHosts) -> None:
    """No supervisor tells the others: its connection does."""
    env = {"RING_RENDEZVOUS": f"{NAMES[0]}:29440", "RING_SIZE": "2", **secret()}
    waits = SUM.replace(
        "init()\ntotal", "init()\nos.write(1, b'begun\\n')\nif rank(): import time; time.sleep(100)\ntotal"
    )
    with (
        start(hosts, NAMES[0], sys.executable, "-c", waits, env={**env, "RING_RANK": "0"}) as one,
        start(hosts, NAMES[1], sys.executable, "-c", waits, env={**env, "RING_RANK": "1"}) as two,
    ):
        assert two.stdout is not None
        assert two.stdout.readline() == "begun\n"
        two.send_signal(signal.SIGKILL)
        said = one.communicate(timeout=LIMIT)[0]
    # Closed or reset, as the other host's kernel has it.
    assert re.search("link: rank 1 has (closed its connection: its process has ended|gone)", said), said


RECORDED = """
import os, sys, time
from pathlib import Path
from ring_notebook.api.basics import init, rank
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core import world
from ring_notebook.core.communicator import ReduceOp
init()
assert allreduce_numbers([rank() + 1], ReduceOp.SUM, "numbers") == [10]
print("key", world.prepare_host().rendezvous.key.hex(), flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
print(rank(), allreduce_numbers([rank() + 1], ReduceOp.SUM, "numbers"))
"""


@pytest.mark.slow
def test_a_recorded_start_is_worth_nothing(hosts: TwoHosts, tmp_path: Path) -> None:
    """Of ranks that get an address and a secret, as the pods of a job do: nothing to read, and nothing to say again."""
    env = {"RING_RENDEZVOUS": f"{NAMES[0]}:29450", "RING_SIZE": "4", **secret()}
    program = [sys.executable, "-c", RECORDED, str(tmp_path / "go on")]
    spaces = [f"{hosts.prefix}-{host}" for host in "ab"]
    with ExitStack() as stack:
        with recorded(spaces) as wire:
            ranks = [
                stack.enter_context(start(hosts, NAMES[rank // 2], *program, env={**env, "RING_RANK": str(rank)}))
                for rank in range(4)
            ]
            keys = [process.stdout.readline().split()[-1] for process in ranks if process.stdout]
        (key,) = set(keys)
        given = env["RING_RENDEZVOUS_SECRET"]
        secrets = [form for one in (key, given) for form in (one.encode(), bytes.fromhex(one))]
        assert wire.holding(b"\x16\x03"), "handshakes of TLS, which show that this records"
        answers = [wire.replayed(space, spaces[1]) for space in spaces]
        assert sum(answer.connections for answer in answers) >= len(wire.flows) > 4
        for one in secrets:
            assert len(one) >= 32
            assert not wire.holding(one)
            assert not [answer for answer in answers if one in answer.heard]
        (tmp_path / "go on").touch()
        assert [process.communicate(timeout=LIMIT)[0] for process in ranks] == [f"{rank} [10]\n" for rank in range(4)]
