"""Averages differences over ranks: as they are, in another floating point type, or as bytes with error feedback.

As bytes, the ranks of a host first add theirs up in its memory. Then the first rank of each host, its leader, sends a
chunk of the sum to each other leader, adds up the chunks that it gets, and sends the average of its own chunk to all:

    differences of a host -> sum | leaders: pack, alltoall, add | pack, allgather, unpack | -> all ranks of the host

What rounding took away at each of the two packings is added before the same packing next time. On one host every rank
is a leader.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction
from ring_notebook.api.handles import Waitable
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.work import Work
from ring_notebook.torch.collectives.allreduce import start
from ring_notebook.torch.compression import Compressor, Int8Compression
from ring_notebook.torch.tensors import buffer_of, from_bytes

Averaging = Generator[Waitable, None, list[Tensor]]
"""Yields each operation to wait for, and returns the averages."""


class Average:
    """An average under way; `advance` takes it as far as it has come, `finish` to its end."""

    def __init__(self, steps: Averaging) -> None:
        self._steps = steps
        self._waits: Waitable | None = None
        self._result: list[Tensor] = []
        self._go_on()

    def advance(self) -> None:
        """Begin what follows the operations that have ended. Raises their errors."""
        while self._waits is not None and self._waits.done():
            self._waits.wait()
            self._go_on()

    def finish(self) -> list[Tensor]:
        """Wait for the averages, in the order of the differences. Raises the errors of a collective."""
        while self._waits is not None:
            self._waits.wait()
            self._go_on()
        return self._result

    def _go_on(self) -> None:
        try:
            self._waits = next(self._steps)
        except StopIteration as end:
            self._waits, self._result = None, end.value


def in_floats(
    differences: Sequence[Tensor],
    how: Reduction,
    compression: Compressor,
    besides: Besides,
    name: str,
    blocking: bool,
) -> Averaging:
    """The averages by one allreduce. ``blocking`` reduces at once; otherwise ranks match it by ``name``."""
    pairs = [compression.compress(one) for one in differences]
    besides.nbytes = sum(wire.numel() * wire.element_size() for wire, _ in pairs)
    yield start([wire for wire, _ in pairs], how, name, blocking=blocking, claim=False)
    return [compression.decompress(wire, ctx) for wire, ctx in pairs]


@dataclass
class Feedback:
    """What rounding has taken from the sum of this host, and from the average of this leader's chunk."""

    sent: Tensor
    averaged: Tensor

    def fits(self, sent: int, averaged: int) -> bool:
        """Whether it belongs to vectors of so many elements; else the hosts or the model have changed."""
        return (self.sent.numel(), self.averaged.numel()) == (sent, averaged)


@dataclass
class Besides:
    """What comes with averages: the feedback, replaced by the next one, and the bytes of the differences as sent."""

    feedback: Feedback | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class ByteGroups:
    """The ranks of this host where there are several hosts, and the leaders, None on another rank."""

    mates: Communicator | None
    leaders: Communicator | None
    ranks: int

    @classmethod
    def of(cls, communicator: Communicator) -> ByteGroups:
        """Those of a group; all of its ranks call this."""
        mates, leaders = communicator.mates(), communicator.leaders()
        return cls(None if mates is communicator else mates, leaders, communicator.size)


def in_bytes(
    differences: Sequence[Tensor],
    groups: ByteGroups,
    compression: Int8Compression,
    besides: Besides,
    name: str,
    blocking: bool,
) -> Averaging:
    """The averages of differences that are sent as bytes. ``besides`` gets a feedback on leaders only."""
    total = torch.cat([one.reshape(-1).to("cpu", torch.float32) for one in differences])
    mates, leaders = groups.mates, groups.leaders
    before, besides.feedback = besides.feedback, None
    _, besides.nbytes = compression.sizes(total.numel())
    if mates is not None:
        own = buffer_of(total)
        yield mates.allreduce([own], [own], op=ReduceOp.SUM, name=f"{name}, host", blocking=blocking)
    if leaders is not None:
        chunk, size = compression.sizes(-(-total.numel() // leaders.size))
        vector = torch.zeros(leaders.size * chunk, device="cpu")
        vector[: total.numel()] = total
        if before is not None and not before.fits(vector.numel(), chunk):
            before = None
        if before is not None:
            vector += before.sent
        packed = torch.cat([compression.pack(one) for one in torch.split(vector, chunk)])
        for one, piece in zip(torch.split(vector, chunk), torch.split(packed, size), strict=True):
            one -= compression.unpack(piece)
        work = leaders.alltoall([buffer_of(packed)], [size] * leaders.size, name=f"{name}, sums", blocking=blocking)
        yield work
        average = (
            sum((compression.unpack(one) for one in _bytes_of(work, size)), torch.zeros(chunk, device="cpu"))
            / groups.ranks
        )
        if before is not None:
            average += before.averaged
        packed = compression.pack(average)
        besides.feedback = Feedback(vector, average - compression.unpack(packed))
        work = leaders.allgather(buffer_of(packed), name=f"{name}, averages", blocking=blocking)
        yield work
        total = torch.cat([compression.unpack(one) for one in _bytes_of(work, size)])[: total.numel()]
    if mates is not None:
        own = buffer_of(total)
        yield mates.broadcast(own, own, 0, name=f"{name}, averages for host", blocking=blocking)
    parts = torch.split(total, [one.numel() for one in differences])
    return [part.view(one.shape).to(one) for part, one in zip(parts, differences, strict=True)]


def _bytes_of(work: Work, size: int) -> Sequence[Tensor]:
    return torch.split(from_bytes(work.output(), torch.uint8, [sum(work.counts())]), size)
