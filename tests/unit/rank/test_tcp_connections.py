"""Connections between ranks of several hosts: who proves what to whom, calls that cross, strangers and silence."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from harness.waiting import until
from ring_notebook.core.native import core
from ring_notebook.rank import tcp_connections
from ring_notebook.rank.secure_streams import Tls, tls_of_secret
from ring_notebook.rank.serving import MOST_STRANGERS
from ring_notebook.rank.tcp_connections import TcpConnections, listen

TAG = core.TcpLink.first_free_tag
KEY = bytes(range(32))
LIMIT = 60.0


class Ranks:
    """Links of ranks that share this process, on loopback."""

    def __init__(self, keys: list[bytes]) -> None:
        listeners = [listen() for _ in keys]
        self.addresses = [listener.getsockname()[:2] for listener in listeners]
        self.links = [core.TcpLink(len(keys)) for _ in keys]
        for rank, (link, listener, key) in enumerate(zip(self.links, listeners, keys, strict=True)):
            TcpConnections(link, rank, listener, self.addresses, key)

    def receive(self, rank: int) -> tuple[int, bytes]:
        found: list[tuple[int, bytes]] = []

        def look() -> bool:
            for link in self.links:  # who sends has to look too
                if link is not self.links[rank]:
                    link.take(TAG + 1)
            message = self.links[rank].take(TAG)
            found.extend([message] if message else [])
            return bool(found)

        until(look)
        return found[0]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[bytes]], Ranks]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(tcp_connections, "_SECONDS_TO_CONNECT", 1.0)
    with ExitStack() as stack:

        def make(keys: list[bytes]) -> Ranks:
            made = Ranks(keys)
            stack.callback(close, made)
            return made

        yield make


def close(made: Ranks) -> None:
    for link in made.links:
        link.drain()
    for thread in [thread for thread in threading.enumerate() if isinstance(thread, TcpConnections)]:
        thread.stop()
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_a_rank_that_sends_is_connected(ranks: Callable[[list[bytes]], Ranks]) -> None:
    three = ranks([KEY] * 3)
    three.links[2].post(0, TAG, b"two to zero")
    three.links[0].post(1, TAG, b"zero to one")
    assert three.receive(0) == (2, b"two to zero")
    assert three.receive(1) == (0, b"zero to one")
    three.links[0].post(2, TAG, b"back")
    assert three.receive(2) == (0, b"back")


def test_calls_that_cross_leave_one_connection(ranks: Callable[[list[bytes]], Ranks]) -> None:
    """Whatever the order in which the two decide, what both have sent arrives."""
    for _ in range(12):
        two = ranks([KEY] * 2)
        callers = [threading.Thread(target=two.links[rank].post, args=(1 - rank, TAG, b"%d" % rank)) for rank in (0, 1)]
        for caller in callers:
            caller.start()
        assert [two.receive(rank) for rank in (0, 1)] == [(1, b"1"), (0, b"0")]
        two.links[0].post(1, TAG, b"again")
        assert two.receive(1) == (0, b"again")
        close(two)


def test_a_rank_with_another_key_is_none(ranks: Callable[[list[bytes]], Ranks]) -> None:
    two = ranks([KEY, bytes(32)])
    two.links[0].post(1, TAG, b"secret")
    receive = two.links[1].take
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        assert receive(TAG) is None
        time.sleep(0.01)


def heard_by(address: tuple[str, int], said: bytes) -> bytes:
    """What a stranger hears that says something and waits until it is hung up on."""
    heard = b""
    with socket.create_connection(address) as stranger:
        stranger.settimeout(LIMIT)
        stranger.sendall(said)
        with suppress(OSError):  # the rank has hung up already
            stranger.shutdown(socket.SHUT_WR)
            while piece := stranger.recv(4096):
                heard += piece
    return heard


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)])
def test_a_stranger_learns_nothing_and_disturbs_nobody(ranks: Callable[[list[bytes]], Ranks], said: bytes) -> None:
    two = ranks([KEY] * 2)
    assert heard_by(two.addresses[1], said) == b""
    two.links[0].post(1, TAG, b"hello")
    assert two.receive(1) == (0, b"hello")


class Recorder:
    """Stands between a caller and ``address``, and records what the caller says."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.said = b""
        self._to = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        caller, _ = self._listener.accept()
        with self._listener, caller, socket.create_connection(self._to) as other:
            ways = {caller: other, other: caller}
            while True:
                for source in select.select(list(ways), [], [], LIMIT)[0]:
                    if not (data := source.recv(4096)):
                        return
                    self.said += data if source is caller else b""
                    ways[source].sendall(data)

    def close(self) -> None:
        """Return when the recorded connection has ended."""
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()


