"""Collectives on JAX's arrays, inside and outside of ``jit``, and their gradients.

All ranks call them with the same shapes: XLA fixes the shapes of results before it runs a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

import jax
from ring_notebook.api.arguments import number_of, reduction_of
from ring_notebook.api.foreign_calls import ForeignCall, static_shapes
from ring_notebook.api.process_sets import ProcessSet, global_process_set, process_set_of
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.jax.ordered_call import call, check_array

Array = Any
Shapes = tuple[tuple[int, ...], ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(what: ForeignCall, shapes: Shapes, arrays: list[Array]) -> list[Array]:
    return _plain(what, shapes, arrays)


def _plain(what: ForeignCall, shapes: Shapes, arrays: Sequence[Array]) -> list[Array]:
    return call(
        what, arrays, [jax.ShapeDtypeStruct(shape, array.dtype) for shape, array in zip(shapes, arrays, strict=True)]
    )


def _forward(what: ForeignCall, shapes: Shapes, arrays: list[Array]) -> tuple[list[Array], list[Array]]:
    return _plain(what, shapes, arrays), arrays


def _backward(what: ForeignCall, _shapes: Shapes, arrays: list[Array], gradients: list[Array]) -> tuple[list[Array]]:
    at = [index for index, gradient in enumerate(gradients) if gradient.dtype != jax.dtypes.float0]
    results: list[Array] = [None] * len(arrays)  # integers and bools have no gradients
    if at:
        found = _gradients(what, [arrays[index] for index in at], [gradients[index] for index in at])
        for index, gradient in zip(at, found, strict=True):
            results[index] = gradient
    return (results,)


def _gradients(what: ForeignCall, arrays: list[Array], gradients: list[Array]) -> list[Array]:
    process_set = process_set_of(what.process_set)
    scale, rank = what.gradient_scale(process_set.size()), process_set.rank()
    gradients = gradients if scale == 1 else [gradient * jnp.asarray(scale, gradient.dtype) for gradient in gradients]
    back = what.backward()
    pairs = zip(gradients, arrays, strict=True)
    shapes = [(gradient if back.kind == "allreduce" else array).shape for gradient, array in pairs]
    reduced: list[Array] = _differentiable(back, tuple(shapes), gradients)
    if what.kind == "allgather":
        rows = [array.shape[0] if array.shape else 1 for array in arrays]
        own = [whole[rank * count : (rank + 1) * count] for whole, count in zip(reduced, rows, strict=True)]
        return [part.reshape(array.shape) for part, array in zip(own, arrays, strict=True)]
    if what.kind == "broadcast" and process_set.group_rank(what.root) != rank:
        return [jnp.zeros_like(whole) for whole in reduced]
    return reduced


_differentiable.defvjp(_forward, _backward)


def collective(what: ForeignCall, values: Sequence[Any], process_set: ProcessSet) -> list[Array]:
    # `asarray` takes longer than a small collective, also where there is nothing to do.
    arrays = [value if isinstance(value, jax.Array) and not value.weak_type else jnp.asarray(value) for value in values]
    for array in arrays:
        check_array(array, what.kind)
    if not arrays:
        return []
    shapes = static_shapes(what, [array.shape for array in arrays], process_set)
    # Outside of `jit` and `grad` nothing asks for a gradient, whose rule JAX would trace at every call.
    traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    results: list[Array] = (_differentiable if traced else _plain)(what, tuple(shapes), arrays)
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
    what = ForeignCall("allgather", name or "", process_set=number_of(process_set))
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
    what = ForeignCall("alltoall", name or "", process_set=number_of(process_set))
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
