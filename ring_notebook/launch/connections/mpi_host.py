"""What ranks of one host need to find the others, and what MPICH leaves there, names in /dev/shm."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from ring_notebook.launch.connections import pmi
from ring_notebook.launch.connections.shared_memory import FOLDER, Cleaner, claim_folder, remove_abandoned
from ring_notebook.rank import rendezvous
from ring_notebook.rank.rank_variables import STARTED_AGAIN

ALONE: Mapping[str, str] = {"UCX_TLS": "self,sm"}
"""The transports of ranks on one host. UCX, MPICH's transport, listens on all interfaces unless it stays within one."""


class MpiHost:
    """The ranks of ``job`` on this host, with variables for their ``network``; those of an ``elastic`` job have no MPI.

    ``at_death`` is called when this process dies before `close`. Create it before this process has threads.
    """

    def __init__(
        self, job: str, network: Mapping[str, str], elastic: bool = False, at_death: Callable[[], None] | None = None
    ) -> None:
        remove_abandoned()
        self._claim = claim_folder(job)
        self._cleaner = Cleaner((*pmi.shared_memory_prefixes(job), job), self._claim, at_death)
        self._network = network
        self._elastic = elastic
        self._folder = FOLDER / job

    def variables(self, size: int, rank: int, channel: socket.socket, again: bool) -> dict[str, str]:
        """Those that make a process rank ``rank`` of ``size``, which must inherit ``channel``; ``again`` has no MPI."""
        descriptor = channel.fileno()  # one socket for our rendezvous and for MPI's
        found = {**rendezvous.variables(rank, size, descriptor), **self._network}
        if self._elastic or again:
            return {**found, STARTED_AGAIN: "1"} if again else found
        # What UCX names while it starts would outlive ranks that are killed then.
        return {**found, **pmi.variables(rank, size, descriptor), "UCX_POSIX_DIR": str(self._folder)}

    def close(self) -> None:
        """All ranks have exited: remove what they have named."""
        self._cleaner.close()
        os.close(self._claim)
