"""One bucket at work: its gradients are reduced where they lie, all of them as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_notebook.torch.collectives.handles import Handle
from ring_notebook.torch.collectives.reduction import Reduction, start
from ring_notebook.torch.compression import Compression, Compressor
from ring_notebook.torch.tensors import in_memory_order

__all__ = ["Bucket"]


class Bucket:
    """The gradients of ``parameters``, which all have ``dtype``.

    Behind them travel two flags for each, which a rank sets when it has that gradient, and when it is sparse. A flag
    above zero afterwards says that it was so on some rank. A gradient that no rank had stays None, as it would in a
    single process; one that was sparse although nobody had known it when the bucket was planned is so again afterwards,
    unless ``sparse_as_dense``.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        name: str,
        how: Reduction,
        compression: Compressor,
        sparse_as_dense: bool,
    ) -> None:
        self.name = name
        self.parameters = list(parameters)
        self._how, self._compression = how, compression
        self._sparse_as_dense = sparse_as_dense
        self.turned_sparse = False  # and needs another plan, on all ranks
        self._flags = torch.zeros(2, len(self.parameters), dtype=dtype)
        self._came = [False] * len(self.parameters)
        self._sparse = [False] * len(self.parameters)
        self._handle: Handle | None = None
        self._reduced: list[Tensor] = []
        self._wires: list[tuple[Tensor, Any]] = []

    @property
    def started(self) -> bool:
        """Whether the bucket is being reduced."""
        return self._handle is not None

    @property
    def full(self) -> bool:
        """Whether every gradient has come, and is still there."""
        return all(self._came) and all(p.grad is not None for p in self.parameters)

    def come(self, position: int) -> None:
        """Note that backward is done with the gradient of a parameter."""
        self._came[position] = True
        self._make_dense(position)

    def forget(self) -> None:
        """Take back what `come` has noted."""
        self._came = [False] * len(self.parameters)
        self._sparse = [False] * len(self.parameters)

    def fill(self) -> None:
        """Take in the gradients that no hook has brought."""
        for position in range(len(self.parameters)):
            self._make_dense(position)

    def _make_dense(self, position: int) -> None:
        parameter = self.parameters[position]
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
            self._sparse[position] = not self._sparse_as_dense

    def square(self) -> float:
        """Sum of the squares of all gradients that are there."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return sum(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for grad in grads)

    def start(self, *, blocking: bool) -> None:
        """Begin to reduce what is there, and zeros for the rest; with ``blocking`` it is reduced on return."""
        has, sparse = self._flags
        has.fill_(1)
        sparse.copy_(torch.tensor(self._sparse))
        self._reduced = []
        for position, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None:
                grad = torch.zeros_like(parameter)
                has[position] = 0
            self._reduced.append(grad)
        tensors = [in_memory_order(grad) for grad in self._reduced]
        if self._compression is not Compression.none:
            self._wires = [self._compression.compress(tensor.detach()) for tensor in tensors]
            tensors = [wire for wire, _ in self._wires]
        self._handle = start([*tensors, self._flags], self._how, self.name, blocking=blocking, claim=False)

    def finish(self) -> None:
        """Wait for the reduction; ``p.grad`` is the result wherever some rank had a gradient."""
        assert self._handle is not None
        try:
            self._handle.wait()
        finally:
            self._handle = None
            self.forget()
        with torch.no_grad():
            for grad, (wire, ctx) in zip(self._reduced, self._wires, strict=False):
                in_memory_order(grad).copy_(self._compression.decompress(wire, ctx))
        for position, (parameter, grad) in enumerate(zip(self.parameters, self._reduced, strict=True)):
            if parameter.grad is not grad and self._flags[0, position] > 0:
                parameter.grad = grad
        self._reduced, self._wires = [], []
        for position in self._flags[1].nonzero().flatten().tolist():
            parameter = self.parameters[position]
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse(1)
            self.turned_sparse = True
