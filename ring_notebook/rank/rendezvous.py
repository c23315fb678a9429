"""The rendezvous of the ranks of an elastic job: how ranks of one host that no MPI connects find each other.

Each rank has a socket to its supervisor. Rank 0 sends ``{"card": ...}``, how to map its ring memory; every rank sends
``{"arrived": true}``. The supervisor sends the card to the others, and ``{"complete": true}`` when every rank has
arrived, or ``{"error": why}`` when one never will.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

from ring_notebook.errors import RingError

__all__ = ["Rendezvous", "inherited_socket", "receive", "send", "variables"]

_RANK, _SIZE, _SOCKET = "RING_RANK", "RING_SIZE", "RING_RENDEZVOUS"
_LONGEST = 1 << 16  # bytes of a message


def variables(rank: int, size: int, channel: socket.socket) -> dict[str, str]:
    """The variables that make a process rank ``rank`` of ``size``; it must inherit ``channel``, of SOCK_SEQPACKET."""
    return {_RANK: str(rank), _SIZE: str(size), _SOCKET: str(channel.fileno())}


def send(channel: socket.socket, **message: Any) -> None:
    """Send one message. Raises OSError when the other side has closed, or has read none of many."""
    channel.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def receive(channel: socket.socket) -> dict[str, Any]:
    """The next message; empty when the other side has closed, or has sent something else."""
    try:
        data = channel.recv(_LONGEST)
    except OSError:  # it closed before it had read all messages, or this process has closed the descriptor
        data = b""
    try:
        message = json.loads(data or b"{}")
    except (RecursionError, ValueError):
        message = {}
    return message if isinstance(message, dict) else {}


def inherited_socket(rank: int, descriptor: int, *, shared: bool = False) -> socket.socket:
    """The socket to the supervisor of ``rank``; with ``shared`` another descriptor of it, because others use this one.

    Raises RingError when this process has not inherited it.
    """
    try:
        return socket.socket(fileno=os.dup(descriptor) if shared else descriptor)
    except OSError as error:
        raise RingError(
            f"rank {rank} failed to initialize: the socket to its supervisor, descriptor {descriptor}, is closed "
            f"({error.strerror}); a program between ringrun and this one has closed it: start this one with "
            "`exec`, or with close_fds=False"
        ) from None


class Rendezvous:
    """A rank's side."""

    def __init__(self, rank: int, size: int, channel: socket.socket) -> None:
        self.rank = rank
        self.size = size
        self._channel = channel

    @classmethod
    def take(cls) -> Rendezvous | None:
        """The rendezvous that this process takes part in, once: its children do not. None when there is none.

        Raises RingError when it has not inherited the socket.
        """
        descriptor = os.environ.pop(_SOCKET, "")
        if not descriptor:
            return None
        rank = int(os.environ[_RANK])
        channel = inherited_socket(rank, int(descriptor))
        channel.set_inheritable(False)
        return cls(rank, int(os.environ[_SIZE]), channel)

    def send_card(self, card: list[int]) -> None:
        """Rank 0: send ``card`` to all other ranks."""
        self._send(card=card)

    def receive_card(self) -> list[int]:
        """The card of rank 0. Raises RingError when a rank has exited instead."""
        card = self._receive("card")
        if not isinstance(card, list) or not all(type(number) is int for number in card):
            raise RingError(f"rank {self.rank} failed to initialize: expected the card of rank 0, got {card!r:.100}")
        return card

    def wait_for_all(self) -> None:
        """Arrive, and return when all ranks have. Raises RingError when one has exited instead."""
        self._send(arrived=True)
        self._receive("complete")
        self._channel.close()

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # `_receive` finds out what became of the supervisor
            send(self._channel, **message)

    def _receive(self, key: str) -> Any:
        message = receive(self._channel)
        if key not in message:
            why = message.get("error", "the supervisor of the ranks has exited")
            raise RingError(f"rank {self.rank} failed to initialize: {why}")
        return message[key]
