"""Serves callers that prove that they know a key, each in a thread; `multiprocessing.connection.Client` calls it."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, TypeAlias

Caller: TypeAlias = "Connection[Any, Any]"
_SECONDS_TO_PROVE = 10  # for each message of the proof
_SECONDS_TO_END = 1.0
_BACKLOG = 1024


class KnownCallers:
    """Listens at a path or an address, and calls ``serve`` with each caller that knows ``key``, until `close`."""

    def __init__(self, address: str | tuple[str, int], key: bytes, serve: Callable[[Caller], None]) -> None:
        self._key = key
        self._serve = serve
        self._listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self._listener.bind(address)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        at = self._listener.getsockname()
        self.address = at if isinstance(at, str) else f"{at[0]}:{at[1]}"
        """The path of the socket file, or ``host:port``."""
        self._threads: list[tuple[threading.Thread, Caller]] = []
        self._known: set[Caller] = set()
        self._closing = os.eventfd(0)
        self._acceptor = threading.Thread(target=self._accept, name="ring-callers", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Take what the callers have sent, all of which have ended, and stop."""
        os.eventfd_write(self._closing, 1)
        self._acceptor.join()
        os.close(self._closing)
        self._listener.close()
        for thread, caller in self._threads:
            thread.join(_SECONDS_TO_END if caller in self._known else 0.0)
            if thread.is_alive():
                # A stranger, or a process that a caller has forked: it holds the connection and sends nothing.
                with suppress(OSError), socket.socket(fileno=os.dup(caller.fileno())) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                thread.join()

    def _accept(self) -> None:
        poll = select.poll()
        for descriptor in (self._listener.fileno(), self._closing):
            poll.register(descriptor, select.POLLIN)
        while self._listener.fileno() in dict(poll.poll()):  # what has connected before the end is taken first
            with suppress(OSError):  # the caller has hung up already
                caller: Caller = Connection(self._listener.accept()[0].detach())
                thread = threading.Thread(target=self._answer, args=(caller,), name="ring-caller", daemon=True)
                thread.start()
                self._threads.append((thread, caller))

    def _answer(self, caller: Caller) -> None:
        with caller, suppress(AuthenticationError, EOFError, OSError):  # as when the caller has died
            _limit_waits(caller, _SECONDS_TO_PROVE)
            deliver_challenge(caller, self._key)
            answer_challenge(caller, self._key)
            self._known.add(caller)
            _limit_waits(caller, 0)
            self._serve(caller)


def _limit_waits(caller: Caller, seconds: int) -> None:
    """Have receives and sends fail after so many ``seconds``; 0: never."""
    with socket.socket(fileno=os.dup(caller.fileno())) as connection:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
