"""Averages gradients or differences over ranks: in a floating point type, or as bytes with error feedback.

As bytes, the ranks of a host first add theirs up in its memory. Then the first rank of each host, its leader, sends a
chunk of the sum to each other leader, adds the received chunks to its own, and sends the average of its chunk to all:

    tensors of a host -> sum | leaders: pack, alltoall, add | pack, allgather, unpack | -> all ranks of the host

The rounding errors of both packings are added before the same packing next time. All ranks unpack the same bytes, also
the one that has packed them, so all have the same averages. On one host every rank is a leader.
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
    """An average under way: `advance` continues it without waiting, `step` by one operation, `finish` to its end."""

    def __init__(self, steps: Averaging) -> None:
        self._steps = steps
        self._waits: Waitable | None = None
        self._result: list[Tensor] = []
        self._go_on()

    def advance(self) -> None:
        """Begin the next operations, as far as earlier ones have ended. Raises their errors."""
        while self._waits is not None and self._waits.done():
            self._waits.wait()
            self._go_on()

    def step(self) -> bool:
        """Wait for the operation under way and begin the next one; returns whether there is one. Raises its error."""
        if self._waits is not None:
            self._waits.wait()
            self._go_on()
        return self._waits is not None

    def finish(self) -> list[Tensor]:
        """Wait for the averages, in the order of the tensors. Raises the errors of a collective."""
        while self.step():
            pass
        return self._result

    def _go_on(self) -> None:
        try:
            self._waits = next(self._steps)
        except StopIteration as end:
            self._waits, self._result = None, end.value


def in_floats(
    tensors: Sequence[Tensor],
    how: Reduction,
    compression: Compressor,
    besides: Besides,
    name: str,
    blocking: bool,
) -> Averaging:
    """The averages by one allreduce. ``blocking`` reduces at once; otherwise ranks match it by ``name``."""
    pairs = [compression.compress(one) for one in tensors]
    besides.nbytes = sum(wire.numel() * wire.element_size() for wire, _ in pairs)
    yield start([wire for wire, _ in pairs], how, name, blocking=blocking, claim=False)
    return [compression.decompress(wire, ctx) for wire, ctx in pairs]


@dataclass
class Feedback:
    """The rounding errors of this host's sum, and of the average of this leader's chunk."""

    sent: Tensor
    averaged: Tensor

    def fits(self, sent: int, averaged: int) -> bool:
        """Whether it has these numbers of elements; else the hosts or the model have changed."""
        return (self.sent.numel(), self.averaged.numel()) == (sent, averaged)


@dataclass
class Besides:
    """Kept beside averages: the feedback for the next one, and the bytes of the tensors as sent."""

    feedback: Feedback | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class ByteGroups:
    """``mates``: this host's ranks, None on a single host. ``leaders``: None on ranks that are no leaders."""

    mates: Communicator | None
    leaders: Communicator | None
    ranks: int

    @classmethod
    def of(cls, communicator: Communicator) -> ByteGroups:
        """The `ByteGroups` of a group; all of its ranks call this."""
        mates, leaders = communicator.mates(), communicator.leaders()
        return cls(None if mates is communicator else mates, leaders, communicator.size)


def in_bytes(
    tensors: Sequence[Tensor],
    groups: ByteGroups,
    compression: Int8Compression,
    besides: Besides,
    name: str,
    blocking: bool,
    factor: float | None = None,
) -> Averaging:
    """The averages of tensors that are sent as bytes, or their sums times ``factor``.

    Only leaders have a feedback in ``besides``. If a result is not finite, the old feedback stays: a GradScaler skips
    that step.
    """
    total = torch.cat([one.reshape(-1).to("cpu", torch.float32) for one in tensors])
    mates, leaders = groups.mates, groups.leaders
    before, besides.feedback = besides.feedback, None
    besides.nbytes = compression.size(total.numel())
    if mates is not None:
        own = buffer_of(total)
        yield mates.allreduce([own], [own], op=ReduceOp.SUM, name=f"{name}, host", blocking=blocking)
    if leaders is not None:
        lengths = _chunks(total.numel(), leaders.size)
        chunks = torch.split(total, lengths)
        average = chunks[leaders.rank]
        if before is not None and not before.fits(total.numel(), average.numel()):
            before = None
        left = Feedback(torch.zeros_like(total), torch.empty_like(average))
        befores = [None] * leaders.size if before is None else torch.split(before.sent, lengths)
        sizes = [0 if rank == leaders.rank else compression.size(one) for rank, one in enumerate(lengths)]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        pieces = zip(chunks, torch.split(packed, sizes), befores, torch.split(left.sent, lengths), strict=True)
        for rank, (one, out, old, new) in enumerate(pieces):
            if rank != leaders.rank:  # its own chunk does not travel
                compression.pack(one, out, old, new)
        work = leaders.alltoall([buffer_of(packed)], sizes, name=f"{name}, sums", blocking=blocking)
        yield work
        for one in _bytes_of(work):
            if one.numel():
                compression.unpack(one, average, adds=True)
        average *= 1.0 / groups.ranks if factor is None else factor
        packed = torch.empty(compression.size(average.numel()), dtype=torch.uint8, device="cpu")
        compression.pack(average, packed, None if before is None else before.averaged, left.averaged)
        work = leaders.allgather(buffer_of(packed), name=f"{name}, averages", blocking=blocking)
        yield work
        for one, out in zip(_bytes_of(work), chunks, strict=True):
            compression.unpack(one, out)
        besides.feedback = left if total.sum().isfinite() else before
    if mates is not None:
        own = buffer_of(total)
        yield mates.broadcast(own, own, 0, name=f"{name}, averages for host", blocking=blocking)
    parts = torch.split(total, [one.numel() for one in tensors])
    return [part.view(one.shape).to(one) for part, one in zip(parts, tensors, strict=True)]


def _chunks(elements: int, leaders: int) -> list[int]:
    """The elements of each leader's chunk: equally many, except that the last ones may have fewer or none."""
    each = -(-elements // leaders)
    return [max(0, min(each, elements - each * rank)) for rank in range(leaders)]


def _bytes_of(work: Work) -> Sequence[Tensor]:
    return torch.split(from_bytes(work.output(), torch.uint8, [sum(work.counts())]), work.counts())
