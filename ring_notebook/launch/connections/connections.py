"""The sockets between a supervisor and its ranks, through which the ranks find each other: by MPI, or without it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ring_notebook.launch.connections import pmi
from ring_notebook.launch.connections.mpi_host import ALONE, MpiHost
from ring_notebook.rank import rendezvous
from ring_notebook.rank.rank_status import RankStatus

__all__ = ["Connections", "MpiConnections", "RendezvousConnections", "new_job_name"]

_CAPACITY = 1 << 16


class Connections(ABC):
    """One socket to each of ``size`` ranks."""

    def __init__(self, size: int, kind: socket.SocketKind) -> None:
        self.error = ""
        """Why the ranks will never find each other."""
        self._size = size
        self._kind = kind
        self._channels: dict[int, socket.socket] = {}

    def pair(self, rank: int) -> tuple[socket.socket, socket.socket]:
        """A new socket to ``rank``: our end, and the one that it has to inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, self._kind)
        self._channels[rank] = ours
        return ours, theirs

    def close(self) -> None:
        """All ranks have exited."""
        for channel in self._channels.values():
            channel.close()

    @abstractmethod
    def variables(self, rank: int, channel: socket.socket) -> dict[str, str]:
        """Those that tell ``rank`` of its socket."""

    @abstractmethod
    def receive(self, rank: int) -> bool:
        """Read what ``rank`` has sent and answer. Returns False when it will send no more."""

    def take_abort(self, rank: int) -> int | None:
        """The exit code with which ``rank`` has asked to end the whole job, once; None when it has not."""
        return None

    @abstractmethod
    def exited(self, rank: int, how: str) -> None:
        """Rank ``rank`` has exited."""

    @abstractmethod
    def deserters(self, exited: Sequence[int], statuses: Sequence[RankStatus]) -> set[int]:
        """Those of the ranks that ``exited`` with 0 which others still need; ``statuses`` are those of all ranks."""


def new_job_name() -> str:
    """A name that no other job has on any host, and that nobody can guess."""
    return f"ring-{os.getpid()}-{secrets.token_hex(8)}"


class MpiConnections(Connections):
    """The ranks of MPICH, served by PMI-1; ``job`` is a name that no other job of their hosts has.

    ``places`` is the number of each rank's host, by rank; ``network`` has variables for the ranks of this host.
    """

    def __init__(self, job: str, places: Sequence[int], network: Mapping[str, str] = ALONE) -> None:
        super().__init__(len(places), socket.SOCK_STREAM)
        self._pmi = pmi.PmiServer(job, places)
        self._host = MpiHost(job, network)

    def variables(self, rank: int, channel: socket.socket) -> dict[str, str]:
        return self._host.variables(self._size, rank, channel)

    def take_abort(self, rank: int) -> int | None:
        return self._pmi.aborted.pop(rank, None)

    def receive(self, rank: int) -> bool:
        try:
            data = self._channels[rank].recv(_CAPACITY, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        try:
            self._reply(self._pmi.receive(rank, data))
        except ValueError:
            return False
        return bool(data)

    def _reply(self, replies: Mapping[int, bytes]) -> None:
        for to, reply in replies.items():
            with contextlib.suppress(OSError):  # it has exited, or it asks without end and reads no answer
                self._channels[to].sendall(reply, socket.MSG_DONTWAIT)

    def exited(self, rank: int, how: str) -> None:
        while rank in self._channels and self._has_data(rank) and self.receive(rank):
            pass  # whether it has finalized may still lie in the socket
        self._reply({to: f"{line}\n".encode() for to, line in self._pmi.exited(rank, how).items()})

    def _has_data(self, rank: int) -> bool:
        try:
            return bool(self._channels[rank].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def deserters(self, exited: Sequence[int], statuses: Sequence[RankStatus]) -> set[int]:
        # Once one rank uses MPI, every other one has to: it waits for them when it starts and when it ends.
        used = self._pmi.initialized
        return {rank for rank in exited if statuses[rank].left_early or (used and rank not in self._pmi.finalized)}

    def close(self) -> None:
        super().close()
        self._host.close()


class RendezvousConnections(Connections):
    """The ranks of an elastic job, which map one another's memory without MPI."""

    def __init__(self, size: int) -> None:
        super().__init__(size, socket.SOCK_SEQPACKET)
        self._arrived: set[int] = set()

    def variables(self, rank: int, channel: socket.socket) -> dict[str, str]:
        return rendezvous.variables(rank, self._size, channel)

    def receive(self, rank: int) -> bool:
        message = rendezvous.receive(self._channels[rank])
        if not message:  # the rendezvous is complete, or the rank has exited
            del self._channels[rank]
            return False
        if "card" in message:
            self._send_all([other for other in self._channels if other != 0], card=message["card"])
        elif "arrived" in message:
            self._arrived.add(rank)
            if len(self._arrived) == self._size:
                self._send_all(self._channels, complete=True)
        return True

    def exited(self, rank: int, how: str) -> None:
        if len(self._arrived) < self._size and not self.error:
            # Ranks that wait for it in init() must not wait for ever.
            self.error = f"rank {rank} exited ({how}) before all ranks had called init()"
            self._send_all(self._channels, error=self.error)

    def deserters(self, exited: Sequence[int], statuses: Sequence[RankStatus]) -> set[int]:
        return set().union(*(status.lost for status in statuses))

    def _send_all(self, ranks: Sequence[int] | dict[int, socket.socket], **message: object) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):
                rendezvous.send(self._channels[rank], **message)
