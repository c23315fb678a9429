"""How a rank of several hosts learns of the others, from a supervisor that answers, says no, or is gone."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable

import pytest

from ring_notebook.errors import RingError
from ring_notebook.launch.connections.pmi import PmiServer
from ring_notebook.rank.hosts_rendezvous import HostsRendezvous


def together(size: int, call: Callable[[HostsRendezvous], object]) -> list[object]:
    """What ``call`` returns or raises on each of ``size`` ranks, which a supervisor connects."""
    server = PmiServer("job", [0] * size)
    pairs = [socket.socketpair() for _ in range(size)]
    results: list[object] = [None] * size

    def rank(number: int) -> None:
        rendezvous = HostsRendezvous(number, (0,) * size, pairs[number][1])
        try:
            results[number] = call(rendezvous)
        except Exception as error:
            results[number] = error
        rendezvous.close()

    def serve(number: int) -> None:
        while data := pairs[number][0].recv(1000):
            with lock:
                for to, reply in server.receive(number, data).items():
                    pairs[to][0].sendall(reply)

    lock = threading.Lock()
    threads = [threading.Thread(target=target, args=(n,)) for target in (rank, serve) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for ours, _ in pairs:
        ours.close()
    return results


def test_all_learn_what_each_has_told() -> None:
    def call(rendezvous: HostsRendezvous) -> object:
        first = rendezvous.gather([rendezvous.rank, "x" * 5000])
        return first, rendezvous.gather_or_raise(rendezvous.rank + 1, None), rendezvous.key

    results = together(3, call)
    assert results == [results[0]] * 3
    first, second, key = results[0]  # type: ignore[misc]
    assert (first, second) == ([[rank, "x" * 5000] for rank in range(3)], [1, 2, 3])
    assert len(key) == 32


def test_all_raise_when_one_has_failed() -> None:
    def call(rendezvous: HostsRendezvous) -> object:
        return rendezvous.gather_or_raise(None, MemoryError("none left") if rendezvous.rank == 1 else None)

    here, there, other = together(3, call)
    assert isinstance(there, MemoryError)
    for error in (here, other):
        assert isinstance(error, RingError)
        assert re.fullmatch(r"rank \d failed to initialize: rank 1 raised MemoryError: none left", str(error))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "the supervisor of the ranks has exited"),
        (b"cmd=ring_gathered va", "the supervisor of the ranks has exited"),
        (b"cmd=ring_gathered value=[]\n", "the supervisor of the ranks has exited"),
        (b'cmd=ring_gathered value={"error": "rank 1 exited"}\n', "rank 1 exited"),
        (b"cmd=unknown_result rc=-1 msg=not_supported\n", "the supervisor of the ranks has exited"),
    ],
)
def test_a_supervisor_that_does_not_answer(answer: bytes, why: str) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(answer)
    ours.shutdown(socket.SHUT_WR)
    rendezvous = HostsRendezvous(0, (0, 1), theirs)
    with pytest.raises(RingError, match=f"^rank 0 failed to initialize: {why}$"):
        rendezvous.gather(1)
    rendezvous.close()
    ours.close()


def test_it_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    for name, value in {"RING_HOSTS": "0,0,1", "PMI_RANK": "2", "PMI_FD": str(theirs.fileno())}.items():
        monkeypatch.setenv(name, value)
    rendezvous = HostsRendezvous.take()
    assert rendezvous is not None
    assert (rendezvous.rank, rendezvous.hosts) == (2, (0, 0, 1))
    assert "RING_HOSTS" not in os.environ
    assert HostsRendezvous.take() is None
    rendezvous.close()
    theirs.close()
    monkeypatch.setenv("RING_HOSTS", "0,1")
    with pytest.raises(RingError, match=r"rank 2 failed to initialize: the socket to its supervisor, .*is closed"):
        HostsRendezvous.take()
    ours.close()
