"""Operations of torch that a GPU refuses, or that make the host wait, for the pretended device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["check", "host_waits"]

aten = torch.ops.aten

# Operations for which the host has to know the result or its size.
_READING = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.equal.default,
    aten._coalesce.default,
    aten._to_sparse.default,
    aten._to_sparse.sparse_dim,
}
# Operations that take tensors of both memories, besides copies: indices may be on the host.
_MIXED = {
    aten.copy_.default,
    aten._to_copy.default,
    aten._foreach_copy_.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


def check(func: Any, args: Any, kwargs: Any, kind: type[Tensor]) -> None:
    """Raise RuntimeError for what torch refuses on a GPU: tensors of both memories, the host's random numbers, pinning.

    ``kind`` is the class of the tensors of the device.
    """
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type == "cpu":
        raise RuntimeError(f"{func}: expected a generator of the device, found one of the CPU")
    if func in (aten._pin_memory.default, aten.pin_memory.default) and isinstance(args[0], kind):
        raise RuntimeError("cannot pin a tensor of the device: only dense CPU tensors can be pinned")
    if func in _MIXED:
        return
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    on_host = [one for one in tensors if not isinstance(one, kind) and one.dim()]
    if on_host and len(on_host) < len(tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found one of the CPU")


def host_waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for the device, as it does for copies from and to its own memory."""
    if func is aten.copy_.default:
        asks = len(args) > 2 and args[2]
        return any(type(one) is Tensor for one in args[:2]) and not (asks or kwargs.get("non_blocking"))
    return func in _READING
