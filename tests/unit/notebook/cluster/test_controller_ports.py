"""The controller's ports are its own from when it chooses them."""

from __future__ import annotations

import socket

import pytest
import zmq

from ring_notebook.notebook.cluster.controller import Controller


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
