"""Ends waits in the C++ of other backends, which look at no signal: their connections are shut down."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import torch.distributed.distributed_c10d as registry

from ring_notebook.torch.process_group.identity import GroupIdentity
from ring_notebook.torch.process_group.stores.listening_ports import listening_ports

__all__ = ["end_foreign_waits", "foreign_threads_rest"]

_GLOO_THREAD = "pt_gloo_runloop"
_PATIENCE = 1.0  # seconds that threads have to notice that a connection is gone
_LOOKS, _BETWEEN_LOOKS = 5, 0.02  # seconds
_given_up: set[str] = set()  # threads that stay in an operation


def end_foreign_waits() -> None:
    """Have this rank raise in what it waits for in groups of other backends. Any thread may call it.

    Gloo's own ``abort`` leaves a wait where it is. A connection that is shut down ends it, here and on the other side.
    Connections of groups are those to and from the ports that the groups have told their ranks; others stay.
    """
    ports = listening_ports()
    if not ports or all(isinstance(group, GroupIdentity) for group in list(registry._world.pg_map)):
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                _shut_down_between(ports, int(name))


def foreign_threads_rest() -> bool:
    """Whether no thread of Gloo's is in an operation, or begins one within 0.1 s; at the latest after a second.

    One that sends when its connection goes may wait on, until Gloo's own timeout of 30 minutes. The destructor of its
    group joins it, whoever drops the group last. A thread for which this has been said counts no more.
    """
    deadline = time.monotonic() + _PATIENCE
    seen = 0  # to rest, time after time: one that has work may not have woken yet
    while seen < _LOOKS:
        busy = {thread.name for thread in Path("/proc/self/task").iterdir() if not _rests(thread)} - _given_up
        if busy and time.monotonic() > deadline:
            _given_up.update(busy)
            return False
        seen = 0 if busy else seen + 1
        time.sleep(_BETWEEN_LOOKS)
    return True


def _rests(thread: Path) -> bool:
    """Whether a thread is none of Gloo's, or waits for work: without a time limit, which operations have."""
    try:
        if (thread / "comm").read_text().strip() != _GLOO_THREAD:
            return True
        call = (thread / "syscall").read_text().split()  # number, six arguments, two registers; or "running"
    except FileNotFoundError:  # it has ended
        return True
    except OSError:  # nobody may look
        return False
    return len(call) == 9 and int(call[4], 16) == 0


def _shut_down_between(ports: Set[int], descriptor: int) -> None:
    """Shut a socket down if it is a connection from or to one of ``ports``; OSError for other sockets."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return
        # The peer of a socket that listens raises: Gloo ends the process when such a one fails.
        if {connection.getpeername()[1], connection.getsockname()[1]} & ports:
            connection.shutdown(socket.SHUT_RDWR)
