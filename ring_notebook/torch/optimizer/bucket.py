"""One bucket: its gradients are reduced in place, in one operation; on a device small ones are packed first.

With an averager a bucket takes several operations; its gradients are in place again when all have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction
from ring_notebook.api.handles import Handle
from ring_notebook.torch.collectives.allreduce import start
from ring_notebook.torch.compression import Compression, Compressor
from ring_notebook.torch.devices import kind_of
from ring_notebook.torch.optimizer.averages import Average
from ring_notebook.torch.optimizer.compressed_gradients import Averager
from ring_notebook.torch.tensors import copy_each, in_memory_order, real_view


class Bucket:
    """The gradients of ``parameters``, which all have one dtype, or are complex of one.

    A flag for each gradient, in CPU memory, is reduced with them. A rank sets it if it has the gradient; a gradient
    that no rank has stays None, as in a single process. One more flag says that a gradient turned out to be sparse (a
    table that no rank had used when the plan was made). The ranks then agree on the sparse ones, so that SparseAdam,
    which refuses dense gradients, gets sparse ones from the first step on. With ``sparse_as_dense`` they stay dense.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        name: str,
        how: Reduction,
        compression: Compressor,
        sparse_as_dense: bool,
        averager: Averager | None = None,
    ) -> None:
        """``averager`` reduces the gradients; None for an allreduce with ``compression``."""
        self.name = name
        self.parameters = list(parameters)
        self._how, self._compression = how, compression
        self._sparse_as_dense = sparse_as_dense
        self._averager = averager
        self._average: Average | None = None
        self.turned_sparse = False  # on some rank: all ranks need another plan
        self.sparse = [False] * len(self.parameters)  # on this rank
        self.reached = False
        """Whether a backward pass has reached one of the parameters since the last reduction."""
        self._is_complex = any(parameter.is_complex() for parameter in self.parameters)
        kind = self.parameters[0].dtype.to_real()
        self._flags = torch.zeros(len(self.parameters) + 1, dtype=kind, device="cpu")
        self._ready = [False] * len(self.parameters)
        self._handle: Handle | None = None
        self._reduced: list[Tensor] = []
        self._wires: list[tuple[Tensor, Any]] = []
        self._packer = Packer()

    @property
    def started(self) -> bool:
        """Whether the bucket is being reduced."""
        return self._handle is not None

    @property
    def full(self) -> bool:
        """Whether every gradient is ready and not None."""
        return all(self._ready) and all(p.grad is not None for p in self.parameters)

    def mark_ready(self, position: int) -> None:
        """Note that backward has completed the gradient of a parameter."""
        self._ready[position] = True
        self._make_dense(position)

    def reset(self) -> None:
        """Undo all `mark_ready` calls."""
        self.reached = False
        self._ready = [False] * len(self.parameters)
        self.sparse = [False] * len(self.parameters)

    def make_dense(self) -> None:
        """Make all gradients dense that are not None, even if no hook has marked them."""
        for position in range(len(self.parameters)):
            self._make_dense(position)

    def _make_dense(self, position: int) -> None:
        parameter = self.parameters[position]
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
            self.sparse[position] = not self._sparse_as_dense

    def square(self) -> Tensor:
        """Sum of the squares of all gradients that are not None: float64, in CPU memory or on their device."""
        grads = [real_view(p.grad) for p in self.parameters if p.grad is not None]
        squares = [torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2 for grad in grads]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def start(self, *, blocking: bool) -> None:
        """Start to reduce the gradients, with zeros for those that are None; ``blocking`` waits for the result."""
        self._flags.fill_(1)
        self._flags[-1] = any(self.sparse)
        self._reduced = []
        for position, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None:
                grad = torch.zeros_like(parameter)
                self._flags[position] = 0
            elif grad.is_conj() or grad.stride() != parameter.stride():  # autograd makes them alike
                grad = parameter.grad = _laid_out_as(parameter, grad.resolve_conj())
            self._reduced.append(grad)
        tensors = [in_memory_order(grad) for grad in self._in_numbers()]
        if self._averager is not None:
            self._average = self._averager.start([one.detach() for one in tensors], self.name, blocking=blocking)
            name = f"{self.name}, which there are"
            self._handle = start([self._flags], self._how, name, blocking=blocking, claim=False)
            return
        if self._compression is not Compression.none:
            self._wires = [self._compression.compress(tensor.detach()) for tensor in tensors]
            tensors = [wire for wire, _ in self._wires]
        tensors = self._packer.pack(tensors)
        self._handle = start([*tensors, self._flags], self._how, self.name, blocking=blocking, claim=False)

    def _in_numbers(self) -> list[Tensor]:
        """The gradients, complex ones as views of real numbers."""
        return [real_view(grad) for grad in self._reduced] if self._is_complex else self._reduced

    def advance(self) -> None:
        """With an averager, as `Average.advance`."""
        if self._average is not None:
            self._average.advance()

    def step(self) -> bool:
        """With an averager, as `Average.step`; else returns False."""
        return self._average is not None and self._average.step()

    def finish(self) -> None:
        """Wait for the reduction; ``p.grad`` is then the result if some rank had a gradient."""
        assert self._handle is not None
        average, self._average = self._average, None
        results: list[Tensor] = []
        try:
            self._handle.wait()
            if average is not None:
                results = average.finish()
        finally:
            self._handle = None
            self.reached = False
            self._ready = [False] * len(self.parameters)
        with torch.no_grad():
            self._packer.unpack()
            for grad, (wire, ctx) in zip(self._in_numbers(), self._wires, strict=False):
                in_memory_order(grad).copy_(self._compression.decompress(wire, ctx))
            for grad, result in zip(self._in_numbers(), results, strict=False):
                in_memory_order(grad).copy_(result)
        if self._averager is not None:
            self._averager.end()
        for position, (parameter, grad) in enumerate(zip(self.parameters, self._reduced, strict=True)):
            if parameter.grad is not grad and self._flags[position] > 0:
                parameter.grad = grad
        self._reduced, self._wires = [], []
        self.turned_sparse = bool(self._flags[-1] > 0)

    def make_sparse(self, sparse: Sequence[bool]) -> None:
        """Make the gradients sparse again that were sparse on some rank."""
        for parameter, was_sparse in zip(self.parameters, sparse, strict=True):
            if was_sparse:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.to_sparse(1)
        self.reset()


