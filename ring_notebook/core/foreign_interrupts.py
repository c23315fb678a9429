"""Collectives that another runtime calls from its own threads, and how an interrupt ends them.

Python handles signals in the main thread only, which waits in the runtime meanwhile.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread, current_thread, get_ident, main_thread

from ring_notebook.core import world
from ring_notebook.core.native import core

_in_flight: set[int] = set()
"""The threads that wait."""


@contextmanager
def in_flight() -> Iterator[None]:
    """A context for a collective in a thread of a runtime; in the main thread it has no effect."""
    number = get_ident()
    if number == main_thread().ident:
        yield
        return
    _in_flight.add(number)
    try:
        if core.interrupted():
            fail()
        yield
    finally:
        _in_flight.discard(number)


def interrupt() -> None:
    """After SIGINT: end the collectives that other threads wait in, on all ranks. Any thread may call it.

    If none is waiting, a program of the runtime ends at its next collective.
    """
    core.note_interrupt()
    if _in_flight or core.foreign_calls_in_flight():
        fail()


def fail() -> None:
    """End the collectives of all ranks, because this one has been interrupted."""
    world.fail(KeyboardInterrupt())


def watch_interrupts() -> None:
    """From now on call `interrupt` when SIGINT arrives, even while the main thread does not handle signals.

    Only for the main thread. Does nothing if an event loop, or an engine, which calls `interrupt` itself, watches.
    """
    if current_thread() is not main_thread():
        return
    before = signal.set_wakeup_fd(-1)
    if before != -1:
        signal.set_wakeup_fd(before)
        return
    come, going = socket.socketpair()
    going.setblocking(False)
    signal.set_wakeup_fd(going.detach(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    Thread(target=_watch, args=(come,), name="ring-interrupt", daemon=True).start()


def _watch(come: socket.socket) -> None:
    while numbers := come.recv(64):
        if signal.SIGINT in numbers:
            interrupt()
