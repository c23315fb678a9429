"""Collectives on JAX's arrays, inside and outside of ``jit``, and their gradients.

All ranks call them with the same shapes: XLA fixes the shapes of results before it runs a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from ring_notebook.api.arguments import number_of, reduction_of
from ring_notebook.api.foreign_calls import ForeignCall, static_shapes
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.jax.element_types import movable
from ring_notebook.jax.ordered_call import call

Array = Any


def collective(what: ForeignCall, values: Sequence[Any], process_set: ProcessSet) -> list[Array]:
    """The results of ``what`` for arrays of any dtype.

    An array on several devices stays there if the collective keeps its shape: each part is reduced or sent with the
    parts at the same place on other ranks. Otherwise each device gets the whole results.
    """
    # `asarray` takes longer than a small collective, even when it changes nothing.
    arrays = [
        value if isinstance(value, jax.Array) and not getattr(value, "weak_type", False) else jnp.asarray(value)
        for value in values
    ]
    if not arrays:
        return []
    if any(_is_on_several_devices(array) for array in arrays):
        with _no_mesh():
            return _on_several_devices(what, arrays, process_set)
    shapes = static_shapes(what, [array.shape for array in arrays], process_set)
    pairs = [movable(array, what) for array in arrays]
    operands = [operand for operand, _ in pairs]
    if any(operand is not array for operand, array in zip(operands, arrays, strict=True)):
        shapes = static_shapes(what, [operand.shape for operand in operands], process_set)
    results = [jax.ShapeDtypeStruct(shape, array.dtype) for shape, array in zip(shapes, operands, strict=True)]
    made = call(what, operands, results)
    return [restore(one) for (_, restore), one in zip(pairs, made, strict=True)]


def _is_on_several_devices(array: Array) -> bool:
    return not isinstance(array, jax.core.Tracer) and len(array.sharding.device_set) > 1


def _no_mesh() -> AbstractContextManager[Any]:
    """Outside of `jax.set_mesh`, within which JAX computes on all devices of its mesh or not at all."""
    if not hasattr(jax, "set_mesh") or jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    found: AbstractContextManager[Any] = jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
    return found


def _on_several_devices(what: ForeignCall, arrays: list[Array], process_set: ProcessSet) -> list[Array]:
    """Outside of compiled functions."""
    for array in arrays:
        if not array.is_fully_addressable:
            raise ValueError(
                f"{what.kind} takes arrays on devices of this process, and this one is also on devices of others; use "
                "JAX's own collectives there, such as jax.lax.psum"
            )
    whole = what.kind not in ("allreduce", "broadcast")
    parts: list[list[Array]] = []
    for array in arrays:
        first = array.addressable_shards[0].device
        if whole or array.is_fully_replicated:
            parts.append([jax.device_put(array, first)])
        else:
            parts.append([jax.device_put(shard.data, first) for shard in array.addressable_shards])
    if what.kind == "alltoall":
        made = [collective(what, [one], process_set)[0] for part in parts for one in part]
    else:
        made = collective(what, [one for part in parts for one in part], process_set)
    results, at = [], iter(made)
    for array, part in zip(arrays, parts, strict=True):
        found = [next(at) for _ in part]
        if len(found) == 1:
            mesh = jax.sharding.Mesh(np.array([shard.device for shard in array.addressable_shards]), ("devices",))
            everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            kept = array.sharding if found[0].shape == array.shape else everywhere
            results.append(jax.device_put(found[0], kept))
        else:
            placed = [
                jax.device_put(one, shard.device) for one, shard in zip(found, array.addressable_shards, strict=True)
            ]
            results.append(jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed))
    return results


def allreduce(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """``array`` reduced over all ranks, as a new array. ``op`` is Average by default.

    All ranks give the same shape and dtype; else all raise CollectiveMismatch, which XLA wraps in an error of its own.
    Differentiable for Average and Sum.
    """
    return grouped_allreduce([array], average, name, op, prescale_factor, postscale_factor, process_set)[0]


def grouped_allreduce(
    arrays: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    commits: bool = False,
) -> list[Array]:
    """`allreduce` of each of ``arrays``; those of one dtype are one operation.

    With ``commits``, no rank gets the results before all have theirs: an optimizer step follows.
    """
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    number = number_of(process_set)
    what = ForeignCall("allreduce", name or "", how.op, how.prescale, how.postscale, 0, number, commits=commits)
    return collective(what, arrays, process_set)


def allgather(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """The arrays of all ranks, concatenated along the first dimension. All have the same shape.

    Differentiable: each rank gets the average of all ranks' gradients of its own rows, as in Horovod.
    """
    what = ForeignCall("allgather", name or "", process_set=number_of(process_set), equal_rows=True)
    return collective(what, [array], process_set)[0]


def broadcast(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """A new array with the values of ``root_rank``'s ``array``; ``root_rank`` is a global rank.

    Differentiable: the root gets the average of all ranks' gradients, the others zeros, as in Horovod.
    """
    what = ForeignCall("broadcast", name or "", root=root_rank, process_set=number_of(process_set))
    process_set.group_rank(root_rank)  # raises where it is no member
    return collective(what, [array], process_set)[0]


def alltoall(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Send an equal share of the rows of ``array`` to each rank; returns the received rows, in rank order.

    Raises ValueError where the rows cannot be divided by the number of ranks. Differentiable.
    """
    what = ForeignCall("alltoall", name or "", process_set=number_of(process_set), equal_rows=True)
    return collective(what, [array], process_set)[0]


def reducescatter(
    array: Any,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """This rank's rows of the reduction of ``array``; where they cannot be equal, the first ranks get one more.

    Differentiable for Average and Sum.
    """
    how = reduction_of(None, op, prescale_factor, postscale_factor, process_set)
    what = ForeignCall("reducescatter", name or "", how.op, how.prescale, how.postscale, 0, number_of(process_set))
    return collective(what, [array], process_set)[0]
