"""Ranks in places that somebody else lends, here pods; a stand-in takes the place of kubectl, and runs on this host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.programs import grow
from harness.waiting import until
from ring_notebook import RunFailed, k8s
from ring_notebook.errors import ClusterError, RingError
from ring_notebook.launch.lent_places import LentPlaces, engine_at
from ring_notebook.launch.remote import relay
from ring_notebook.launch.remote.relay import Relay, Where, serve
from ring_notebook.notebook.cluster.cluster import Cluster

PODS = json.dumps(
    {"items": [{"metadata": {"name": f"train-{pod}"}, "status": {"podIP": "127.0.0.1"}} for pod in range(2)]}
)
# `kubectl exec --stdin POD -- COMMAND`, and `kubectl get pods ...`. As in a pod, what runs there is nobody's child.
KUBECTL = f"""\
    #!/bin/sh
    case $1 in
        get) echo '{PODS}' ;;
        exec) shift 4; shift; exec {sys.executable} "$@" ;;
    esac
"""


@pytest.fixture(autouse=True)
def _kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "kubectl"
    program.write_text(textwrap.dedent(KUBECTL))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def place() -> tuple[int, int, int, str | None]:
    """Rank, size, ranks of the host, and threads; reports the rank before."""
    from ring_notebook.api import basics
    from ring_notebook.rank.function_rank import report

    basics.init()
    report({"rank": basics.rank()})
    basics.barrier()
    return basics.rank(), basics.size(), basics.local_size(), os.environ.get("OMP_NUM_THREADS")


def test_functions_run_in_places_one_after_another() -> None:
    with LentPlaces(engine_at("k8s://app=train"), 2) as lent:
        assert lent.hosts == "127.0.1.1:2"
        assert lent.run(place, env={"OMP_NUM_THREADS": "3"}) == [(0, 2, 2, "3"), (1, 2, 2, "3")]
        with pytest.raises(ZeroDivisionError):
            lent.run(lambda: 1 // 0)
        reports: list[dict[str, int]] = []
        assert [rank for rank, *_ in lent.run(place, take=reports.append)] == [0, 1]
        assert sorted(report["rank"] for report in reports) == [0, 1]
        with pytest.raises(IndexError):
            lent.run(place, take=lambda _: [][0])


def end_one(what: str) -> None:
    """Rank 1 kills itself, its agent, or the place."""
    from ring_notebook.api import basics

    basics.init()
    if basics.rank() == 1:
        agent = psutil.Process(os.getppid())
        victim = {"rank": psutil.Process(), "agent": agent, "place": agent.parent()}[what]
        assert victim is not None
        victim.send_signal(signal.SIGKILL)
        time.sleep(60)  # until it is killed
    basics.barrier()


@pytest.mark.parametrize(
    ("what", "words"),
    [("rank", "rank 1 .* killed by SIGKILL"), ("agent", "its host is lost"), ("place", "its host is lost")],
)
def test_a_death_in_a_place_is_a_death_of_its_rank(what: str, words: str) -> None:
    with pytest.raises(RunFailed, match=words):
        k8s.run(end_one, "app=train", (what,))
    assert k8s.run(os.getpid, "app=train") != []  # nothing that was left is in the way


def test_too_few_places() -> None:
    with pytest.raises(RingError, match="expected 3 pods, one for each rank, got 2"):
        k8s.run(os.getpid, "app=train", num_proc=3)


@pytest.mark.parametrize(
    ("address", "words"),
    [("ssh://host", "cannot read 'ssh://host'"), ("nothing", "expected ray://ADDRESS")],
)
def test_an_engine_that_nobody_knows(address: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_at(address)


@pytest.mark.parametrize("options", [{"hosts": "a:2"}, {"keep": True}])
def test_what_an_engine_that_lends_places_excludes(options: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match=f"and {next(iter(options))} exclude each other"):
        Cluster(on="k8s://app=train", **options)


def test_a_cluster_in_places(without_torch: None) -> None:
    with Cluster(on="k8s://app=train") as cluster:
        assert (cluster.n, cluster.why) == (2, "places of Kubernetes")
        cluster.run("x = ring.rank()").wait()
        os.kill(cluster.status()[1].pid, signal.SIGKILL)
        assert cluster.heal() == [1]
        cluster.run("assert ring.size() == 2; ring.barrier()").wait()
        assert cluster.pull("x") == 0


class Processes:
    """An engine whose places are processes of this host. One more comes once the job has begun, another one later."""

    name, address, most, threads = "processes", "127.0.0.1", 9, 0

    def __init__(self, flag: Path) -> None:
        self._flag = flag  # a file which a rank makes when there is room for the last place
        self.begun: list[subprocess.Popen[bytes]] = []
        self._waits: list[threading.Thread] = []

    def begin(self, size: int, where: Where) -> None:
        code = f"from ring_notebook.launch.remote.relay import serve; serve(*{tuple(where)!r})"
        self.begun += [subprocess.Popen([sys.executable, "-c", code]) for _ in range(size)]

    def offer(self, count: int, where: Where) -> None:
        def come() -> None:
            until(self._flag.exists, 60)
            self.begin(count, where)

        self._waits.append(threading.Thread(target=come))
        self._waits[-1].start()

    def trouble(self) -> str:
        return ""

    def end(self) -> None:
        for one in (*self._waits, *self.begun):
            one.join(60) if isinstance(one, threading.Thread) else one.wait(30)


def test_a_job_grows_into_places_that_come_later(tmp_path: Path) -> None:
    flag = tmp_path / "begun"
    with LentPlaces(Processes(flag), 1, most=3) as lent:
        assert sorted(lent.run(grow, (str(flag), 3))) == [(0, 3), (1, 3), (2, 3)]


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Relay]:
    made = Relay("127.0.0.1", tmp_path)
    yield made
    made.close()


def test_a_stranger_is_no_place(waiting: Relay) -> None:
    where = waiting.where._replace(secret="a guess")
    asyncio.run(_connect_as_place(where))
    with socket.create_connection((where.address, where.port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")
    assert waiting.hosts() == []


async def _connect_as_place(where: Where) -> None:
    reader, writer = await asyncio.open_connection(where.address, where.port, ssl=relay._tls(server=False))
    writer.write(relay._proof(where.secret, writer, server=False))
    assert await reader.read() == b""  # it proves nothing to a stranger
    writer.close()


def test_a_place_runs_nothing_for_another_relay(tmp_path: Path) -> None:
    """Somebody who has taken the port of the relay cannot have a place run a command."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    program = f"from {relay.__name__} import serve; serve('127.0.0.1', {port}, 'the secret')"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as served:
        with listener.accept()[0] as channel, relay._tls(server=True).wrap_socket(channel, server_side=True) as tls:
            tls.recv(relay._PROOF)
            tls.sendall(b"0" * relay._PROOF)
            assert tls.recv(100) == b""  # it asks for nothing
        assert served.stderr is not None
        assert "does not know the secret of this place" in served.stderr.read()
    listener.close()


def test_nobody_between_a_place_and_its_relay(waiting: Relay) -> None:
    """Two TLS sessions have two secrets: what a place proves in one of them is no proof in the other."""
    forwarded: list[bytes] = []

    async def forward() -> None:
        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            theirs, ours = await asyncio.open_connection(
                waiting.where.address, waiting.where.port, ssl=relay._tls(server=False)
            )
            ours.write(await reader.readexactly(relay._PROOF))
            forwarded.append(await theirs.read())
            ours.close()
            writer.close()

        server = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=relay._tls(server=True))
        where = waiting.where._replace(port=server.sockets[0].getsockname()[1])
        await asyncio.get_running_loop().run_in_executor(None, _served, where)
        server.close()

    asyncio.run(forward())
    assert forwarded == [b""]
    assert waiting.hosts() == []


def _served(where: Where) -> None:
    with contextlib.suppress(RingError, ssl.SSLError):
        serve(*where)


def test_a_remote_shell_says_why_it_ends(waiting: Relay) -> None:
    done: Any = subprocess.run(
        [*shlex.split(waiting.shell), "10.0.0.9", "true"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "no place is left on 10.0.0.9" in done.stderr) == (1, True), done.stderr
