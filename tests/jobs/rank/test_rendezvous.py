"""How a rank finds the others: over a socket that it inherits, at an address that it is given, and under torchrun."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.programs import ran, ringrun
from harness.waiting import LIMIT, until
from ring_notebook import RendezvousServer
from ring_notebook.errors import RingError
from ring_notebook.launch.connections.pmi import PmiServer
from ring_notebook.rank import serving
from ring_notebook.rank.rendezvous import JOB, Rendezvous, is_offered
from ring_notebook.rank.secure_streams import Tls, tls_of_secret

SUM = """
import os, sys
from ring_notebook.api.basics import init, local_rank, rank, size
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core.communicator import ReduceOp
def train():
    init()
    total = allreduce_numbers([rank() + 1], ReduceOp.SUM, "numbers")
    os.write(1, f"{rank()} of {size()}, sum {total}\\n".encode())
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None]) -> None:
    """No variables of another job, and a short limit."""
    for name in (*JOB, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    settings(start_timeout=30)


def results_of(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each of the calls returns or raises, made by a thread each."""
    results: list[Any] = [None] * len(calls)

    def make(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=make, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a rank hangs"
    return results


# An inherited socket.


def supervised(size: int, call: Callable[[Rendezvous], Any]) -> list[Any]:
    """What ``call`` returns or raises on each of ``size`` ranks, which a supervisor connects."""
    server = PmiServer("job", [0] * size)
    pairs = [socket.socketpair() for _ in range(size)]
    lock = threading.Lock()

    def rank(number: int) -> Any:
        rendezvous = Rendezvous(pairs[number][1], number, size)
        try:
            return call(rendezvous)
        finally:
            rendezvous.close()

    def serve(number: int) -> None:
        while data := pairs[number][0].recv(1000):
            with lock:
                for to, reply in server.receive(number, data).items():
                    pairs[to][0].sendall(reply)

    ranks = [lambda n=n: rank(n) for n in range(size)]
    results = results_of([*ranks, *(lambda n=n: serve(n) for n in range(size))])
    for ours, _ in pairs:
        ours.close()
    return results[:size]


def test_all_learn_what_each_has_given() -> None:
    def call(rendezvous: Rendezvous) -> Any:
        first = rendezvous.gather([rendezvous.rank, "x" * 5000])
        return first, rendezvous.gather(rendezvous.rank + 1, last=True), rendezvous.key, rendezvous.elastic

    results = supervised(3, call)
    assert results == [results[0]] * 3
    assert results[0][:2] == ([[rank, "x" * 5000] for rank in range(3)], [1, 2, 3])
    assert len(results[0][2]) == 64
    assert results[0][3] is False


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "the supervisor of the ranks has exited"),
        (b"cmd=ring_gathered va", "the supervisor of the ranks has exited"),
        (b"cmd=ring_gathered value=[]\n", "the supervisor of the ranks has exited"),
        (b'cmd=ring_gathered value={"error": "rank 1 exited"}\n', "rank 1 exited"),
        (b"cmd=unknown_result rc=-1 msg=not_supported\n", "the supervisor of the ranks has exited"),
        (b"cmd=ring_gathered value=" + b"[" * 50_000 + b"\n", "the supervisor of the ranks has exited"),
    ],
)
def test_a_supervisor_that_does_not_answer(answer: bytes, why: str) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(answer)
    ours.shutdown(socket.SHUT_WR)
    rendezvous = Rendezvous(theirs, 0, 2)
    with pytest.raises(RingError, match=f"^rank 0 failed to initialize: {why}$"):
        rendezvous.gather(1)
    rendezvous.close()
    ours.close()


def test_an_answer_to_a_gathering_that_was_interrupted() -> None:
    ours, theirs = socket.socketpair()
    rendezvous = Rendezvous(theirs, 0, 2)
    late = b'cmd=ring_gathered value={"error": "late", "formation": 0, "step": 0}\n'
    ours.sendall(late + late.replace(b'"formation": 0', b'"formation": 1').replace(b"late", b"in time"))
    rendezvous.begin(1, [0, 1])
    with pytest.raises(RingError, match="in time"):
        rendezvous.gather(1)
    rendezvous.close()
    ours.close()


def test_who_waits_to_join_is_told_in_one_piece_with_an_answer() -> None:
    ours, theirs = socket.socketpair()
    rendezvous = Rendezvous(theirs, 0, 2)
    rendezvous.elastic = True
    answer = b'cmd=ring_gathered value={"generation": 3, "next": 4, "members": [0, 1]}\n'
    news = b'cmd=ring_gathered value={"updated": true}\n'
    ours.sendall(news + answer + news)  # who waited before the answer has been taken in by it
    assert rendezvous.assemble([0, 1], 3, 0.0).generation == 4
    assert rendezvous.is_updated()
    ours.sendall(answer + news[:10])
    rendezvous.assemble([0, 1], 3, 0.0)
    assert not rendezvous.is_updated()
    ours.sendall(news[10:])
    assert rendezvous.is_updated()
    rendezvous.close()
    ours.close()


def test_a_socket_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    for name, value in {"RING_RANK": "2", "RING_SIZE": "3", "RING_RENDEZVOUS": str(theirs.fileno())}.items():
        monkeypatch.setenv(name, value)
    rendezvous = Rendezvous.take()
    assert rendezvous is not None
    assert (rendezvous.rank, rendezvous.size, rendezvous.has_mpi) == (2, 3, False)
    rendezvous.formed()
    assert "RING_RENDEZVOUS" not in os.environ
    assert Rendezvous.take() is None
    rendezvous.close()
    theirs.close()
    monkeypatch.setenv("RING_RENDEZVOUS", str(theirs.fileno() if theirs.fileno() >= 0 else 1023))
    with pytest.raises(RingError, match=r"rank 2 failed to initialize: the socket to its supervisor, .*is closed"):
        Rendezvous.take()
    ours.close()


# An address and a secret.


def join(server: RendezvousServer, *ranks: int | None, **more: str) -> list[Any]:
    """What a thread for each of ``ranks`` gathers from ``server``, or raises."""

    def member(rank: int | None) -> Any:
        env = {**server.variables, **({} if rank is None else {"RING_RANK": str(rank)}), **more}
        rendezvous = Rendezvous.take(env)
        assert rendezvous is not None
        try:
            told = rendezvous.gather(f"of {rendezvous.rank}")
            rendezvous.gather(None, last=True)
            return rendezvous.rank, rendezvous.size, told, rendezvous.key
        finally:
            rendezvous.close()

    return results_of([lambda rank=rank: member(rank) for rank in ranks])


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0, 1), (None, None, None), (None, 1, None)], ids=str)
def test_threads_of_a_driver(ranks: tuple[int | None, ...]) -> None:
    with RendezvousServer(3) as server:
        for _ in range(2):  # one job after another
            found = join(server, *ranks)
            assert sorted(rank for rank, *_ in found) == [0, 1, 2], found
            for given, (rank, size, told, _) in zip(ranks, found, strict=True):
                assert given in (None, rank)
                assert (size, told) == (3, ["of 0", "of 1", "of 2"])
            assert len({key for *_, key in found}) == 1


@pytest.fixture
def outer() -> str:
    """An address of this host that is none of loopback."""
    named = [one for addresses in psutil.net_if_addrs().values() for one in addresses if one.family == socket.AF_INET]
    found = [one.address for one in named if not one.address.startswith("127.")]
    if not found:
        pytest.skip("NOT TESTED: this host has no address but those of loopback")
    return str(found[0])


def test_a_name_that_leads_to_loopback_on_its_own_host(outer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installers of Debian and Ubuntu write 127.0.1.1 for it to /etc/hosts; other hosts find its true address."""
    known = socket.getaddrinfo

    def look_up(host: str, *more: Any, **options: Any) -> Any:
        return known({"node1": "127.0.1.1", "NODE1": outer}.get(host, host), *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with RendezvousServer(2, "node1:0") as server:
        port = server.variables["RING_RENDEZVOUS"].removeprefix("node1:")

        def address(name: str) -> str:
            rendezvous = Rendezvous.take({**server.variables, "RING_RENDEZVOUS": f"{name}:{port}"})
            assert rendezvous is not None
            try:
                return rendezvous.address
            finally:
                rendezvous.close()

        assert results_of([lambda: address("node1"), lambda: address("NODE1")]) == [outer, outer]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_who_asks_for_loopback_gets_it(name: str, outer: str) -> None:
    with RendezvousServer(1, f"{name}:0") as server:
        port = int(server.variables["RING_RENDEZVOUS"].rpartition(":")[2])
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((outer, port), LIMIT)


def test_ranks_are_assigned_host_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[int]] = {}

    def member(server: RendezvousServer, host: str) -> None:
        rendezvous = Rendezvous.take(server.variables)
        assert rendezvous is not None
        found.setdefault(host, []).append(rendezvous.rank)
        rendezvous.close()

    with RendezvousServer(4) as server:
        threads = []
        for number, host in enumerate("abab"):
            monkeypatch.setattr("ring_notebook.rank.rendezvous.this_host", lambda host=host: host)
            threads.append(threading.Thread(target=member, args=(server, host)))
            threads[-1].start()
            until(lambda number=number: number == 3 or len(server._members) > number)  # type: ignore[misc]
        for thread in threads:
            thread.join(LIMIT)
    assert {host: sorted(ranks) for host, ranks in found.items()} == {"a": [0, 1], "b": [2, 3]}


@pytest.mark.parametrize(
    ("ranks", "more", "why"),
    [
        ((1, 1), {}, "rank 1 has come twice: process .* and process .*"),
        ((0, 1), {"RING_SIZE": "3"}, r"the rendezvous is for 2 ranks, and rank . \(process .*\) expects 3"),
        ((0, 5), {}, r"the rendezvous is for 2 ranks, and rank 5 \(process .*\) has come"),
    ],
    ids=["twice", "another size", "too great"],
)
def test_ranks_that_do_not_go_together(
    ranks: tuple[int, ...], more: dict[str, str], why: str, settings: Callable[..., None]
) -> None:
    """All that have come by then learn of it; one that comes later waits for the next ones until its time is over."""
    settings(start_timeout=5)
    with RendezvousServer(2) as server:
        found = join(server, *ranks, **more)
        assert all(isinstance(error, RingError) for error in found), found
        assert any(re.search(why, str(error)) for error in found), found
        assert [told for _, _, told, _ in join(server, 0, 1)] == [["of 0", "of 1"]] * 2, "the next ones form"


def test_a_wrong_secret(settings: Callable[..., None]) -> None:
    """Who has it is told so at once; the others wait for a rank until their time is over, and say which."""
    with RendezvousServer(2) as server:
        settings(start_timeout=0)
        (wrong,) = join(server, 1, RING_RENDEZVOUS_SECRET="x" * 32)
        settings(start_timeout=1.5)
        assert "rank 1 failed to initialize: the server at 127.0.0.1" in str(wrong)
        assert "does not know the secret of this process" in str(wrong)
        (alone,) = join(server, 0)
        assert re.search(
            r"rank 0 failed to initialize: expected 2 ranks, got 1 within the 1.5 s for which rank 0 .* waits; nothing "
            r"was heard of rank 1\. RING_START_TIMEOUT",
            str(alone),
        ), alone


def test_no_server(settings: Callable[..., None]) -> None:
    settings(start_timeout=0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RingError, match=rf"rank 1 .*expected a rendezvous at 127.0.0.1:{port} within 0.3 s, got none"):
        Rendezvous.take({"RING_RENDEZVOUS": f"127.0.0.1:{port}", "RING_RENDEZVOUS_SECRET": "s" * 16, "RANK": "1"})


def test_a_server_that_ends() -> None:
    server = RendezvousServer(2)
    end = threading.Timer(0.5, server.close)
    end.start()
    (error,) = join(server, 0)
    end.join()
    assert re.search("rank 0 failed to initialize: the rendezvous at 127.0.0.1:.* has ended", str(error)), error


@pytest.mark.parametrize(
    ("env", "error", "words"),
    [
        ({"RING_RENDEZVOUS": "here"}, ValueError, "RING_RENDEZVOUS=here: expected HOST:PORT"),
        ({"RING_RENDEZVOUS": "here:70000"}, ValueError, "expected HOST:PORT"),
        ({"RING_RENDEZVOUS_SECRET": ""}, RingError, "at least 16 characters in RING_RENDEZVOUS_SECRET, or in .*got 0"),
        ({"RING_RENDEZVOUS_SECRET": "guess"}, RingError, "got 5"),
        ({"RING_RENDEZVOUS_SECRET": "", "RING_RENDEZVOUS_SECRET_FILE": "/nowhere"}, RingError, "cannot be read"),
    ],
)
def test_variables_that_are_wrong(env: dict[str, str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Rendezvous.take({"RING_RENDEZVOUS": "127.0.0.1:1", "RING_RENDEZVOUS_SECRET": "s" * 16, **env})


def test_a_secret_in_a_file(tmp_path: Path) -> None:
    with RendezvousServer(1) as server:
        file = tmp_path / "secret"
        file.write_text(f"{server.variables['RING_RENDEZVOUS_SECRET']}\n")
        more = {"RING_RENDEZVOUS_SECRET": "", "RING_RENDEZVOUS_SECRET_FILE": str(file)}
        file.chmod(0o640)
        (error,) = join(server, 0, **more)
        assert "only its owner can read, got mode 640; `chmod 600` it" in str(error)
        file.chmod(0o600)
        ((rank, *_),) = join(server, None, **more)
        assert rank == 0


@pytest.mark.parametrize("size", [0, -1])
def test_a_server_for_nobody(size: int) -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        RendezvousServer(size)


def test_strangers_are_told_nothing() -> None:
    with RendezvousServer(2) as server:
        host, _, port = server.variables["RING_RENDEZVOUS"].rpartition(":")
        for said in (b"GET / HTTP/1.0\r\n\r\n" * 10, b"cmd=ring_join value={}\n" * 5):
            with socket.create_connection((host, int(port)), LIMIT) as stranger:
                heard = b""
                try:
                    stranger.sendall(said)
                    while piece := stranger.recv(100):
                        heard += piece
                except ConnectionError:
                    pass
                assert heard == b""
        assert [rank for rank, *_ in join(server, 0, 1)] == [0, 1]


def test_strangers_that_hold_on_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SECONDS_TO_PROVE", 10 * LIMIT)
    hello = Tls(tls_of_secret(b"another secret", server=False), server=False).begin()
    with RendezvousServer(2) as server, ExitStack() as stack:
        host, _, port = server.variables["RING_RENDEZVOUS"].rpartition(":")
        for number in range(3 * serving.MOST_STRANGERS):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), LIMIT))
            stranger.sendall(hello[: number % (len(hello) + 1)])
        assert [rank for rank, *_ in join(server, 0, 1)] == [0, 1]


# Processes that anything starts.


def start(code: str, env: dict[str, str], **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"{SUM}\n{code}"],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def ended(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        said = [rank.communicate(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


def test_processes_that_a_driver_starts() -> None:
    with RendezvousServer(3) as server:
        found = ended([start("train()", server.variables) for _ in range(3)])
    assert sorted(said for _, said, _ in found) == [f"{rank} of 3, sum [6]\n" for rank in range(3)], found


def test_rank_0_serves_where_no_driver_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"RING_RENDEZVOUS": f"127.0.0.1:{port}", "RING_RENDEZVOUS_SECRET": "s" * 32, "WORLD_SIZE": "2"}
    for _ in range(2):  # the next job takes the same address
        found = ended([start("train()", {**env, "RANK": str(rank)}) for rank in (1, 0)])
        assert [said for _, said, _ in found] == ["1 of 2, sum [3]\n", "0 of 2, sum [3]\n"], found


def test_a_rank_that_dies_while_others_wait_for_it() -> None:
    with RendezvousServer(3) as server:
        dies = "from ring_notebook.core import place; place._Formation.make = lambda self: os._exit(7)\ntrain()"
        ranks = [
            start(dies if rank == 1 else "train()", server.variables | {"RING_RANK": str(rank)}) for rank in range(3)
        ]
        found = ended(ranks)
    assert [code for code, *_ in found] == [1, 7, 1], found
    for rank in (0, 2):
        why = rf"RingError: rank {rank} failed to initialize: rank 1 \(process \d+ on .*\) exited before all ranks had"
        assert re.search(why, found[rank][2]), found[rank]


JOBS = """
import json, threading
def work():
    for line in sys.stdin:
        for name in [name for name in os.environ if name.startswith("RING_RENDEZVOUS")]: del os.environ[name]
        os.environ.update(json.loads(line))
        train()
        from ring_notebook.api.basics import shutdown
        shutdown()
        os.write(1, f"{len(threading.enumerate())} threads\\n".encode())
thread = threading.Thread(target=work)  # as in a worker of Dask
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_jobs_one_after_another_in_the_same_processes() -> None:
    """The second has two of the three workers of the first, which counted otherwise, and one that came later."""
    import json

    with RendezvousServer(3) as first, RendezvousServer(2) as second:
        workers = [start(JOBS, {}, stdin=subprocess.PIPE) for _ in range(4)]
        for worker, rank in zip(workers[:3], (0, 1, 2), strict=True):
            assert worker.stdin is not None
            print(json.dumps(first.variables | {"RING_RANK": str(rank)}), file=worker.stdin, flush=True)
        for worker, rank in ((workers[3], 0), (workers[1], 1)):
            assert worker.stdin is not None
            print(json.dumps(second.variables | {"RING_RANK": str(rank)}), file=worker.stdin, flush=True)
        found = ended(workers)
    assert [code for code, *_ in found] == [0] * 4, found
    threads = r"(\d) threads\n"
    assert re.fullmatch(rf"0 of 3, sum \[6\]\n{threads}", found[0][1]), found
    assert re.fullmatch(rf"1 of 3, sum \[6\]\n{threads}1 of 2, sum \[3\]\n\1 threads\n", found[1][1]), found
    assert re.fullmatch(rf"0 of 2, sum \[3\]\n{threads}", found[3][1]), found


def test_a_child_of_a_rank_is_no_rank() -> None:
    child = "subprocess.run([sys.executable, '-c', 'from ring_notebook.api.basics import *; init(); print(size())'])"
    with RendezvousServer(2) as server:
        code = f"import subprocess; train(); {child}"
        found = ended([start(code, server.variables | {"RING_RANK": str(rank)}) for rank in range(2)])
    assert [said.splitlines()[-1] for _, said, _ in found] == ["1"] * 2, found


@pytest.mark.slow
def test_a_process_that_multiprocessing_spawns_in_a_rank_is_told_so(tmp_path: Path) -> None:
    """As the worker of a DataLoader, which imports the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing as mp\nfrom ring_notebook.api.basics import init\ninit()\n"
        "def work(): pass\n"
        "if __name__ == '__main__':\n"
        "    child = mp.get_context('spawn').Process(target=work)\n    child.start(); child.join()\n"
        "    print('ended', child.exitcode)\n"
    )
    done = ringrun("-np", "2", sys.executable, script)
    assert done.stdout.splitlines() == ["ended 1"] * 2, done.stderr
    assert done.stderr.count("this process was started by multiprocessing in a rank") == 2


def test_an_interrupt_while_the_others_are_awaited() -> None:
    with RendezvousServer(2) as server:
        code = (
            "import os, signal, threading; threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\ntrain()"
        )
        ((exit_code, _, said),) = ended([start(code, server.variables)])
    assert exit_code != 0
    assert "KeyboardInterrupt" in said


# torchrun on one host, which tells its ranks nothing of ours.


def torchrun(rank: int, size: int, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "a job",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **more,
    }


def test_ranks_of_two_jobs_of_torchrun() -> None:
    """The second is a restart of the first, which has not quite ended."""
    jobs = [
        [start("train()", torchrun(rank, 2, TORCHELASTIC_RESTART_COUNT=count)) for rank in range(2)] for count in "01"
    ]
    for job in jobs:
        assert [said for _, said, _ in ended(job)] == ["0 of 2, sum [3]\n", "1 of 2, sum [3]\n"]


@pytest.mark.parametrize("run", ["обучение" * 12, "x" * 500, "caf\udce9"], ids=["not ASCII", "long", "no UTF-8"])
def test_any_id_of_a_run_of_torchrun(run: str) -> None:
    found = ended([start("train()", torchrun(rank, 2, TORCHELASTIC_RUN_ID=run)) for rank in range(2)])
    assert [code for code, *_ in found] == [0, 0], found


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_of_torchrun_that_exits(who: int) -> None:
    dies = "from ring_notebook.core import place; place._Formation.make = lambda self: os._exit(7)\ntrain()"
    found = ended([start(dies if rank == who else "train()", torchrun(rank, 2)) for rank in range(2)])
    assert found[who][0] == 7
    assert re.search(
        f"RingError: rank {1 - who} failed to initialize: .*(rank {who} .* exited|has ended)", found[1 - who][2]
    )


def test_where_there_is_no_rendezvous() -> None:
    assert Rendezvous.take({}) is None
    assert Rendezvous.take(torchrun(0, 4, GROUP_WORLD_SIZE="2")) is None
    assert not is_offered({})
    assert not is_offered({"RING_RENDEZVOUS": "7"})


@pytest.mark.slow
def test_a_script_of_torchrun(tmp_path: Path) -> None:
    """`torchrun --standalone train.py`, where the script says backend "ring" and nothing else of ours."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('ring')\n"
        "tensor = torch.ones(1)\n"
        "dist.all_reduce(tensor)\n"
        "assert tensor.item() == dist.get_world_size() == 2\n"
        "if dist.get_rank() == 1: raise ValueError('boom')\n"
        "dist.barrier()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = ran(command)
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
