"""The rendezvous of ranks on several hosts: each tells all others something, through the supervisor of the job.

A rank sends a line ``cmd=ring_gather value=JSON`` on the socket that PMI uses too. When all ranks have sent one, each
gets ``cmd=ring_gathered value=JSON``: what all have sent, by rank, and what the job has for its ranks.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from ring_notebook.errors import RingError
from ring_notebook.rank.rendezvous import inherited_socket

__all__ = ["GATHER", "GATHERED", "HOSTS", "HostsRendezvous"]

HOSTS = "RING_HOSTS"
"""The variable that tells a rank of this rendezvous: the number of each rank's host, such as ``0,0,1,1``."""
GATHER, GATHERED = "ring_gather", "ring_gathered"
_CAPACITY = 1 << 16


class HostsRendezvous:
    """A rank's side. ``hosts[r]`` is the number of the host of rank r."""

    def __init__(self, rank: int, hosts: tuple[int, ...], channel: socket.socket) -> None:
        self.rank = rank
        self.hosts = hosts
        self.key = b""
        """A secret of the job's ranks, once they have gathered something."""
        self._channel = channel

    @classmethod
    def take(cls, env: Mapping[str, str] = os.environ) -> HostsRendezvous | None:
        """The rendezvous that this process takes part in, once: its children do not. None when there is none.

        Raises RingError when it has not inherited the socket.
        """
        hosts = env.get(HOSTS, "")
        if not hosts:
            return None
        os.environ.pop(HOSTS, None)
        rank = int(env["PMI_RANK"])
        channel = inherited_socket(rank, int(env["PMI_FD"]), shared=True)  # MPI uses it when the program imports it
        return cls(rank, tuple(map(int, hosts.split(","))), channel)

    def gather(self, value: Any) -> list[Any]:
        """Tell all ranks ``value``, which JSON can hold; returns what each has told, by rank.

        Collective over all ranks of the job. Raises RingError when one has exited instead.
        """
        told: dict[str, Any] = {}
        try:
            self._channel.sendall(f"cmd={GATHER} value={json.dumps(value)}\n".encode())
            line = self._read_line()
            told = json.loads(line.partition(b" value=")[2]) if line.startswith(f"cmd={GATHERED} ".encode()) else {}
        except (OSError, RecursionError, ValueError):
            pass
        if not isinstance(told, dict) or "values" not in told:
            why = told.get("error") if isinstance(told, dict) else None
            raise RingError(f"rank {self.rank} failed to initialize: {why or 'the supervisor of the ranks has exited'}")
        self.key = bytes.fromhex(told["key"])
        values: list[Any] = told["values"]
        return values

    def gather_or_raise(self, value: Any, error: Exception | None) -> list[Any]:
        """`gather`, where one of the ranks may have failed before it: then all raise. Raises ``error`` here, if given.

        A rank that raised alone would leave the others waiting for it.
        """
        failure = error and f"rank {self.rank} raised {type(error).__name__}: {error}"
        told = self.gather([value, failure])
        if error is not None:
            raise error
        for _, failure in told:
            if failure is not None:
                raise RingError(f"rank {self.rank} failed to initialize: {failure}")
        return [value for value, _ in told]

    def close(self) -> None:
        """This rank gathers nothing more."""
        self._channel.close()

    def _read_line(self) -> bytes:
        """The next line; the supervisor sends none that was not asked for."""
        data = b""
        while not data.endswith(b"\n"):
            piece = self._channel.recv(_CAPACITY)
            if not piece:
                raise ValueError("the supervisor has closed the connection")
            data += piece
        return data
