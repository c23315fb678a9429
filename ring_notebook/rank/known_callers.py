"""Pickled objects between processes that know each other: `KnownCallers` serves those that `call` it.

On one host they meet at a socket file, and the kernel says whose process the other one is. Between hosts both prove by
TLS that they know a secret.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ring_notebook.machine.os_calls import Wake, peer_of, short_path
from ring_notebook.rank.rank_variables import bracketed
from ring_notebook.rank.secure_streams import tls_of_secret
from ring_notebook.rank.serving import SECONDS_TO_PROVE

_SECONDS_TO_END = 1.0
_BACKLOG = 1024
_PAUSE = 0.1  # seconds, where no caller can be taken
_LENGTH = struct.Struct("!Q")


class Caller:
    """One end of a connection to a process that is known: `send` and `recv` carry any object that pickle takes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._file = channel.makefile("rb")

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, value: Any) -> None:
        """Send ``value``. Raises OSError where the other end has gone."""
        data = pickle.dumps(value)
        self._channel.sendall(_LENGTH.pack(len(data)))
        self._channel.sendall(data)

    def recv(self) -> Any:
        """The next object. Raises EOFError where the other end has gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("it has closed the connection")
        return data

    def close(self) -> None:
        self._file.close()
        self._channel.close()


def call(address: str, secret: bytes) -> Caller:
    """Connect to `KnownCallers` at ``address``, a path or ``host:port``.

    Raises OSError, such as ssl.SSLError where they have another secret.
    """
    host, colon, port = address.rpartition(":")
    channel = socket.create_connection((host.strip("[]"), int(port))) if colon else socket.socket(socket.AF_UNIX)
    try:
        if colon:
            channel = tls_of_secret(secret, server=False).wrap_socket(channel)
        else:
            with short_path(address) as name:
                channel.connect(name)
        return Caller(channel)
    except BaseException:
        channel.close()
        raise


class KnownCallers:
    """Listens at a path or an address, and calls ``serve`` with each caller that is known, until `close`.

    Callers at a path are known if they are processes of this user, others if they know ``secret``.
    """

    def __init__(self, address: str | tuple[str, int], secret: bytes, serve: Callable[[Caller], None]) -> None:
        self._tls = None if isinstance(address, str) else tls_of_secret(secret, server=True)
        self._serve = serve
        if isinstance(address, str):
            self.address = address
            """The path of the socket file, or ``host:port``."""
            self._listener = socket.socket(socket.AF_UNIX)
            with short_path(address) as name:
                self._listener.bind(name)
            self._listener.listen(_BACKLOG)
        else:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._listener = socket.create_server(address, family=family, backlog=_BACKLOG)
            host, port = self._listener.getsockname()[:2]
            self.address = f"{bracketed(host)}:{port}"
        self._listener.setblocking(False)
        self._threads: list[tuple[threading.Thread, socket.socket]] = []
        self._known: set[socket.socket] = set()
        self._closing = Wake()
        self._acceptor = threading.Thread(target=self._accept, name="ring-callers", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Read what the callers have sent, and stop; all callers have ended."""
        self._closing.set()
        self._acceptor.join()
        self._closing.close()
        self._listener.close()
        for thread, channel in self._threads:
            thread.join(_SECONDS_TO_END if channel in self._known else 0.0)
            if thread.is_alive():
                # A stranger, or a process that a caller has forked: it holds the connection and sends nothing.
                with suppress(OSError):
                    socket.socket.shutdown(channel, socket.SHUT_RDWR)  # TLS would be taken from the thread that uses it
                thread.join()

    def _accept(self) -> None:
        poll = select.poll()
        for one in (self._listener, self._closing):
            poll.register(one, select.POLLIN)
        while self._listener.fileno() in dict(poll.poll()):  # what has connected before the end is taken first
            try:
                self._take(self._listener.accept()[0])
            except (OSError, RuntimeError):  # the caller has hung up; or this process may have no more files or threads
                time.sleep(_PAUSE)

    def _take(self, channel: socket.socket) -> None:
        try:
            channel.setblocking(True)
            if self._tls:
                channel = self._tls.wrap_socket(channel, server_side=True, do_handshake_on_connect=False)
            thread = threading.Thread(target=self._answer, args=(channel,), name="ring-caller", daemon=True)
            thread.start()
        except BaseException:
            channel.close()  # the caller learns of it, and does not wait
            raise
        self._threads.append((thread, channel))

    def _answer(self, channel: socket.socket) -> None:
        with Caller(channel) as caller, suppress(EOFError, OSError):  # as when the caller has died
            if isinstance(channel, ssl.SSLSocket):
                channel.settimeout(SECONDS_TO_PROVE)
                channel.do_handshake()
                channel.settimeout(None)
            elif peer_of(channel)[1] != os.getuid():
                return
            self._known.add(channel)
            self._serve(caller)
