"""Reduces buckets in compressed forms that no allreduce can add up, between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.torch.compression import Compressor, Int8Compression, PowerSGDCompression
from ring_notebook.torch.optimizer.averages import Average, Besides, ByteGroups, Feedback, in_bytes
from ring_notebook.torch.optimizer.power_sgd import PowerSGD

_FEWEST = 1024
"""Buckets with fewer elements are not compressed: the latency of a message dominates."""
MOST = 4 << 20
"""Most bytes of gradients in a bucket, so that packing, sending and backward of different buckets overlap."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_groups: WeakKeyDictionary[Communicator, ByteGroups] = WeakKeyDictionary()

Residuals = dict[tuple[str, ...], object]
"""This rank's compression errors, by the names of a bucket's parameters."""


def averager_of(
    compression: Compressor, gradients: Sequence[Tensor], names: tuple[str, ...], how: Reduction, residuals: Residuals
) -> Averager | None:
    """The averager for a bucket of parameters with these ``names``; None for an allreduce with ``compression``.

    All ranks call it. ``gradients`` are tensors like the bucket's.
    """
    is_float = all(one.dtype in _FLOATS for one in gradients)
    if not is_float or sum(one.numel() for one in gradients) < _FEWEST or not spans_hosts(how):
        return None
    if isinstance(compression, Int8Compression):
        return InBytes(compression, names, how, residuals)
    if isinstance(compression, PowerSGDCompression):
        return PowerSGD(compression.rank, gradients, names, how, residuals)
    return None


def spans_hosts(how: Reduction) -> bool:
    """Whether the ranks are on several hosts. On one host nothing is sent: all ranks map the same memory."""
    return how.process_set.communicator.hosts > 1


def groups_of(communicator: Communicator) -> ByteGroups:
    """The `ByteGroups` of ``communicator``, cached; all ranks call this."""
    known = _groups.get(communicator)
    if known is None:
        known = _groups[communicator] = ByteGroups.of(communicator)
    return known


def factor_of(how: Reduction) -> float:
    """The factor of a sum over the ranks."""
    share = 1.0 / how.process_set.size() if how.op == ReduceOp.AVERAGE else 1.0
    return how.prescale * how.postscale * share


class InBytes:
    """Reduces the gradients of one bucket as bytes, see `in_bytes`."""

    def __init__(
        self, compression: Int8Compression, names: tuple[str, ...], how: Reduction, residuals: Residuals
    ) -> None:
        self._compression, self._names, self._how, self._residuals = compression, names, how, residuals
        self._groups = groups_of(how.process_set.communicator)
        self._besides = Besides()

    def start(self, gradients: Sequence[Tensor], name: str, *, blocking: bool) -> Average:
        """Start to reduce ``gradients``; ranks match operations by ``name`` unless ``blocking``."""
        known = self._residuals.get(self._names)
        self._besides = Besides(known if isinstance(known, Feedback) else None)
        factor = factor_of(self._how)
        return Average(in_bytes(gradients, self._groups, self._compression, self._besides, name, blocking, factor))

    def end(self) -> None:
        """After the reduction: keep its rounding errors for the next one."""
        self._residuals[self._names] = self._besides.feedback


Averager = InBytes | PowerSGD
"""Reduces the gradients of one bucket."""