def _laid_out_as(parameter: Tensor, grad: Tensor) -> Tensor:
    """``grad`` in the memory order of ``parameter`` or of its dense copy, which is equal on all ranks."""
    like = torch.empty_like(parameter, dtype=grad.dtype)
    strides = zip(grad.stride(), like.stride(), grad.shape, strict=True)
    return grad if all(own == other or length == 1 for own, other, length in strides) else like.copy_(grad.detach())


SMALL = 1 << 20
"""Tensors below this size in bytes are packed. Such copies take a GPU microseconds; not yet measured on one."""


class Packer:
    """Packs and unpacks the tensors of one bucket, which have one dtype, in memory that it keeps.

    Does nothing for tensors in CPU memory: the core reduces many small ones as fast as one.
    """

    def __init__(self) -> None:
        self._flat: Tensor | None = None
        self._parts: list[Tensor] = []
        self._packed: list[Tensor] = []

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors to reduce instead of ``tensors``: the large ones, and one that holds the small ones."""
        small = [tensor for tensor in tensors if _is_small(tensor)]
        if len(small) < 2:
            return list(tensors)
        flat = self._lay_out(small)
        copy_each(self._parts, small)
        self._packed = small
        return [*(tensor for tensor in tensors if not _is_small(tensor)), flat]

    def unpack(self) -> None:
        """Copy the results back into the tensors that `pack` was given."""
        if self._packed:
            copy_each(self._packed, self._parts)
        self._packed = []

    def _lay_out(self, small: Sequence[Tensor]) -> Tensor:
        shapes = [tensor.shape for tensor in small]
        first = small[0]
        flat = self._flat
        if (
            flat is None
            or [part.shape for part in self._parts] != shapes
            or (flat.dtype, flat.device) != (first.dtype, first.device)
        ):
            flat = self._flat = first.new_empty(sum(tensor.numel() for tensor in small))
            pieces = torch.split(flat, [tensor.numel() for tensor in small])
            self._parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return flat


def _is_small(tensor: Tensor) -> bool:
    return not tensor.is_cpu and tensor.numel() * tensor.element_size() < SMALL and kind_of(tensor) is not None
