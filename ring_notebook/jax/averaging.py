"""Gradients averaged over all ranks, for a training loop and for optax."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from ring_notebook.api.arguments import number_of
from ring_notebook.api.foreign_calls import ForeignCall
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.jax.collectives import collective, grouped_allreduce


def average_gradients(tree: Any, op: ReduceOp = ReduceOp.AVERAGE, process_set: ProcessSet = global_process_set) -> Any:
    """The pytree of gradients with each leaf averaged over all ranks, in one operation for each dtype.

    Inside or outside of ``jit``. No rank gets the result before all have theirs, so that all make the optimizer step
    that follows or none. ``op`` is one that `allreduce` takes, such as Sum. Raises CollectiveMismatch on every rank
    when the trees differ.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    at = [index for index, leaf in enumerate(leaves) if not _is_of_integers(leaf)]
    given = [leaves[index] for index in at]
    reduced = grouped_allreduce(given, name="gradients", op=op, process_set=process_set, commits=True)
    for index, gradient in zip(at, reduced, strict=True):
        leaves[index] = gradient
    return jax.tree_util.tree_unflatten(structure, leaves)


def _is_of_integers(gradient: Any) -> bool:
    """Whether this is JAX's gradient of integers (``allow_int``), which has no values."""
    return bool(getattr(gradient, "dtype", None) == jax.dtypes.float0)


class Distributed:
    """The mixin of a distributed optimizer's type."""

    __slots__ = ()
    init: Any
    update: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Needed because a snapshot cannot find its type by a name."""
        return _distributed, (type(self).__bases__[1], self.init, self.update)


class _GradientTransformation(NamedTuple):
    init: Any
    update: Any


@cache
def _distributed_kind(kind: type) -> Any:
    """A type of the same kind: optax asks for it before it passes arguments of its own to ``update``."""
    pair = kind if getattr(kind, "_fields", ()) == _GradientTransformation._fields else _GradientTransformation
    return type(pair.__name__.strip("_"), (Distributed, pair), {"__slots__": ()})


def _distributed(kind: type, init: Any, update: Any) -> Any:
    return _distributed_kind(kind)(init, update)


def is_optimizer(value: Any) -> bool:
    """Whether this is an optax optimizer."""
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def DistributedOptimizer(  # noqa: N802 - the name of the other faces
    optimizer: Any, op: ReduceOp = ReduceOp.AVERAGE, process_set: ProcessSet = global_process_set
) -> Any:
    """An optax optimizer (``init`` and ``update``) that updates with the gradients of all ranks.

    It is of the same type, so that `optax.chain` passes on what its ``update`` takes beside the gradients: ``value``,
    ``grad``, and what ``value_fn`` and ``grad_fn`` return, are averaged too, so that all ranks decide the same by them.
    A rank outside of ``process_set`` updates with its own gradients.
    """
    if not is_optimizer(optimizer):
        raise TypeError(f"DistributedOptimizer takes an optax optimizer, got {type(optimizer).__name__}")

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
        if process_set.included():
            if op != ReduceOp.AVERAGE and more.get("value_fn") is not None:
                raise ValueError(
                    "DistributedOptimizer: a line search (value_fn) takes op=Average, not "
                    f"{ReduceOp(op).name.title()}: optax keeps value and gradient of all ranks in its state, which "
                    "the next step would reduce again"
                )
            average = partial(average_gradients, op=op, process_set=process_set)
            given = {name: more[name] for name in ("value", "grad") if more.get(name) is not None}
            if "value" in given:
                given["value"] = jnp.asarray(given["value"]) * 1.0  # a number of Python, an integer
            updates, given = average((updates, given))
            functions = {
                name: of_all(more[name], average)
                for name, of_all in (("value_fn", _value_of_all), ("grad_fn", _gradient_of_all))
                if more.get(name) is not None
            }
            more = {**more, **given, **functions}
        return optimizer.update(updates, state, params, **more)

    update.made_with = {"op": op, "process_set": process_set}  # type: ignore[attr-defined]
    return _distributed(type(optimizer), optimizer.init, update)


def _gradient_of_all(function: Callable[..., Any], average: Callable[[Any], Any]) -> Callable[..., Any]:
    """``function`` with its result averaged."""
    return wraps(function)(lambda *arguments, **more: average(function(*arguments, **more)))


def _value_of_all(function: Callable[..., Any], average: Callable[[Any], Any]) -> Callable[..., Any]:
    """A loss of parameters, averaged; its gradient is the average of the ranks' gradients."""

    @wraps(function)  # optax reads its signature
    def value_of_all(parameters: Any, *arguments: Any, **more: Any) -> Any:
        def own(parameters: Any) -> Any:
            return function(parameters, *arguments, **more)

        averaged = jax.custom_vjp(lambda parameters: average(own(parameters)))
        averaged.defvjp(
            lambda parameters: average(jax.value_and_grad(own)(parameters)),
            lambda gradient, factor: (jax.tree_util.tree_map(lambda one: one * factor, gradient),),
        )
        return averaged(parameters)

    return value_of_all


def broadcast_parameters(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """The pytree with the leaves of ``root_rank``: parameters, the state of an optimizer, keys of random numbers.

    Numbers of Python stay such. Leaves that are neither arrays nor numbers, such as functions in a module of Equinox,
    do not change.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    what = ForeignCall("broadcast", "parameters", root=root_rank, process_set=number_of(process_set))
    process_set.group_rank(root_rank)
    at = [index for index, leaf in enumerate(leaves) if is_value(leaf)]
    for index, value in zip(at, collective(what, [leaves[index] for index in at], process_set), strict=True):
        leaves[index] = _as_given(leaves[index], value)
    return jax.tree_util.tree_unflatten(structure, leaves)


def _as_given(leaf: Any, sent: Any) -> Any:
    """``sent`` as a number of Python where ``leaf`` is one: modules of Equinox decide by them how to compute."""
    if hasattr(leaf, "dtype") or isinstance(sent, jax.core.Tracer):
        return sent
    # The number itself, because an array has fewer digits.
    return leaf if sent == jnp.asarray(leaf) else type(leaf)(sent.item())


def is_value(leaf: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return (hasattr(leaf, "dtype") and not _is_of_integers(leaf)) or isinstance(leaf, (int, float, complex))
