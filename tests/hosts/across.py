"""What a notebook does with a cluster on two hosts; a program, run on the first of them as ``across.py STEP``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from harness.shares import agreed_seconds
from harness.two_hosts import ADDRESSES, NAMES
from harness.waiting import until
from ring_notebook.errors import ClusterError, CollectiveAborted, MPIMissingError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.cluster.synced_folder import SyncedFolder
from ring_notebook.notebook.magics.commands.ring_heal import heal
from ring_notebook.notebook.magics.commands.ring_restart import restart
from ring_notebook.notebook.magics.commands.ring_start import start
from ring_notebook.notebook.magics.commands.ring_stop import stop
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.session.session import Session

if TYPE_CHECKING:
    from notebook.endurance.equal_steps import Training

HOSTS = f"{NAMES[0]}:2,{NAMES[1]}:2"
SAYS = """
import socket
from ring_notebook.api.basics import cross_rank, local_rank, rank
print(f"rank {rank()} on {socket.gethostname()}, local {local_rank()}, cross {cross_rank()}")
"""
TRAINS = f"""
import torch
torch.manual_seed(ring.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
model, optimizer, loader = ring.prepare(model, optimizer, loader)
for x in ring.track(loader):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    ring.log(loss=loss)
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
{SAYS}"""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("deaf")
time.sleep(2)
if ring.rank() == 3: os.kill(os.getpid(), 9)
time.sleep(600)
"""
WAITS = """
import os, time
try:
    while not os.path.exists(flag):
        time.sleep(0.01)
except KeyboardInterrupt:
    assert ring.rank() == 3
    open(flag, "w").close()
"""
HELD_BACK = """
import os, signal, subprocess, threading
for number in range(2):  # the first step of a run compares the ranks
    optimizer.zero_grad()
    loss_of(len(made), rank).backward()
    if number == 0:
        optimizer.step()
ring.barrier()
if rank == 0:
    subprocess.run(["ip", "route", "add", "blackhole", away], check=True)
    subprocess.Popen(["sh", "-c", f"sleep 1.5; ip route del blackhole {away}"])
elif rank == 2:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
with optimizer.skip_synchronize():
    optimizer.step()
"""
PLACES = [f"rank {rank} on {NAMES[rank // 2]}, local {rank % 2}, cross {rank // 2}\n" for rank in range(4)]


def trains(cluster: Cluster) -> None:
    """A cell trains on both hosts, every rank ends with the same weights, and what they print and log arrives here."""
    run = cluster.run(TRAINS).wait()
    assert sorted(piece.text for piece in run.log.view().output) == PLACES
    assert len({tuple(cluster.pull("weights", rank)) for rank in range(4)}) == 1
    assert len(run.metrics) == 16


def has_mpi(cluster: Cluster) -> None:
    """One rank alone has all ranks in MPI, beside our own transport."""
    cluster.run("from mpi4py import MPI\nranks = MPI.COMM_WORLD.size", ranks=[3]).wait()
    assert cluster.pull("ranks", 3) == 4
    cluster.run("from ring_notebook.core import world\nlink = type(world.prepare_host().link).__name__").wait()
    assert cluster.pull("link", 0) == "TcpLink"


def syncs(cluster: Cluster, folder: Path) -> None:
    """Modules in a folder that the other host does not see are imported and reloaded there; what changed travels."""
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("# unchanged\n")
    cluster._synced_folder = SyncedFolder(folder)
    cell = "import pkg.module, socket\nsaid = [pkg.module.VALUE, socket.gethostname()]"
    for value in (1, 2):
        (folder / "pkg" / "module.py").write_text(f"VALUE = {value}\n")
        synced = cluster.sync()
        assert synced.sent == len(f"VALUE = {value}\n") + (len("# unchanged\n") if value == 1 else 0), synced
        cluster.run(cell).wait()
        assert [cluster.pull("said", rank) for rank in range(4)] == [[value, NAMES[rank // 2]] for rank in range(4)]
    assert not cluster.sync().changed
    (folder / "pkg" / "module.py").unlink()
    assert cluster.sync().changed == ("pkg/module.py",)
    cluster.run("import pkg, os\nthere = os.listdir(pkg.__path__[0])").wait()
    assert "module.py" not in cluster.pull("there", 3)


def ends(run: Run, error: type[BaseException], message: str) -> str:
    """The run ends, with this error."""
    with pytest.raises(error, match=message) as caught:
        run.wait()
    return str(caught.value)


def allocated() -> None:
    """Without a word from the user the cluster takes the hosts of the batch system's allocation."""
    session = Session()
    started = start(session)
    assert f"Started 4 engines (Slurm job 17: 4 slots on {', '.join(NAMES)}" in started
    cluster = session.require()
    assert [engine.host for engine in cluster.status()] == [NAMES[0]] * 2 + [NAMES[1]] * 2
    run = cluster.run(SAYS).wait()
    assert sorted(piece.text for piece in run.log.view().output) == PLACES
    restart(session, 3)
    assert cluster.why == f"as asked for, in Slurm job 17: 4 slots on {', '.join(NAMES)}"
    assert [engine.host for engine in cluster.status()] == [NAMES[0]] * 2 + [NAMES[1]]
    stop(session)


def slow_link(cluster: Cluster) -> None:
    """Moving takes longer than all else that ranks do, and the panel and the timeline say the same."""
    source = "import torch\nfor step in range(150):\n    ring.allreduce(torch.ones(1 << 19))\n    ring.log(step=step)"
    run = cluster.run(source, options={"timeline": True}).wait()
    assert all(max(own, key=own.__getitem__) == "moving" for own in agreed_seconds(run))


def late_interrupt(cluster: Cluster, over: Run, flag: str) -> None:
    """An interrupt of a run that is over does not stop the next one; nor does a look at its stacks."""
    waits = cluster.run(f"flag = {flag!r}\n{WAITS}")
    until(lambda: [status.line for status in waits.log.statuses().values()].count(6) == 4)
    assert [one.trouble for one in cluster.stacks()] == [""] * 4
    engines = cluster._connected()
    engines.interrupt(over.log.run, [0, 1, 2])
    engines.interrupt(waits.log.run, [3])  # goes the way of that to rank 2, and so arrives after it
    waits.wait()


def everything() -> None:
    """Start, train, interrupt, fail, die, heal, train again, stop. `allocated` starts a cluster again."""
    session = Session()
    assert "Started 4 engines" in start(session, hosts=HOSTS)
    cluster = session.require()
    assert [engine.host for engine in cluster.status()] == [NAMES[0]] * 2 + [NAMES[1]] * 2
    trains(cluster)
    slow_link(cluster)
    has_mpi(cluster)
    with TemporaryDirectory(dir="/dev/shm") as folder:  # each host has its own
        syncs(cluster, Path(folder))

    run = cluster.run("import time\nif ring.rank() == 3: time.sleep(100)\nring.allreduce(torch.ones(4))")
    until(lambda: [status.line for _, status in sorted(run.log.statuses().items())] == [3, 3, 3, 2])
    run.stop()
    ends(run, KeyboardInterrupt, "stopped at line")
    ends(cluster.run("if ring.rank() == 2: 1 / 0\nring.barrier()"), ZeroDivisionError, "division")
    ends(cluster.run("if ring.rank() != 2: ring.barrier()"), CollectiveAborted, "rank 2")
    trains(cluster)

    with TemporaryDirectory() as folder:
        late_interrupt(cluster, run, str(Path(folder, "flag")))
    assert [one.trouble for one in cluster.stacks()] == [""] * 4
    dies = "import os, sys\nif ring.rank() == 3:\n    print('last words', file=sys.__stderr__, flush=True)\n"
    said = ends(
        cluster.run(f"{dies}    os.kill(os.getpid(), 9)\nring.barrier()"), ClusterError, f"rank 3 on {NAMES[1]}"
    )
    assert "SIGKILL" in said
    assert "last words" in said
    assert cluster.living == [0, 1, 2]
    assert "Started rank 3 again" in said_by(lambda: heal(session))
    assert [cluster.variables("weights")[rank].keys() for rank in range(4)] == [{"weights"}] * 3 + [set()]
    assert [engine.host for engine in cluster.status()] == [NAMES[0]] * 2 + [NAMES[1]] * 2
    trains(cluster)
    with pytest.raises(MPIMissingError, match="the cluster has other ranks than at its start, and MPI cannot"):
        cluster.run("from mpi4py import MPI; MPI.COMM_WORLD.size", ranks=[0]).wait()

    ends(cluster.run("import os\nif ring.rank() > 1: os.kill(os.getpid(), 9)\nring.barrier()"), ClusterError, "rank")
    until(lambda: cluster.living == [0, 1])
    cluster.run("ring.barrier(); print(len(weights))", ranks=[0, 1]).wait()
    assert cluster.heal() == [2, 3]
    trains(cluster)
    assert cluster.heal([0]) == [0]
    trains(cluster)

    run = cluster.run(STUBBORN)
    until(lambda: sum(piece.text.count("deaf") for piece in run.log.view().output) == 4)
    while not run.done:  # the engine that the stop is meant for may just have gone
        run.stop()
        time.sleep(0.001)
    ends(run, ClusterError, f"rank 3 on {NAMES[1]}")
    stop(session)


def said_by(call: Callable[[], object]) -> str:
    """What it prints."""
    with redirect_stdout(StringIO()) as printed:
        call()
    return printed.getvalue()


def vanishes() -> None:
    """The link to the other host is cut in a run, and mended before the ranks there are healed."""
    with Cluster(hosts=HOSTS) as cluster:
        cluster.run("mine = ring.rank()").wait()
        run = cluster.run("while True: ring.barrier()")
        until(lambda: len(run.log.statuses()) == 4)
        subprocess.run(["ip", "link", "set", "link0", "down"], check=True)
        try:
            with pytest.raises(ClusterError, match=f"rank [23] on {NAMES[1]} failed: its host is lost"):
                run.wait()
            until(lambda: cluster.living == [0, 1])
            cluster.run("ring.barrier(); assert mine == ring.rank()", ranks=[0, 1]).wait()
        finally:
            subprocess.run(["ip", "link", "set", "link0", "up"], check=True)
        assert cluster.heal() == [2, 3]
        assert [cluster.pull("mine", rank) for rank in (0, 1)] == [0, 1]
        trains(cluster)


def grows() -> None:
    """Engines on both hosts join two others, one dies and is healed, one is ended; the variables of the others stay."""
    adds = "total = sum(ring.allgather_object(1))"
    with Cluster(2, f"{NAMES[0]}:1,{NAMES[1]}:1") as cluster:
        cluster.run("mine = ring.rank()").wait()
        with pytest.raises(ClusterError, match="4 ranks need 4 slots, the hosts have 2 slots"):
            cluster.grow(4)
        assert cluster.grow(4, HOSTS) == [2, 3]
        assert [engine.host for engine in cluster.status()] == [*NAMES, *NAMES]
        cluster.run(f"{adds}\nfrom ring_notebook.api.basics import local_size").wait()
        cluster.run("assert total == local_size() * 2 == 4").wait()
        ends(cluster.run("import os\nif ring.rank() == 3: os._exit(3)\nring.barrier()"), ClusterError, "rank 3")
        assert cluster.heal() == [3]
        cluster.run(f"{adds}\nassert total == 4").wait()
        assert cluster.shrink(3) == [3]
        cluster.run(f"{adds}\nassert total == 3").wait()
        assert [cluster.pull("mine", rank) for rank in (0, 1)] == [0, 1]


def killed() -> None:
    """A kernel is killed while its ranks compute."""
    code = f"""
import time
from ring_notebook.notebook.cluster.cluster import Cluster
cluster = Cluster(hosts={HOSTS!r}).start()
run = cluster.run("while True: pass")
while len(run.log.statuses()) < 4:
    time.sleep(0.05)
print("running", flush=True)
time.sleep(600)
"""
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == "running\n"
    kernel.kill()
    kernel.wait()


def wrong() -> None:
    """Hosts that cannot be used, and too few slots, are one message each, and no cluster is left."""
    for n, where, words in (
        (None, f"{NAMES[0]}:1,ring-nowhere:1", "Could not resolve hostname ring-nowhere"),
        (None, f"{NAMES[0]}:1,10.77.0.99:1", "No route to host"),
        (3, f"{NAMES[0]}:1,{NAMES[1]}:1", "3 ranks need 3 slots, the hosts have 2 slots"),
    ):
        session = Session()
        with pytest.raises(ClusterError) as caught:
            start(session, n, where)
        said = str(caught.value)
        assert words in said, said
        assert said.count(words) == 1, said
        assert session.cluster is None


def held_back(cluster: Cluster, training: Training) -> None:
    """What the first host sends arrives after the second has waited long enough for its part of a commit.

    So only the first makes the step, and the next one finds it. The route leads nowhere, in one direction.
    """
    run = cluster.run(f"away = {ADDRESSES[1]!r}\n{HELD_BACK}")
    until(lambda: run.done)
    assert isinstance(run.error, KeyboardInterrupt), run.error
    counts = [len(cluster.pull("made", rank)) for rank in range(4)]
    assert counts == [counts[3] + 1] * 2 + [counts[3]] * 2
    assert "ranks 2-3 differ from rank 0" in training.run(steps=1)


def parted(times: int, *ends: str, names: Sequence[str] = ("sgd", "adam")) -> None:
    """A training that is interrupted, fails and loses ranks again and again has made the same steps on both hosts."""
    from notebook.endurance.equal_steps import Training  # imports torch

    with Cluster(hosts=HOSTS) as cluster:
        for name in names:
            cluster.run("%reset -f").wait()
            training = Training(cluster, name)
            for number in range(times):
                training.run(ends[number % len(ends)])
                training.check()
            training.run(steps=2)
            training.check_against_one_process()
            if name == "sgd":
                held_back(cluster, training)


if __name__ == "__main__":
    {
        "allocated": allocated,
        "everything": everything,
        "grows": grows,
        "killed": killed,
        "vanishes": vanishes,
        "wrong": wrong,
        "parted": lambda: parted(6, "is interrupted", "raises", "disagrees"),
        "compressed": lambda: parted(4, "is killed", "raises", names=("int8", "powersgd(2)", "auto")),
    }[sys.argv[1]]()
