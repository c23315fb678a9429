"""A thread that serves callers from other processes, once they have proven who they are."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
import threading
import weakref
from collections import Counter
from typing import Any

from ring_notebook.machine.os_calls import peer_of

MOST_STRANGERS = 128
"""Connections that have proven nothing yet."""
SECONDS_TO_PROVE = 10.0
"""For a caller to prove who it is; others may connect meanwhile."""
_LONGEST_LINE = 1 << 16
_PAUSE = 0.1  # seconds, where no connection can be accepted


class Strangers:
    """The tasks that identify new callers; beyond `MOST_STRANGERS`, one of them is cancelled.

    It is the oldest of the address with the most tasks: a flood displaces its own connections, and a rank proves who it
    is in a few round trips.
    """

    def __init__(self) -> None:
        self._places: dict[asyncio.Task[Any], str] = {}

    def add(self, task: asyncio.Task[Any], address: object) -> None:
        """Add the task for a caller from ``address``, as a socket names it."""
        if len(self._places) >= MOST_STRANGERS:
            ((most, _),) = Counter(self._places.values()).most_common(1)
            oldest = next(task for task, place in self._places.items() if place == most)
            self.discard(oldest)
            oldest.cancel()
        self._places[task] = str(address[0]) if isinstance(address, tuple) else ""

    def discard(self, task: asyncio.Task[Any]) -> None:
        """The task has identified its caller, or has ended."""
        self._places.pop(task, None)


class Serving(threading.Thread):
    """A thread with an event loop that answers callers of ``listener``, which it closes at the end."""

    def __init__(self, name: str, listener: socket.socket) -> None:
        super().__init__(name=name, daemon=True)
        self._listener = listener
        self._listener.setblocking(False)
        self._strangers = Strangers()
        # Not of writers, which may be dropped when closed, while TLS still waits for the other end.
        self._transports: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self.start()

    async def _serve(self) -> None:
        """Answer callers, each in a task, until it is cancelled."""
        answers: set[asyncio.Task[None]] = set()
        while True:
            try:
                channel, address = await self._accept()
            except OSError:  # out of descriptors, or the caller has gone
                await asyncio.sleep(_PAUSE)
                continue
            channel.setblocking(False)
            answer = asyncio.create_task(self._answer(channel))
            answer.add_done_callback(functools.partial(_close, channel))  # also when it is cancelled before it begins
            answers.add(answer)
            answer.add_done_callback(answers.discard)
            self._strangers.add(answer, address)
            answer.add_done_callback(self._strangers.discard)
            await asyncio.sleep(0)  # so that an endless stream of callers starves no task

    async def _accept(self) -> tuple[socket.socket, object]:
        """The next connection. A cancelled `loop.sock_accept` may lose one, which then stays open."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                return self._listener.accept()
            readable = loop.create_future()
            loop.add_reader(self._listener, _set_once, readable)
            try:
                await readable
            finally:
                loop.remove_reader(self._listener)

    async def _answer(self, channel: socket.socket) -> None:
        """A process has connected: find out who it is, say so by `_know`, and serve it.

        ``channel`` is closed at the end of the task, unless it was detached.
        """
        raise NotImplementedError

    def _know(self) -> None:
        """The caller of the present task has proven who it is."""
        task = asyncio.current_task()
        assert task is not None
        self._strangers.discard(task)

    async def _streams(
        self, channel: socket.socket, context: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams of a caller, which has proven who it is: by TLS; over a Unix socket the kernel says its user.

        Raises OSError where it is a stranger, and asyncio.TimeoutError.
        """
        if context is None and peer_of(channel)[1] != os.getuid():
            raise PermissionError("a process of another user")
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        protocol = asyncio.StreamReaderProtocol(reader)
        own = socket.socket(fileno=channel.detach())
        try:
            transport, _ = await asyncio.wait_for(
                self._loop.connect_accepted_socket(lambda: protocol, own, ssl=context), SECONDS_TO_PROVE
            )
        except BaseException:
            own.close()
            raise
        self._know()
        self._transports.add(transport)
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    def stop(self) -> None:
        """Serve nobody any more. Does not wait."""
        self._loop.call_soon_threadsafe(self._serving.cancel)

    def close(self) -> None:
        """`stop`, and return when what was served has ended."""
        with contextlib.suppress(RuntimeError):  # closed before
            self.stop()
        self.join()

    def run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
            for task in (left := asyncio.all_tasks(self._loop)):
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
            for transport in self._transports:  # TLS would wait for the other end
                transport.abort()
            for _ in range(2):  # the loop closes transports in one of its next turns
                self._loop.run_until_complete(asyncio.sleep(0))
        finally:
            self._loop.close()
            self._listener.close()  # also where it was stopped before it had begun to serve


def _close(channel: socket.socket, _: asyncio.Task[None]) -> None:
    channel.close()


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
