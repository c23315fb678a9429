"""The TCP connections between ranks of several hosts: made when they are needed, between ranks that prove who they are.

Each rank listens on one port of the interface that leads to the other hosts. Both ends prove by TLS that they know the
secret of the job, and name their ranks, before any message passes. Tensors then pass unencrypted. If two ranks connect
to each other at once, the lower rank's connection stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from ring_notebook.analysis import time_limits
from ring_notebook.config import config
from ring_notebook.rank.rendezvous_server import is_loopback
from ring_notebook.rank.secure_streams import ProvingChannel, tls_of_secret
from ring_notebook.rank.serving import MOST_STRANGERS, SECONDS_TO_PROVE, Serving

if TYPE_CHECKING:
    from ring_notebook import _core

_FRONT = struct.Struct("!ii")  # the rank that connects, and the one that it means
_ACCEPTED, _REFUSED = b"+", b"-"
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
    name = config().interface or ("" if found == "lo" else found)  # lo, found by a job of one host, leads nowhere else
    address = _address_of(name) if name else own or _address_of_this_host()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=MOST_STRANGERS)
    listener.setblocking(False)
    return listener


def _address_of_this_host() -> str:
    """The address of this host's name, IPv4 if there is one.

    If that is loopback, as after the installers of Debian and Ubuntu, the one on the default route, else any other.
    """
    found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    address = str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
    if not is_loopback(address):
        return address
    others = [_address_on_default_route()]
    for interface in psutil.net_if_addrs():
        with contextlib.suppress(OSError):
            others.append(_address_of(interface))
    return next((other for other in others if other and not is_loopback(other)), address)


def _address_on_default_route() -> str:
    """The address with which this host would reach one that no host has; empty without such a route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def _address_of(interface: str) -> str:
    """The address of ``interface``, IPv4 if there is one."""
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
        self._as_client, self._as_server = (tls_of_secret(key, server=server) for server in (False, True))
        self._connected: set[int] = set()
        self._calling: dict[int, asyncio.Task[None]] = {}
        self._flushing: asyncio.TimerHandle | None = None
        super().__init__("ring-connections", listener)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.attention_fd, self._attend)
        await super()._serve()

    def _attend(self) -> None:
        if self._flushing is None:
            self._flush()
        for rank in self._link.take_wanted():
            if rank not in self._connected and rank not in self._calling:
                self._calling[rank] = asyncio.create_task(self._call(rank))

    def _flush(self) -> None:
        """Send the rest of abandoned messages that are half sent."""
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
            except ssl.SSLError:
                why = "another program answers there"
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
            proving = ProvingChannel(channel, self._as_client, server=False)
            await proving.meet()
            await proving.say(_FRONT.pack(self._rank, rank))
            if await proving.hear(1) == _ACCEPTED:
                await proving.leave()
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
        proving = ProvingChannel(channel, self._as_server, server=True)
        try:
            rank = await asyncio.wait_for(self._find_out(proving), SECONDS_TO_PROVE)
        except (OSError, EOFError, asyncio.TimeoutError):
            return
        self._know()
        # Of two calls that cross, that of the lower rank prevails. What is decided here holds for both sides.
        wins = rank not in self._connected and not (rank in self._calling and self._rank < rank)
        if wins:
            self._connected.add(rank)
        try:
            await proving.say(_ACCEPTED if wins else _REFUSED)
            if wins:
                await asyncio.wait_for(proving.leave(), SECONDS_TO_PROVE)
        except (OSError, EOFError, asyncio.TimeoutError):
            self._connected.difference_update({rank} if wins else ())
            wins = False
        if wins:
            self._hand_over(rank, channel)

    async def _find_out(self, proving: ProvingChannel) -> int:
        """The rank at the other end, which has proven that it knows the key. Raises OSError where it is none."""
        await proving.meet()
        rank, meant = _FRONT.unpack(await proving.hear(_FRONT.size))
        if meant != self._rank or not 0 <= rank < len(self._addresses) or rank == meant:
            raise OSError("no rank of this job")
        return int(rank)

    def _hand_over(self, rank: int, channel: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other side has gone already, which the link finds out
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that has vanished closes nothing: it is given up when it has been silent, as its agent is.
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                channel.setsockopt(socket.IPPROTO_TCP, option, max(1, int(time_limits.SILENCE / (_PROBES + 1))))
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * time_limits.SILENCE))
        self._link.connected(rank, channel.detach())


def _close_result(attempt: asyncio.Task[socket.socket | None]) -> None:
    if not attempt.cancelled() and not attempt.exception() and (channel := attempt.result()) is not None:
        channel.close()
