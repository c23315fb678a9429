"""prepare: the pytrees and the optimizer of a training loop with JAX, made data parallel in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from ring_notebook.api.foreign_calls import steps_made
from ring_notebook.api.preparation import by_kind, furthest, in_order, of_another
from ring_notebook.jax.averaging import (
    DistributedOptimizer,
    GradientTransformation,
    broadcast_parameters,
    is_optimizer,
)


def has_arrays_only(tree: Any) -> bool:
    """Whether all leaves of a pytree are arrays and numbers; it may have none, as the state of a plain optimizer."""
    return all(hasattr(leaf, "dtype") or isinstance(leaf, (int, float)) for leaf in jax.tree_util.tree_leaves(tree))


_KINDS: dict[str, Callable[[Any], bool]] = {
    "optimizers of optax": is_optimizer,
    "pytrees of arrays": lambda one: has_arrays_only(one) and bool(jax.tree_util.tree_leaves(one)),
}


def prepare(*objects: Any, **options: Any) -> Any:
    """Make a training loop data parallel; all ranks must call this. Beyond Horovod.

    Takes pytrees (parameters, an optimizer's state) and optax optimizers, any number of each in any order, and returns
    their replacements in that order, as a tuple; for a single object, its replacement alone:

    - the pytree with the leaves of rank 0; after a failed run: of the rank that has made the most steps, which a rank
      that was started again has not;
    - a `DistributedOptimizer`, whose ``update`` takes the mean of the gradients of all ranks.

    May be called again on its results. Each rank takes its share of the data itself, as in ``x[rank()::size()]``.
    ``options`` are keyword arguments of `DistributedOptimizer`. Models of Keras go to the `prepare` of that face.

    Raises NotInitializedError before ``init()``; TypeError, which names the argument, for any other object.
    """
    if another := of_another("prepare", objects, "jax"):
        return another(*objects, **options)
    optimizers, trees = by_kind(objects, _KINDS).values()
    prepared: dict[int, Any] = {}
    for optimizer in optimizers:
        own = isinstance(optimizer, GradientTransformation)  # the cell was run again
        prepared[id(optimizer)] = optimizer if own else DistributedOptimizer(optimizer, **options)
    root, _ = furthest([steps_made()])
    for tree in trees:
        prepared[id(tree)] = broadcast_parameters(tree, root)
    return in_order(objects, prepared)
