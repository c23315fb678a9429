"""prepare: the pytrees and the optimizer of a training loop with JAX, made data parallel in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
from ring_notebook.api.foreign_calls import steps_made
from ring_notebook.api.preparation import by_kind, check_same_options, furthest, in_order, of_another
from ring_notebook.jax.averaging import (
    Distributed,
    DistributedOptimizer,
    broadcast_parameters,
    is_optimizer,
    is_value,
)


def has_values(tree: Any) -> bool:
    """Whether a pytree has arrays or numbers, among others, or no leaves, as the state of `optax.sgd`; not None."""
    leaves = jax.tree_util.tree_leaves(tree)
    return any(map(is_value, leaves)) if leaves else tree is not None


def _is_of_nnx(value: Any) -> bool:
    """An object of flax.nnx that changes in place: a module, an optimizer, random numbers, metrics.

    Its `Rngs` have any attribute, also those of an optimizer of optax.
    """
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, (nnx.Module, nnx.Optimizer, nnx.Rngs, nnx.metrics.Metric))


def _is_of_linen(value: Any) -> bool:
    """A module of flax.linen, which has no values of its own."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(value, linen.Module)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "modules of flax": lambda one: _is_of_nnx(one) or _is_of_linen(one),
    "optimizers of optax": is_optimizer,
    "pytrees of arrays": has_values,
}


def prepare(*objects: Any, **options: Any) -> Any:
    """Make a training loop data parallel; all ranks must call this. Beyond Horovod.

    Takes pytrees (parameters, modules of Equinox, an optimizer's state) and optax optimizers, any number of each in any
    order, and returns their replacements in that order, as a tuple; for a single object, its replacement alone:

    - the pytree with the leaves of rank 0; after a failed run: of the rank that has made the most steps. The
      optimizer in a TrainState of flax becomes a distributed one;
    - a `DistributedOptimizer`, whose ``update`` takes the mean of the gradients of all ranks;
    - modules, optimizers, random numbers and metrics of flax.nnx themselves, changed in the same way; modules of
      flax.linen, which have no values, unchanged.

    May be called again on its results, with the same options. Each rank takes its share of the data itself, as in
    ``x[rank()::size()]``. ``options`` are keyword arguments of `DistributedOptimizer`. Models of Keras go to the
    `prepare` of that face.

    Raises NotInitializedError before ``init()``; TypeError, which names the argument, for any other object; ValueError
    for other options than before.
    """
    if another := of_another("prepare", objects, "jax"):
        return another(*objects, **options)
    modules, optimizers, trees = by_kind(objects, _KINDS).values()
    prepared: dict[int, Any] = {id(one): one for one in modules}
    for optimizer in optimizers:
        prepared[id(optimizer)] = _distributed(optimizer, options)
    root, _ = furthest([steps_made()])
    for one in filter(_is_of_nnx, modules):
        nnx = sys.modules["flax.nnx"]
        nnx.update(one, broadcast_parameters(nnx.state(one), root))
        if isinstance(one, nnx.Optimizer):
            one.tx = _distributed(one.tx, options)
    for tree in trees:
        prepared[id(tree)] = broadcast_parameters(tree, root)
        if is_optimizer(getattr(tree, "tx", None)) and hasattr(tree, "replace"):  # a TrainState of flax
            prepared[id(tree)] = prepared[id(tree)].replace(tx=_distributed(tree.tx, options))
    return in_order(objects, prepared)


def _distributed(optimizer: Any, options: dict[str, Any]) -> Any:
    if not isinstance(optimizer, Distributed):
        return DistributedOptimizer(optimizer, **options)
    check_same_options(options, getattr(optimizer.update, "made_with", {}))
    return optimizer
