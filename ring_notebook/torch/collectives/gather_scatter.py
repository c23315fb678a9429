"""gather and scatter between one rank and all ranks, into outputs of the caller. Beyond Horovod."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.buffers import Buffer
from ring_notebook.torch.collectives.tensor_arguments import check_output
from ring_notebook.torch.tensors import (
    buffer_of,
    check_tensor,
    copy_back,
    equal_parts,
    from_bytes,
    host_target,
    on_host,
)


def gather(
    tensor: Tensor,
    root_rank: int = 0,
    output: Tensor | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | None:
    """The tensors of all ranks on global rank ``root_rank``, concatenated along the first dimension; None elsewhere.

    The first dimension may differ by rank. An ``output`` that the root gives is filled and returned, without a copy
    where it is contiguous, in CPU memory and all ranks send the same size. Raises ValueError on the root where
    ``output`` has another size or dtype, CollectiveMismatch on every rank when dtypes or roots differ.
    """
    check_tensor(tensor, "gather")
    check_process_set(process_set)
    communicator = process_set.communicator
    root = process_set.group_rank(root_rank)
    is_root = communicator.rank == root
    row = tensor.shape[1:]
    # Rows without elements have no bytes: gather their number instead.
    own = on_host(tensor.detach()).reshape(-1) if row.numel() else torch.tensor([tensor.shape[0]], device="cpu")
    places = equal_parts(output, communicator.size, own.dtype) if is_root and output is not None and row.numel() else []
    sends = [own.numel() if rank == root else 0 for rank in range(communicator.size)]
    work = communicator.alltoall([buffer_of(own)], sends, places, root=root)
    if not is_root:
        return None
    if not row.numel():
        rows = int(from_bytes(work.output(), own.dtype, [communicator.size]).sum())
        return tensor.new_empty(rows, *row) if output is None else output
    if output is None:
        return from_bytes(work.output(), tensor.dtype, [sum(work.counts())]).view(-1, *row).to(tensor.device)
    if not work.placed():
        check_output(output, sum(work.counts()), tensor.dtype, communicator.ranks[root], "gather")
        output.detach().copy_(from_bytes(work.output(), tensor.dtype, output.shape))
    return output


def scatter(
    output: Tensor,
    tensor: Tensor | None = None,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Fill ``output`` with this rank's part of the ``tensor`` of global rank ``root_rank``; returns ``output``.

    The parts are equal slices of the first dimension, one for each rank; only the root gives ``tensor``. Raises
    ValueError on the root where the first dimension is not a multiple of the number of ranks, and on a rank whose
    ``output`` has another size; CollectiveMismatch on every rank when dtypes or roots differ.
    """
    check_tensor(output, "scatter")
    check_process_set(process_set)
    communicator = process_set.communicator
    root, size = process_set.group_rank(root_rank), communicator.size
    rank = communicator.ranks[communicator.rank]
    own = torch.empty(0, dtype=output.dtype, device="cpu")
    if communicator.rank == root:
        check_tensor(tensor, "scatter")
        assert tensor is not None
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise ValueError(
                f"rank {rank}: scatter needs a tensor whose first dimension is a multiple of {size}, got "
                f"{list(tensor.shape)}"
            )
        check_output(output, tensor.numel() // size, tensor.dtype, rank, "scatter")
        own = on_host(tensor.detach()).reshape(-1)
    host = host_target(output.detach())
    none = Buffer(0, (0,), buffer_of(host).dtype)
    places = [buffer_of(host.view(-1)) if member == root else none for member in range(size)]
    work = communicator.alltoall([buffer_of(own)], [own.numel() // size] * size, places, root=root)
    if not work.placed():
        check_output(output, sum(work.counts()), own.dtype, rank, "scatter")
        host.copy_(from_bytes(work.output(), own.dtype, host.shape))
    copy_back(host, output)
    return output