def test_a_connection_that_was_recorded_is_worth_nothing(ranks: Callable[[list[bytes]], Ranks]) -> None:
    two = ranks([KEY] * 2)
    recorder = Recorder(two.addresses[1])
    two.addresses[1] = recorder.address
    two.links[0].post(1, TAG, b"a secret word")
    assert two.receive(1) == (0, b"a secret word")
    close(two)
    two.links.clear()
    recorder.close()
    hello = recorder.said[: 5 + int.from_bytes(recorder.said[3:5], "big")]
    assert len(hello) > 200
    again = ranks([KEY] * 2)
    answers = [heard_by(again.addresses[1], hello)[:128] for _ in range(2)]
    assert all(answer[:3] == b"\x16\x03\x03" for answer in answers), "each answers with a key of its own"
    assert answers[0] != answers[1]
    heard_by(again.addresses[1], recorder.said)
    assert again.links[1].take(TAG) is None
    again.links[0].post(1, TAG, b"hello")
    assert again.receive(1) == (0, b"hello")


def test_strangers_that_hold_on_keep_no_rank_out(
    ranks: Callable[[list[bytes]], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come from the address of the ranks, and may stay for as long as they like."""
    monkeypatch.setattr(tcp_connections, "_SECONDS_TO_CONNECT", LIMIT)
    monkeypatch.setattr(tcp_connections, "SECONDS_TO_PROVE", 10 * LIMIT)
    hello = Tls(tls_of_secret(b"another key", server=False), server=False).begin()
    two = ranks([KEY] * 2)
    with ExitStack() as stack:
        for number in range(3 * MOST_STRANGERS):
            stranger = stack.enter_context(socket.create_connection(two.addresses[1]))
            stranger.sendall(hello[: number % (len(hello) + 1)])
        two.links[0].post(1, TAG, b"hello")
        assert two.receive(1) == (0, b"hello")


class ListenerOfOneThatStops(socket.socket):
    """Stops the thread that serves it within the call that accepts a connection."""

    serving: TcpConnections
    accepted: socket.socket

    def accept(self) -> tuple[socket.socket, object]:
        self.accepted, address = super().accept()
        self.serving.stop()
        return self.accepted, address


def test_stopped_while_one_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    plain = listen()
    listener = ListenerOfOneThatStops(fileno=plain.detach())
    address = listener.getsockname()[:2]
    listener.serving = TcpConnections(core.TcpLink(1), 0, listener, [address], KEY)
    with socket.create_connection(address):
        listener.serving.join(LIMIT)
    assert listener.accepted.fileno() == -1


def test_a_host_whose_own_name_leads_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic job of one host may grow to others, which cannot connect to 127.0.1.1."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(tcp_connections.socket, "getaddrinfo", lambda *_, **__: found)
    lo = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")
    link = SimpleNamespace(family=socket.AF_INET6, address="fe80::1%eth0")
    one = SimpleNamespace(family=socket.AF_INET, address="10.0.0.7")
    monkeypatch.setattr(tcp_connections.psutil, "net_if_addrs", lambda: {"lo": [lo], "eth0": [link, one]})
    monkeypatch.setattr(tcp_connections, "_address_on_default_route", lambda: "", raising=False)
    assert tcp_connections._address_of_this_host() == "10.0.0.7"
    monkeypatch.setattr(tcp_connections.psutil, "net_if_addrs", lambda: {"lo": [lo]})
    assert tcp_connections._address_of_this_host() == "127.0.1.1"
    monkeypatch.setattr(tcp_connections, "_address_on_default_route", lambda: "10.0.0.8", raising=False)
    assert tcp_connections._address_of_this_host() == "10.0.0.8"


def test_an_interface_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0,lo")
    with pytest.raises(OSError, match="'nothing0' has no address here; RING_INTERFACE names another one"):
        listen()
