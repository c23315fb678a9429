"""Messages from one rank to another: sent and received in pairs, matched by sender and tag."""

from __future__ import annotations

from typing import Any

from ring_notebook.core.buffers import Buffer
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.native import core
from ring_notebook.core.work import Work

__all__ = ["ANY", "Message", "receive", "send"]

ANY = -1
"""In the place of a source: whichever rank's message comes first."""
_TAGS = 1 << 31


class Message(Work):
    """A message under way. `wait` raises CollectiveMismatch where the other side has another size or dtype."""

    __slots__ = ()
    _native: Any

    def source(self) -> int:
        """The group rank that a received message came from; -1 before it has arrived, and of one that was sent."""
        return int(self._native.source())


def send(communicator: Communicator, buffer: Buffer, to: int, *, tag: int = 0, blocking: bool = True) -> Message:
    """Send ``buffer`` to group rank ``to``.

    Messages to one rank with one tag arrive in the order in which they are sent. Up to 64 KiB are copied, and the
    message is complete at once; a larger one is complete when it has been received. Where a receiver has refused a
    small one for its size or dtype, a later call raises CollectiveMismatch, on one host the next one. Other errors are
    those of `Communicator`.
    """
    _check_tag(communicator, tag)
    native = core().send(
        communicator._native, buffer.address, buffer.count, buffer.dtype, to, tag, communicator._timeout, blocking
    )
    return _started(communicator, native, buffer, blocking)


def receive(
    communicator: Communicator, buffer: Buffer, source: int = ANY, *, tag: int = 0, blocking: bool = True
) -> Message:
    """Receive into ``buffer`` what group rank ``source`` sends with this tag, or `ANY` rank."""
    _check_tag(communicator, tag)
    native = core().receive(
        communicator._native, buffer.address, buffer.count, buffer.dtype, source, tag, communicator._timeout, blocking
    )
    return _started(communicator, native, buffer, blocking)


def _check_tag(communicator: Communicator, tag: int) -> None:
    if not 0 <= tag < _TAGS:
        rank = communicator.ranks[communicator.rank]
        raise ValueError(f"rank {rank}: the tag of a message must be between 0 and {_TAGS - 1}, got {tag}")


def _started(communicator: Communicator, native: Any, buffer: Buffer, blocking: bool) -> Message:
    message = Message(native, buffer)
    if blocking:
        message.wait()
    else:
        communicator._held.hold(message)
    return message
