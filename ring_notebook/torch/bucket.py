"""One bucket at work: gradients go into its slots, the whole is reduced, and ``p.grad`` is the slot afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_notebook.torch.buckets import BucketPlan
from ring_notebook.torch.compression import Compression, Compressor
from ring_notebook.torch.handles import Handle
from ring_notebook.torch.reduction import Reduction, start

__all__ = ["Bucket"]


class Bucket:
    """The gradients of ``parameters`` (one per slot of ``plan``) in ``memory``, a flat tensor of ``plan.count``."""

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[Tensor],
        memory: Tensor,
        name: str,
        how: Reduction,
        compression: Compressor,
    ) -> None:
        self.name = name
        self._how, self._compression = how, compression
        self.parameters = list(parameters)
        self._memory = memory.zero_()
        self._gradients = memory[: plan.flags]
        self._flags = memory[plan.flags :]
        self._present = [False] * len(self.parameters)
        self._handle: Handle | None = None
        self._wires: list[tuple[Tensor, Any]] = []
        # A slot has its parameter's strides where those are dense: optimizers are faster when the layouts agree.
        self._slots = [
            torch.as_strided(memory, p.shape, torch.empty_like(p, device="meta").stride(), slot.offset)
            for p, slot in zip(self.parameters, plan.slots, strict=True)
        ]

    @property
    def started(self) -> bool:
        """Whether the bucket is being reduced."""
        return self._handle is not None

    @property
    def full(self) -> bool:
        """Whether every gradient has come, and is still there."""
        return all(self._present) and all(p.grad is not None for p in self.parameters)

    def put(self, position: int) -> None:
        """Move the gradient of a parameter into its slot, and let ``p.grad`` be the slot (on the same device)."""
        parameter, slot = self.parameters[position], self._slots[position]
        grad = parameter.grad
        if grad is None:
            return
        if grad is not slot:
            with torch.no_grad():
                slot.copy_(grad.to_dense() if grad.is_sparse else grad)
            if parameter.device == slot.device:
                parameter.grad = slot
        self._present[position] = True

    def fill(self) -> None:
        """Take in the gradients that no hook has brought; zeros for those that this rank does not have."""
        for position, (parameter, slot) in enumerate(zip(self.parameters, self._slots, strict=True)):
            if parameter.grad is None:
                slot.zero_()
                self._present[position] = False
            elif not self._present[position] or parameter.device == slot.device:
                self.put(position)

    def square(self) -> float:
        """Sum of the squares of all gradients in the bucket."""
        return float(torch.linalg.vector_norm(self._gradients, dtype=torch.float64)) ** 2

    def start(self, *, blocking: bool) -> None:
        """Begin to reduce the bucket; with ``blocking`` it is reduced on return."""
        if all(self._present):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(self._present))
        tensors = [self._memory]
        if self._compression is not Compression.none:
            self._wires = [self._compression.compress(slot) for slot in self._slots]
            tensors = [*(wire for wire, _ in self._wires), self._flags]
        self._handle = start(tensors, self._how, self.name, blocking=blocking, claim=False)

    def finish(self) -> None:
        """Wait for the reduction; ``p.grad`` is the result wherever some rank had a gradient."""
        assert self._handle is not None
        self._handle.wait()
        self._handle = None
        for slot, (wire, ctx) in zip(self._slots, self._wires, strict=False):
            slot.copy_(self._compression.decompress(wire, ctx))
        self._wires = []
        anywhere = self._present if all(self._present) else (self._flags > 0).tolist()
        for parameter, slot, present in zip(self.parameters, self._slots, anywhere, strict=True):
            if present and parameter.grad is not slot:
                parameter.grad = slot if parameter.device == slot.device else slot.to(parameter.device)
        self._present = [False] * len(self.parameters)
