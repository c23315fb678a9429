"""Gradients averaged over all ranks, for a training loop and for optax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from ring_notebook.api.arguments import number_of
from ring_notebook.api.foreign_calls import ForeignCall
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.jax.collectives import collective, grouped_allreduce


def average_gradients(tree: Any, op: ReduceOp = ReduceOp.AVERAGE, process_set: ProcessSet = global_process_set) -> Any:
    """The pytree of gradients with each leaf averaged over all ranks, in one operation for each dtype.

    Inside or outside of ``jit``. No rank gets the result before all have theirs, so that all make the optimizer step
    that follows or none. ``op`` may be Sum, and what else `allreduce` takes. Raises CollectiveMismatch on every rank
    when the trees differ.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    reduced = grouped_allreduce(leaves, name="gradients", op=op, process_set=process_set, commits=True)
    return jax.tree_util.tree_unflatten(structure, reduced)


class GradientTransformation(NamedTuple):
    """An optimizer, as optax and libraries like it have them."""

    init: Any
    update: Any


def is_optimizer(value: Any) -> bool:
    """Whether this is an optimizer as optax has them."""
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def DistributedOptimizer(  # noqa: N802 - the name of the other faces
    optimizer: Any, op: ReduceOp = ReduceOp.AVERAGE, process_set: ProcessSet = global_process_set
) -> GradientTransformation:
    """An optax optimizer (``init`` and ``update``) that updates with the gradients of all ranks.

    On a rank outside of ``process_set`` it updates with its own.
    """
    if not is_optimizer(optimizer):
        raise TypeError(f"DistributedOptimizer takes an optax optimizer, got {type(optimizer).__name__}")

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
        gradients = average_gradients(updates, op, process_set) if process_set.included() else updates
        return optimizer.update(gradients, state, params, **more)

    return GradientTransformation(optimizer.init, update)


def broadcast_parameters(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """The pytree with the leaves of ``root_rank``: parameters, the state of an optimizer, keys of random numbers.

    Leaves that are no arrays and no numbers stay, such as the functions in a module of Equinox.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    what = ForeignCall("broadcast", "parameters", root=root_rank, process_set=number_of(process_set))
    process_set.group_rank(root_rank)
    at = [index for index, leaf in enumerate(leaves) if is_value(leaf)]
    for index, value in zip(at, collective(what, [leaves[index] for index in at], process_set), strict=True):
        leaves[index] = value
    return jax.tree_util.tree_unflatten(structure, leaves)


def is_value(leaf: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
