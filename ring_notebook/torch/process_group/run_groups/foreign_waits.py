"""Ends waits in the C++ of other backends, which look at no signal: their connections are shut down."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ring_notebook.core import world
from ring_notebook.torch.process_group.identity import GroupIdentity
from ring_notebook.torch_private import private

__all__ = ["end_foreign_waits", "foreign_groups", "foreign_threads_rest", "tells_of_lost_rank"]

_THREADS = Path("/proc/self/task")
_CONNECTIONS_THREAD, _OPERATIONS_THREAD = "gloo_tcp_loop", "pt_gloo_runloop"
_WATCHED = re.compile(r"^tfd: +(\d+)", re.MULTILINE)  # in what Linux says of an epoll descriptor
_GLOO = "gloo/transport/"  # in the file names with which its errors begin
_PATIENCE = 1.0  # seconds that threads have to notice that a connection is gone
_LOOKS, _BETWEEN_LOOKS = 5, 0.02  # seconds
_given_up: set[str] = set()  # threads that stay in an operation


def foreign_groups() -> list[c10d.ProcessGroup]:
    """The groups of other backends in this process."""
    registry = private("group_registry")
    known = [dist.group.WORLD] if registry is None else list(registry.pg_map)
    return [group for group in known if group is not None and not isinstance(group, GroupIdentity)]


def tells_of_lost_rank(error: BaseException) -> bool:
    """Whether ``error`` is what Gloo or NCCL raises when the connection to another rank has ended."""
    return isinstance(error, dist.DistBackendError) or (isinstance(error, RuntimeError) and _GLOO in str(error))


def end_foreign_waits() -> None:
    """Have this rank raise in what it waits for in groups of other backends. Any thread may call it.

    Gloo's own ``abort`` leaves a wait where it is. A connection that is shut down ends it, here and on the other side.
    Its connections are those that its threads watch, whatever store its ranks have found each other in; others stay.
    A connection that it waits for, as Gloo does for each rank of a group that is being made, comes and goes.
    """
    for thread in _THREADS.iterdir():
        for descriptor in _watched_by(thread):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                    _shut_down(descriptor)


def foreign_threads_rest() -> bool:
    """Whether no thread of Gloo's is in an operation, or begins one within 0.1 s; at the latest after a second.

    One that sends when its connection goes may wait on, until Gloo's own timeout of 30 minutes. The destructor of its
    group joins it. A thread for which this has been said counts no more.
    """
    deadline = time.monotonic() + _PATIENCE
    seen = 0  # to rest, time after time: one that has work may not have woken yet
    while seen < _LOOKS:
        busy = {thread.name for thread in _THREADS.iterdir() if not _rests(thread)} - _given_up
        if busy and time.monotonic() > deadline:
            _given_up.update(busy)
            return False
        seen = 0 if busy else seen + 1
        time.sleep(_BETWEEN_LOOKS)
    return True


def _rests(thread: Path) -> bool:
    """Whether a thread is none of Gloo's, or waits for work: without a time limit, which operations have."""
    if _name(thread) != _OPERATIONS_THREAD:
        return True
    call = _system_call(thread)
    return len(call) == 9 and int(call[4], 16) == 0


def _watched_by(thread: Path) -> list[int]:
    """The descriptors that a thread of Gloo's waits for in epoll_wait, which it is in but for microseconds."""
    if _name(thread) != _CONNECTIONS_THREAD:
        return []
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        call = _system_call(thread)
        with suppress(OSError, IndexError, ValueError):
            descriptor = int(call[1], 16)
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":
                return [int(one) for one in _WATCHED.findall(Path(f"/proc/self/fdinfo/{descriptor}").read_text())]
        time.sleep(0.001)
    return []


def _name(thread: Path) -> str:
    try:
        return (thread / "comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def _system_call(thread: Path) -> list[str]:
    """Its number, six arguments and two registers; one word of a thread that runs, none where nobody may look."""
    try:
        return (thread / "syscall").read_text().split()
    except OSError:
        return []


def _shut_down(descriptor: int) -> None:
    """Shut a connection down, or what a listening socket waits for; OSError for other descriptors."""
    with socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _come_and_go(found)  # Gloo ends the process when this one is shut down
            else:
                found.shutdown(socket.SHUT_RDWR)


def _come_and_go(listener: socket.socket) -> None:
    """Connect to Gloo as each rank that it may wait for, and leave: it takes the ranks for lost.

    A rank begins with 8 bytes: which one of this group's connections it is. Gloo counts them from 0, a group each.
    One that has come before stays as it is.
    """
    for number in range(world.current().size if world.is_initialized() else 0):
        with socket.socket(listener.family, listener.type) as rank:
            rank.settimeout(_PATIENCE)
            rank.connect(listener.getsockname())
            rank.sendall(number.to_bytes(8, sys.byteorder))
