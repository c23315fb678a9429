"""PowerSGD (Vogels et al. 2019): the gradients of a matrix as the product of two thin ones, with error feedback.

    M = gradient + error | P = M Q, averaged, its columns made orthonormal | Q = M' P, averaged | average = P Q'

Each rank keeps its M minus the average as its error. The next step begins with the averaged Q. With a new plan of
buckets all ranks begin with the same random Q, because a restarted rank has no other.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.torch.collectives.allreduce import start
from ring_notebook.torch.optimizer.averages import Average, Averaging
from ring_notebook.torch.tensors import in_memory_order


@dataclass
class _Matrix:
    """The gradient of a parameter as a matrix, and Q for the next step."""

    index: int
    rows: int
    columns: int
    right: Tensor  # Q: columns x rank


def matrices_of(shapes: Sequence[Sequence[int]], rank: int) -> Iterator[tuple[int, int, int]]:
    """Index, rows and columns of tensors that two matrices of ``rank`` columns make smaller."""
    for index, shape in enumerate(shapes):
        rows = shape[0] if len(shape) > 1 else 0
        columns = torch.Size(shape[1:]).numel()
        if (rows + columns) * rank < rows * columns:
            yield index, rows, columns


class PowerSGD:
    """Reduces the gradients of one bucket; gradients that are small or no matrices are not compressed."""

    def __init__(
        self,
        rank: int,
        gradients: Sequence[Tensor],
        names: tuple[str, ...],
        how: Reduction,
        residuals: MutableMapping[tuple[str, ...], object],
    ) -> None:
        self._names, self._how, self._residuals = names, how, residuals
        self._matrices: list[_Matrix] = []
        generator = torch.Generator().manual_seed(0)
        for index, rows, columns in matrices_of([one.shape for one in gradients], rank):
            right = torch.randn(columns, rank, generator=generator, device="cpu")
            self._matrices.append(_Matrix(index, rows, columns, right.to(gradients[index].device)))
        self._errors: list[Tensor] = []

    def start(self, gradients: Sequence[Tensor], name: str, *, blocking: bool) -> Average:
        return Average(self._steps(gradients, name, blocking))

    def end(self) -> None:
        self._residuals[self._names] = self._errors

    def _steps(self, gradients: Sequence[Tensor], name: str, blocking: bool) -> Averaging:
        process_set = self._how.process_set
        mean = Reduction(ReduceOp.AVERAGE, 1.0, 1.0, process_set)
        sums = self._how.op == ReduceOp.SUM
        factor = self._how.prescale * self._how.postscale * (process_set.size() if sums else 1)
        known = self._residuals.get(self._names)
        errors = known if isinstance(known, list) and len(known) == len(self._matrices) else None
        given = [gradients[one.index].reshape(one.rows, one.columns).float() for one in self._matrices]
        if errors is not None:
            given = [one + error for one, error in zip(given, errors, strict=True)]
        lefts = [one @ matrix.right for one, matrix in zip(given, self._matrices, strict=True)]
        ours = {one.index for one in self._matrices}
        others = [index for index in range(len(gradients)) if index not in ours]
        plain = [in_memory_order(gradients[index]).clone() for index in others]
        yield start([*lefts, *plain], mean, f"{name}, left", blocking=blocking, claim=False)
        lefts = [_orthonormal(one) for one in lefts]
        rights = [one.T @ left for one, left in zip(given, lefts, strict=True)]
        if rights:
            yield start(rights, mean, f"{name}, right", blocking=blocking, claim=False)
        averages = [left @ right.T for left, right in zip(lefts, rights, strict=True)]
        if all(bool(one.sum().isfinite()) for one in averages):
            self._errors = [one - average for one, average in zip(given, averages, strict=True)]
            for matrix, right in zip(self._matrices, rights, strict=True):
                matrix.right = right
        else:  # a GradScaler skips this step
            self._errors = errors or []
        result: dict[int, Tensor] = dict(zip(others, plain, strict=True))
        result |= {one.index: average for one, average in zip(self._matrices, averages, strict=True)}
        return [result[index].view(one.shape).to(one) * factor for index, one in enumerate(gradients)]


def _orthonormal(left: Tensor) -> Tensor:
    """An orthonormal basis of the columns; NaN if one of them is not finite, which LAPACK may refuse."""
    if not bool(left.sum().isfinite()):
        return torch.full_like(left, float("nan"))
    basis: Tensor = torch.linalg.qr(left)[0]
    return basis
