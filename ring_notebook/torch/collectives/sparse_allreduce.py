"""Sum or average of sparse tensors: the entries of all ranks are gathered."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ring_notebook.api.handles import synchronize
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.torch.collectives.allgather import allgather_async


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to reduce sparse COO tensors of one shape. Returns a function that waits and returns the coalesced result.

    ``op`` is Average or Sum. Each rank gets the entries of all ranks. Raises ValueError for another ``op``, TypeError
    when ``tensor`` is not sparse.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"sparse_allreduce_async can Average or Sum, not op={op!r}")
    if not isinstance(tensor, Tensor) or not tensor.is_sparse:
        raise TypeError("sparse_allreduce_async takes a sparse COO tensor; use allreduce_async for dense ones")
    tensor = tensor.coalesce()
    # Entries are rows, because allgather concatenates along the first dimension.
    indices = allgather_async(tensor.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor.values(), f"{name}.values", process_set)
    divisor = process_set.size() if op == ReduceOp.AVERAGE else 1

    def result() -> Tensor:
        rows, entries = synchronize(indices), synchronize(values)
        summed = torch.sparse_coo_tensor(rows.t(), entries, tensor.shape, check_invariants=False).coalesce()
        return summed / divisor if divisor > 1 else summed

    return result


def sparse_gradient(parameter: Tensor) -> Tensor:
    """The gradient with rows as its sparse dimension; empty where the parameter has none."""
    grad = parameter.grad
    if grad is None:
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64),
            torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype),
            parameter.shape,
            device=parameter.device,
            check_invariants=False,
        )
    if grad.is_sparse and grad.sparse_dim() == 1:
        return grad
    return grad.to_dense().to_sparse(1)
