"""Messages from one rank to another: sent and received in pairs, matched by sender and tag."""

from __future__ import annotations

from typing import Any

from ring_notebook.core.buffers import Buffer
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.native import core
from ring_notebook.core.waits import other_waits
from ring_notebook.core.work import Work

__all__ = ["ANY", "Message", "receive", "send"]

ANY = -1
"""In the place of a source: whichever rank's message comes first."""
_TAGS = 1 << 31


class Message(Work):
    """A message under way. `wait` raises CollectiveMismatch where the other side has another size or dtype."""

    __slots__ = ("_peer", "_ranks", "_sends", "_tag")
    _native: Any

    def __init__(self, native: Any, keep: Buffer, ranks: tuple[int, ...], peer: int, tag: int, sends: bool) -> None:
        """To or from group rank ``peer``; ``ranks`` are those of the group's members."""
        super().__init__(native, keep)
        self._ranks, self._peer, self._tag, self._sends = ranks, peer, tag, sends

    def wait(self, timeout: float | None = None, stream: int | None = None) -> None:
        """As `Work.wait`. The time before the other side has come is this rank's bubble."""
        try:
            if self._native.done():
                self._native.wait()
            else:
                other_waits.message(lambda: self._native.wait(timeout or 0.0), self.title)
        finally:
            self._keep = None
            self.waited = True

    def title(self) -> str:
        """What a timeline calls it: "receive from rank 0, tag 3"."""
        source = self.source()
        peer = source if source >= 0 else self._peer
        rank = "any rank" if peer == ANY else f"rank {self._ranks[peer]}"
        return f"{'send to' if self._sends else 'receive from'} {rank}, tag {self._tag}"

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
    return _started(communicator, Message(native, buffer, communicator.ranks, to, tag, True), blocking)


def receive(
    communicator: Communicator, buffer: Buffer, source: int = ANY, *, tag: int = 0, blocking: bool = True
) -> Message:
    """Receive into ``buffer`` what group rank ``source`` sends with this tag, or `ANY` rank."""
    _check_tag(communicator, tag)
    native = core().receive(
        communicator._native, buffer.address, buffer.count, buffer.dtype, source, tag, communicator._timeout, blocking
    )
    return _started(communicator, Message(native, buffer, communicator.ranks, source, tag, False), blocking)


def _check_tag(communicator: Communicator, tag: int) -> None:
    if not 0 <= tag < _TAGS:
        rank = communicator.ranks[communicator.rank]
        raise ValueError(f"rank {rank}: the tag of a message must be between 0 and {_TAGS - 1}, got {tag}")


def _started(communicator: Communicator, message: Message, blocking: bool) -> Message:
    if blocking:
        message.wait()
    else:
        communicator._held.hold(message)
    return message
