"""The TCP connections between ranks of several hosts: made when they are needed, between ranks that prove who they are.

Each rank listens on one port of the interface that leads to the other hosts. Who connects and who accepts prove to each
other that they know the secret of the job (HMAC-SHA256 of fresh random numbers, of both ranks and of the direction),
before any message passes. Of two ranks that connect to each other at once the lower one prevails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from ring_notebook import verdict
from ring_notebook.config import config
from ring_notebook.rank.rendezvous_server import DIGEST, MOST_STRANGERS, Serving, prove

if TYPE_CHECKING:
    from ring_notebook import _core

_MAGIC = b"ring-notebook 1\n"
_FRONT = struct.Struct(f"!{len(_MAGIC)}sii32s")  # the rank that connects, the one that it means, its random number
_ACCEPTED, _REFUSED = b"+", b"-"
_SECONDS_TO_PROVE = 10.0
"""For a caller to say who it is; others may connect meanwhile."""
_SECONDS_TO_CONNECT = 30.0
_PAUSE = 0.1  # seconds between attempts
_SECONDS_TO_FLUSH = 0.005
_PROBES = 5  # without an answer, until a host counts as lost


def listen(own: str = "") -> socket.socket:
    """A socket that listens on the interface to the other hosts, on a port that the kernel chooses.

    The interface is the first of these that is known: RING_INTERFACE; GLOO_SOCKET_IFNAME, which the job sets; that of
    the address ``own``; that of this host's name, as when a job of one host grows to others. Raises OSError when it has
    no address.
    """
    found = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    name = config().interface or ("" if found == "lo" else found)  # what a job found on one host leads nowhere else
    address = _address_of(name) if name else own or socket.gethostbyname(socket.gethostname())
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(MOST_STRANGERS)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _address_of(interface: str) -> str:
    """Of IPv4 where there is one."""
    known = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in known:
            if one.family == family and not one.address.startswith("fe80"):  # which needs to be told the interface
                return str(one.address)
    raise OSError(f"the network interface {interface!r} has no address here; RING_INTERFACE names another one")


class TcpConnections(Serving):
    """Gives ``link`` the connections that it asks for and those that others ask this ``rank`` for, until `stop`.

    ``addresses`` are host and port of every rank's listener, this one's ``listener`` included; ``key`` is the secret.
    """

    def __init__(
        self,
        link: _core.TcpLink,
        rank: int,
        listener: socket.socket,
        addresses: Sequence[tuple[str, int]],
        key: bytes,
    ) -> None:
        self._link = link
        self._rank = rank
        self._addresses = addresses
        self._key = key
        self._connected: set[int] = set()
        self._calling: dict[int, asyncio.Task[None]] = {}
        self._flushing: asyncio.TimerHandle | None = None
        super().__init__("ring-connections", listener)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.attention_fd, self._attend)
        answers: set[asyncio.Task[None]] = set()
        while True:
            try:
                channel, address = await self._accept()
            except OSError:  # out of descriptors, or the caller has gone
                await asyncio.sleep(_PAUSE)
                continue
            answer = asyncio.create_task(self._answer(channel))
            answer.add_done_callback(functools.partial(_close, channel))  # also when it is cancelled before it begins
            answers.add(answer)
            answer.add_done_callback(answers.discard)
            self._strangers.add(answer, address)
            answer.add_done_callback(self._strangers.discard)
            await asyncio.sleep(0)  # callers that never cease leave the others their turn

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

    def _attend(self) -> None:
        if self._flushing is None:
            self._flush()
        for rank in self._link.take_wanted():
            if rank not in self._connected and rank not in self._calling:
                self._calling[rank] = asyncio.create_task(self._call(rank))

    def _flush(self) -> None:
        """Send the rest of what was given up half sent, though nobody waits for it."""
        again = self._link.flush()
        self._flushing = self._loop.call_later(_SECONDS_TO_FLUSH, self._flush) if again else None

    async def _call(self, rank: int) -> None:
        """Connect to ``rank``, unless it connects to this one meanwhile."""
        clock = asyncio.get_running_loop().time
        until, why = clock() + _SECONDS_TO_CONNECT, "no answer"
        while rank not in self._connected and clock() < until:
            attempt = asyncio.create_task(self._try(rank))
            try:
                if channel := await asyncio.wait_for(attempt, until - clock()):
                    self._connected.add(rank)
                    self._hand_over(rank, channel)
                    break
            except asyncio.TimeoutError:
                break
            except asyncio.CancelledError:  # wait_for drops what the attempt has just brought
                attempt.add_done_callback(_close_result)
                raise
            except (OSError, EOFError) as error:
                why = getattr(error, "strerror", None) or str(error)
            await asyncio.sleep(_PAUSE)
        del self._calling[rank]
        if rank not in self._connected:
            host, port = self._addresses[rank]
            self._link.unreachable(
                rank,
                f"cannot be reached at {host}, port {port}, within {_SECONDS_TO_CONNECT:g} s ({why}). Does a firewall "
                "keep the hosts apart? RING_INTERFACE names another interface, and RING_TRANSPORT=mpi uses MPI instead",
            )

    async def _try(self, rank: int) -> socket.socket | None:
        """A connection to ``rank``; None where it prefers its own to this one."""
        loop = asyncio.get_running_loop()
        host, port = self._addresses[rank]
        channel = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            channel.setblocking(False)
            await loop.sock_connect(channel, (host, port))
            front = _FRONT.pack(_MAGIC, self._rank, rank, secrets.token_bytes(DIGEST))
            await loop.sock_sendall(channel, front)
            challenge = await _read(channel, DIGEST)
            if not hmac.compare_digest(await _read(channel, DIGEST), prove(self._key, b"accept", front, challenge)):
                raise OSError("another program answers there")
            await loop.sock_sendall(channel, prove(self._key, b"connect", front, challenge))
            if await _read(channel, 1) == _ACCEPTED:
                return channel
        except BaseException:
            channel.close()
            raise
        channel.close()
        return None

    async def _answer(self, channel: socket.socket) -> None:
        """A process has connected: find out whether it is a rank of the job.

        The caller closes ``channel`` at the end of the task: what the link was given is detached from it.
        """
        channel.setblocking(False)
        try:
            rank = await asyncio.wait_for(self._find_out(channel), _SECONDS_TO_PROVE)
        except (OSError, EOFError, asyncio.TimeoutError):
            return
        task = asyncio.current_task()
        assert task is not None
        self._strangers.discard(task)
        # Of two calls that cross, that of the lower rank prevails. What is decided here holds for both sides.
        wins = rank not in self._connected and not (rank in self._calling and self._rank < rank)
        if wins:
            self._connected.add(rank)
        try:
            await asyncio.get_running_loop().sock_sendall(channel, _ACCEPTED if wins else _REFUSED)
        except OSError:
            self._connected.difference_update({rank} if wins else ())
            wins = False
        if wins:
            self._hand_over(rank, channel)

    async def _find_out(self, channel: socket.socket) -> int:
        """The rank at the other end, which has proven that it knows the key. Raises OSError where it is none."""
        front = await _read(channel, _FRONT.size)
        magic, rank, meant, _ = _FRONT.unpack(front)
        if magic != _MAGIC or meant != self._rank or not 0 <= rank < len(self._addresses) or rank == meant:
            raise OSError("no rank of this job")
        challenge = secrets.token_bytes(DIGEST)
        proof = prove(self._key, b"accept", front, challenge)
        await asyncio.get_running_loop().sock_sendall(channel, challenge + proof)
        if not hmac.compare_digest(await _read(channel, DIGEST), prove(self._key, b"connect", front, challenge)):
            raise OSError("no rank of this job")
        return int(rank)

    def _hand_over(self, rank: int, channel: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other side has gone already, which the link finds out
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that has vanished closes nothing: it is given up when it has been silent, as its agent is.
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                channel.setsockopt(socket.IPPROTO_TCP, option, max(1, int(verdict.SILENCE / (_PROBES + 1))))
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * verdict.SILENCE))
        self._link.connected(rank, channel.detach())


def _close(channel: socket.socket, _: asyncio.Task[None]) -> None:
    channel.close()


def _close_result(attempt: asyncio.Task[socket.socket | None]) -> None:
    if not attempt.cancelled() and not attempt.exception() and (channel := attempt.result()) is not None:
        channel.close()


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _read(channel: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        piece = await loop.sock_recv(channel, size - len(data))
        if not piece:
            raise EOFError("it has closed the connection")
        data += piece
    return data
