"""The rendezvous of the ranks that torchrun has started on one host: over a socket with a name of the job."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from ring_notebook.errors import RingError

__all__ = ["AgentRendezvous"]

_TAKEN = "RING_TORCHRUN_RANK"
"""Set to the process that has taken part, so that its children do not."""
_LIMIT = 120.0
"""Seconds that a rank waits for another one: torchrun starts all at once, and ends them when one exits."""
_CREDENTIALS = struct.Struct("3i")
_LONGEST = 1 << 16
_EXITED = "another rank that torchrun started has exited"


class AgentRendezvous:
    """A rank's side; it looks like `ring_notebook.rank.rendezvous.Rendezvous`, without a supervisor between the ranks.

    Rank 0 listens at a name in Linux's abstract namespace, which no file and no port stands for, and talks to processes
    of its own user alone. All ranks call `send_card` or `receive_card`, and then `wait_for_all`.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        self.rank = rank
        self.size = size
        self._name = f"\0{name}"
        self._channels: list[socket.socket] = []

    @classmethod
    def take(cls, env: Mapping[str, str] = os.environ) -> AgentRendezvous | None:
        """The rendezvous that this process takes part in, once: its children do not. None when there is none.

        There is none on several hosts: these ranks are `ringrun`'s.
        """
        if "TORCHELASTIC_RUN_ID" not in env or env.get("GROUP_WORLD_SIZE") != "1" or _TAKEN in env:
            return None
        os.environ[_TAKEN] = str(os.getpid())
        # Ranks of one start have one parent, and those of a restart another count.
        job = f"{os.getppid()}-{env['TORCHELASTIC_RUN_ID']}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        # Digested, because the name of a socket has 107 bytes, and a user chooses the id of the run.
        name = hashlib.blake2b(job.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), f"ring-notebook-{os.getuid()}-{name}")

    def send_card(self, card: list[int]) -> None:
        """Rank 0: send ``card`` to all other ranks. Raises RingError when they do not come in 120 seconds."""
        deadline = time.monotonic() + _LIMIT
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(self._name)
            except OSError as error:
                raise self._error(f"the name of the job is taken ({error.strerror})") from None
            listener.listen(self.size)
            while len(self._channels) < self.size - 1:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    channel, _ = listener.accept()
                except TimeoutError:
                    raise self._error(
                        f"{self.size - 1 - len(self._channels)} of {self.size} ranks have not "
                        f"come in {_LIMIT:.0f} s; call init() on every rank that torchrun starts"
                    ) from None
                if _user_of(channel) != os.getuid():
                    channel.close()
                    continue
                channel.settimeout(_LIMIT)
                self._channels.append(channel)
        for channel in self._channels:
            self._send(channel, card)

    def receive_card(self) -> list[int]:
        """The card of rank 0. Raises RingError when it does not come, or has exited instead."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(_LIMIT)
        self._channels.append(channel)
        deadline = time.monotonic() + _LIMIT
        while True:
            try:
                channel.connect(self._name)
                break
            except OSError:  # it does not listen yet
                if time.monotonic() > deadline:
                    raise self._error(
                        f"rank 0 has not come in {_LIMIT:.0f} s; call init() on every rank that "
                        "torchrun starts, and in no process that these start"
                    ) from None
                time.sleep(0.01)
        if _user_of(channel) != os.getuid():
            raise self._error("a process of another user has taken the name of the job")
        card = self._receive(channel)
        if not isinstance(card, list) or not all(type(number) is int for number in card):
            raise self._error(f"expected the card of rank 0, got {card!r:.100}")
        return card

    def wait_for_all(self) -> None:
        """Return when all ranks have called this. Raises RingError when one has exited instead."""
        if self.rank == 0:
            for channel in self._channels:
                self._receive(channel)
            for channel in self._channels:
                self._send(channel, True)
        else:
            self._send(self._channels[0], True)
            self._receive(self._channels[0])
        for channel in self._channels:
            channel.close()

    def _send(self, channel: socket.socket, message: Any) -> None:
        try:
            channel.send(json.dumps(message).encode())
        except OSError:
            raise self._error(_EXITED) from None

    def _receive(self, channel: socket.socket) -> Any:
        try:
            return json.loads(channel.recv(_LONGEST))
        except (OSError, RecursionError, ValueError):  # ValueError: it has closed
            raise self._error(_EXITED) from None

    def _error(self, why: str) -> RingError:
        for channel in self._channels:
            channel.close()
        return RingError(f"rank {self.rank} failed to initialize under torchrun: {why}")


def _user_of(channel: socket.socket) -> int:
    """The user of the process at the other end."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user
