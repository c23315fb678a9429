"""The sockets between a supervisor and its ranks, for our rendezvous and MPI's."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

from ring_notebook.launch.connections.mpi_host import ALONE, MpiHost
from ring_notebook.launch.connections.pmi import PmiServer, lines
from ring_notebook.rank.rank_status import RankStatus

_CAPACITY = 1 << 16
_MOST_UNSENT = 1 << 24  # bytes


def new_job_name() -> str:
    """A name that no other job has on any host, and that nobody can guess."""
    return f"ring-{os.getpid()}-{secrets.token_hex(8)}"


class Unsent(dict[int, bytes]):
    """Bytes that the sockets of ranks have not taken yet, by rank.

    A rank that asks without reading gets no answers beyond `_MOST_UNSENT` bytes.
    """

    def send(self, rank: int, channel: socket.socket, more: bytes = b"") -> None:
        """Send what there is for ``rank``, and then ``more``, as much as ``channel`` takes now."""
        data = self.pop(rank, b"")
        data += more if len(data) < _MOST_UNSENT else b""
        with contextlib.suppress(OSError):  # the reader has gone
            with contextlib.suppress(BlockingIOError):
                data = data[channel.send(data, socket.MSG_DONTWAIT) :] if data else data
            if data:
                self[rank] = data


class Connections:
    """One socket to each rank; ``places`` is the number of each rank's host, by rank.

    MPICH is served too, unless the job is ``elastic``: MPI does not survive the death of a rank. ``network`` has
    variables for its ranks on this host. ``job`` is a name that no other job of their hosts has.
    """

    def __init__(
        self, job: str, places: Sequence[int], network: Mapping[str, str] = ALONE, elastic: bool = False
    ) -> None:
        self.size = len(places)
        """The number of ranks; `resize` changes it."""
        self._elastic = elastic
        self._channels: dict[int, socket.socket] = {}
        self.unsent = Unsent()
        """Answers that wait. When the socket of a rank can be written to, `receive` sends more."""
        self._pmi = PmiServer(job, places, elastic)
        self.gathering = self._pmi.gathering
        """What the ranks have told each other, and who of them has formed."""
        self._host = MpiHost(job, max(Counter(places).values()), network, elastic)

    def resize(self, size: int) -> None:
        """The job has ``size`` ranks from its next formation on. MPI keeps those that it began with."""
        self.size = size
        self.gathering.resize(size)

    def dismiss(self, ranks: set[int]) -> None:
        """Have these ranks leave the elastic job at its next formation."""
        self._reply(lines(self.gathering.dismiss(ranks)))

    def pair(self, rank: int) -> tuple[socket.socket, socket.socket]:
        """A new socket for the process of ``rank``: our end, and the end that it must inherit."""
        ours, theirs = socket.socketpair()
        self._channels[rank] = ours
        self.unsent.pop(rank, None)
        self._pmi.started(rank)
        return ours, theirs

    def close(self) -> None:
        """All ranks have exited."""
        for channel in self._channels.values():
            channel.close()
        self._host.close()

    def variables(self, size: int, rank: int, channel: socket.socket, formation: int) -> dict[str, str]:
        """The variables that tell ``rank`` its socket, and a process that joins a running job its ``formation``."""
        return self._host.variables(size, rank, channel, formation)

    def take_abort(self, rank: int) -> int | None:
        """The exit code of ``rank``'s MPI_Abort, returned once; None if it has called none."""
        return self._pmi.aborted.pop(rank, None)

    def receive(self, rank: int) -> bool:
        """Read what ``rank`` has sent and answer. Returns False when it will send no more."""
        self.unsent.send(rank, self._channels[rank])
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
            self.unsent.send(to, self._channels[to], reply)

    def exited(self, rank: int, how: str) -> None:
        while rank in self._channels and self._has_data(rank) and self.receive(rank):
            pass  # its MPI_Finalize may still lie in the socket
        self._reply(lines(self.gathering.exited(rank, how)))

    def _has_data(self, rank: int) -> bool:
        try:
            return bool(self._channels[rank].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def deserters(self, exited: Mapping[int, RankStatus]) -> set[int]:
        """The ranks that ``exited`` with 0 although others still need them."""
        if self._elastic:
            return self.gathering.left_out
        # Once one rank uses MPI, every other one has to: it waits for them when it starts and when it ends.
        used = self._pmi.initialized
        return {
            rank for rank, status in exited.items() if status.left_early or (used and rank not in self._pmi.finalized)
        }
