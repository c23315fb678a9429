"""How the gradients of a bucket travel between hosts, where no allreduce can add them up as they travel."""

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
"""Elements of a bucket below which its gradients travel as they are: a message takes as long whatever its size."""
MOST = 4 << 20
"""Bytes of gradients in a bucket: one is packed while another travels, and while backward makes the next."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_groups: WeakKeyDictionary[Communicator, ByteGroups] = WeakKeyDictionary()

Residuals = dict[tuple[str, ...], object]
"""What compression has taken from the gradients of a bucket, by the names of its parameters: this rank's own."""


def averager_of(
    compression: Compressor, gradients: Sequence[Tensor], names: tuple[str, ...], how: Reduction, residuals: Residuals
) -> Averager | None:
    """What reduces a bucket of parameters with these ``names``; None where they travel as ``compression`` has them.

    All ranks call it. ``gradients`` are tensors like those of the bucket.
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
    """Whether the ranks are on several hosts. On one their gradients do not travel: all map the same memory."""
    return how.process_set.communicator.hosts > 1


def groups_of(communicator: Communicator) -> ByteGroups:
    """The ranks that add up and send bytes; all ranks call this."""
    known = _groups.get(communicator)
    if known is None:
        known = _groups[communicator] = ByteGroups.of(communicator)
    return known


def factor_of(how: Reduction) -> float:
    """By what a sum over the ranks is multiplied."""
    share = 1.0 / how.process_set.size() if how.op == ReduceOp.AVERAGE else 1.0
    return how.prescale * how.postscale * share


class InBytes:
    """As bytes, see `in_bytes`."""

    def __init__(
        self, compression: Int8Compression, names: tuple[str, ...], how: Reduction, residuals: Residuals
    ) -> None:
        self._compression, self._names, self._how, self._residuals = compression, names, how, residuals
        self._groups = groups_of(how.process_set.communicator)
        self._besides = Besides()

    def start(self, gradients: Sequence[Tensor], name: str, *, blocking: bool) -> Average:
        """Start to reduce them; the ranks match the operations by ``name``, unless these are ``blocking``."""
        known = self._residuals.get(self._names)
        self._besides = Besides(known if isinstance(known, Feedback) else None)
        factor = factor_of(self._how)
        return Average(in_bytes(gradients, self._groups, self._compression, self._besides, name, blocking, factor))

    def end(self) -> None:
        """Note that they have been reduced: what has been left goes into the next reduction."""
        self._residuals[self._names] = self._besides.feedback


Averager = InBytes | PowerSGD
"""Reduces the gradients of one bucket."""
