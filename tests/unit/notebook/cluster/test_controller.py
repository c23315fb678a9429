"""The controller's ports are its own from when it chooses them, and it hears of a new engine at once."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest
import zmq
from zmq.eventloop.zmqstream import ZMQStream

from ring_notebook.notebook.cluster.controller import Controller, HeartMonitor
from ring_notebook.protocol.registration import PORTS_USED_UP, port_warning


def test_nobody_takes_a_port_before_a_scheduler_binds_it() -> None:
    """Schedulers are processes, and say nothing when they cannot bind: a cluster would wait for engines in vain."""
    controller = Controller()
    port = controller.next_port("engine")
    for address in ("127.0.0.1", ""):
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((address, port))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as ours, context.socket(zmq.DEALER) as engine:
        ours.bind(f"tcp://127.0.0.1:{port}")
        engine.connect(f"tcp://127.0.0.1:{port}")
        engine.send(b"hello")
        assert ours.recv_multipart()[1] == b"hello"
    for held in controller._held:
        held.close()


def _free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def test_ports_come_from_the_pools_of_ipyparallel(caplog: pytest.LogCaptureFixture) -> None:
    """A firewall may have only these open. One that is in use, perhaps by another cluster, is passed over."""
    engine, client, taken, common, last = _free_ports(5)
    controller = Controller(engine_ports=[engine], client_ports=[client], ports=[taken, common, last])
    controller.log.propagate = True
    with socket.socket() as other:
        other.bind(("", taken))
        names = ["engine", "engine", "client", "common"]
        assert [controller.next_port(name) for name in names] == [engine, common, client, last]
        assert PORTS_USED_UP not in caplog.text
        further = [controller.next_port(name) for name in ("engine", "client", "common")]
    assert not {engine, client, taken, common, last} & set(further)
    assert caplog.text.count(PORTS_USED_UP) == 1
    assert "5 ports" in caplog.text
    assert port_warning(f"... \n{caplog.text}").startswith(f"{PORTS_USED_UP}: 5 ports")
    assert port_warning("nothing") == ""
    for held in controller._held:
        with held, socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("", held.getsockname()[1]))


async def _tell_of_hearts(*pongs: list[bytes]) -> list[bytes]:
    """What a monitor tells the hub of these answers to a ping."""
    with zmq.Context() as context, context.socket(zmq.PULL) as hub, context.socket(zmq.PUSH) as tells:
        hub.bind("inproc://hub")
        tells.connect("inproc://hub")
        stream = ZMQStream(tells)
        monitor = HeartMonitor(monitor_stream=stream)
        for pong in pongs:
            monitor.handle_pong(pong)
        stream.flush()
        told = []
        while hub.poll(0):
            told.append(hub.recv_multipart()[-1])
        stream.close()
        return told


def test_an_engine_is_announced_at_its_first_heartbeat() -> None:
    """An engine can take a cell when the hub has been told of it; the next ping may be a period later."""
    hearts = [b"one", b"0.0"], [b"two", b"0.0"], [b"one", b"0.0"]
    assert asyncio.run(_tell_of_hearts(*hearts)) == [b'{"hearts": ["one"]}', b'{"hearts": ["two"]}']
