"""How ranks of one host that no MPI started find each other: through a socket to the process that keeps them.

A rank says ``{"card": ...}`` (rank 0 only: how to map its ring memory) and ``{"here": true}``. The keeper hands the
card on, and says ``{"all": true}`` when every rank is here, or ``{"lost": why}`` when one never will be.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

from ring_notebook.errors import RingError

__all__ = ["Meeting", "receive", "say", "surroundings"]

_RANK, _SIZE, _SOCKET = "RING_RANK", "RING_SIZE", "RING_MEETING"
_MOST = 1 << 16  # bytes of a message


def surroundings(rank: int, size: int, channel: socket.socket) -> dict[str, str]:
    """The variables that make a process rank ``rank`` of ``size``; it must inherit ``channel``, of SOCK_SEQPACKET."""
    return {_RANK: str(rank), _SIZE: str(size), _SOCKET: str(channel.fileno())}


def say(channel: socket.socket, **message: Any) -> None:
    """Send one message. Raises OSError when nobody is left to hear it."""
    channel.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)


def receive(channel: socket.socket) -> dict[str, Any]:
    """The next message; empty when the other side has closed."""
    try:
        data = channel.recv(_MOST)
    except ConnectionResetError:  # it ended before it had read all that was said to it
        data = b""
    message: dict[str, Any] = json.loads(data) if data else {}
    return message


class Meeting:
    """A rank's side of the meeting."""

    def __init__(self, rank: int, size: int, channel: socket.socket) -> None:
        self.rank = rank
        self.size = size
        self._channel = channel

    @classmethod
    def take(cls) -> Meeting | None:
        """The meeting that this process was invited to, once: its children are not. None when there is none."""
        descriptor = os.environ.pop(_SOCKET, "")
        if not descriptor:
            return None
        channel = socket.socket(fileno=int(descriptor))
        channel.set_inheritable(False)
        return cls(int(os.environ[_RANK]), int(os.environ[_SIZE]), channel)

    def give(self, card: list[int]) -> None:
        """Rank 0: hand ``card`` to all others."""
        self._say(card=card)

    def card(self) -> list[int]:
        """What rank 0 gave. Raises RingError when it has ended instead."""
        card: list[int] = self._hear("card")
        return card

    def wait_for_all(self) -> None:
        """Say that this rank is here and return when all are. Raises RingError when one has ended instead."""
        self._say(here=True)
        self._hear("all")
        self._channel.close()

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # what became of the keeper is heard below
            say(self._channel, **message)

    def _hear(self, word: str) -> Any:
        message = receive(self._channel)
        if word not in message:
            why = message.get("lost", "the process that started the ranks is gone")
            raise RingError(f"rank {self.rank} cannot begin: {why}")
        return message[word]
