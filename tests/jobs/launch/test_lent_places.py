"""Ranks in places that somebody else lends, here pods; a stand-in takes the place of kubectl, and runs on this host."""

from __future__ import annotations

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
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from engines.programs import grow
from harness.programs import executable, ran
from harness.waiting import LIMIT, until
from ring_notebook import RunFailed, k8s
from ring_notebook.errors import ClusterError, RingError
from ring_notebook.launch.lent_places import LentPlaces, engine_at
from ring_notebook.launch.remote.relay import Relay, Where
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.rank.secure_streams import Identity, tls_context

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
    executable(tmp_path / "kubectl", textwrap.dedent(KUBECTL))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def place() -> tuple[int, int, int, str | None]:
    """Rank, size, ranks of the host, and threads; reports the rank before."""
    from ring_notebook.api import basics
    from ring_notebook.rank.function_rank import report

    basics.init()
    report({"rank": basics.rank()})
    basics.barrier()
    return basics.rank(), basics.size(), basics.local_size(), os.environ.get("OMP_NUM_THREADS")


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("rank", "rank 1 .* killed by SIGKILL"),
        ("agent", "its place is lost: the process there has ended"),
        ("place", r"its place is lost: Kubernetes: the process in pod train-[01] has ended"),
    ],
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
    [
        ("ssh://host", "cannot read 'ssh://host'"),
        ("nothing", "expected ray://HOST:PORT, dask://HOST:PORT, spark or k8s://SELECTOR"),
    ],
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
        self.begun: list[subprocess.Popen[str]] = []
        self._waits: list[threading.Thread] = []

    def begin(self, size: int, relay: Relay) -> None:
        for _ in range(size):
            self.begun.append(subprocess.Popen([sys.executable, "-c", k8s._SERVE], stdin=PIPE, stdout=PIPE, text=True))
            k8s._introduce(self.begun[-1], relay)

    def offer(self, count: int, relay: Relay) -> None:
        def come() -> None:
            until(self._flag.exists)
            self.begin(count, relay)

        self._waits.append(threading.Thread(target=come))
        self._waits[-1].start()

    def trouble(self) -> str:
        return ""

    def end(self) -> None:
        for one in (*self._waits, *self.begun):
            one.join(LIMIT) if isinstance(one, threading.Thread) else one.communicate(timeout=LIMIT)


@pytest.mark.slow
def test_a_job_grows_into_places_that_come_later(tmp_path: Path) -> None:
    flag = tmp_path / "begun"
    with LentPlaces(Processes(flag), 1, most=3) as lent:
        assert sorted(lent.run(grow, (str(flag), 3))) == [(0, 3), (1, 3), (2, 3)]


@pytest.fixture
def waiting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Relay]:
    made = Relay(getattr(request, "param", "127.0.0.1"), tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("waiting", ["127.0.0.1", "::1"], indirect=True)
def test_who_knows_only_what_the_engine_has_carried_is_no_place(waiting: Relay) -> None:
    """All that crosses the network before a place connects: the certificates of the relay and of the places."""
    place = Identity.new()
    waiting.admit(place.certificate)
    stranger = Identity.new()
    tls = tls_context(stranger, [waiting.where.certificate], server=False)
    address = waiting.where[:2]
    with socket.create_connection(address) as plain, tls.wrap_socket(plain) as channel:
        assert channel.recv(1) == b""
    with socket.create_connection(address) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")
    assert waiting.hosts() == []
    theirs = tls_context(place, [waiting.where.certificate], server=False)
    with socket.create_connection(address) as plain, theirs.wrap_socket(plain) as channel:
        channel.sendall(b'{"host": "h", "devices": ""}\n')
        until(lambda: [host.slots for host in waiting.hosts()] == [1])


def test_a_place_runs_nothing_for_another_relay() -> None:
    """Somebody who has taken the port of the relay cannot have a place run a command."""
    thief = Identity.new()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen([sys.executable, "-c", k8s._SERVE], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as served,
    ):
        assert served.stdin is not None
        assert served.stdout is not None
        assert served.stderr is not None
        place = json.loads(served.stdout.readline())
        where = Where(*listener.getsockname(), Identity.new().certificate)
        served.stdin.write(f"{json.dumps(where)}\n")
        served.stdin.flush()
        tls = tls_context(thief, [place], server=True)
        with listener.accept()[0] as channel, pytest.raises(ssl.SSLError):
            tls.wrap_socket(channel, server_side=True)
        assert "is not the relay of this place" in served.stderr.read()


def test_a_remote_shell_says_why_it_ends(waiting: Relay) -> None:
    done: Any = ran([*shlex.split(waiting.shell), "10.0.0.9", "true"])
    assert (done.returncode, "no place is left on 10.0.0.9" in done.stderr) == (1, True), done.stderr
