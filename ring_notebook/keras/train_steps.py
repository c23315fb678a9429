"""The compiled training steps of models with a distributed optimizer.

On JAX the model keeps its weights when a step fails or is interrupted: Keras would donate the memory of the weights to
the step, and lose them when an operation in it fails. On TensorFlow XLA does not compile them. A model that was
prepared, and compiled again since, has none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ring_notebook.api.basics import rank, size
from ring_notebook.core.step_guard import step_guard
from ring_notebook.keras.chosen_keras import backend, keras
from ring_notebook.keras.distributed_optimizer import ring_of
from ring_notebook.keras.keras_state import optimizers_of

_PARTS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def extend_steps() -> None:
    """Make Keras build such steps for models with a distributed optimizer.

    On JAX one needs memory for the variables before and after it. Does nothing the second time.
    """
    make = keras.Model.make_train_function
    if hasattr(make, "_ring_extended"):
        return

    @wraps(make)
    def make_train_function(model: Any, force: bool = False) -> Any:
        rings = [ring_of(optimizer) for optimizer in optimizers_of(model)]
        if None in rings and getattr(model, "_ring_prepared", False) and size() > 1:
            raise RuntimeError(
                f"rank {rank()}: model {model.name!r} was prepared, but has an optimizer that is not distributed, so "
                "the weights of the ranks would differ; call prepare again after compile"
            )
        ring = next(filter(None, rings), None)
        if ring is None or backend() == "torch":
            return make(model, force)
        if backend() == "tensorflow":
            if model.jit_compile:
                model.jit_compile = False  # XLA compiles no collectives
            return make(model, force)
        ranks = ring.process_set.size()
        if not force and getattr(model.train_function, "ring_size", None) == ranks:
            return None
        with _without_donation(sys.modules[make.__module__]):
            make(model, True)  # even if it exists: the program contains the number of ranks
        model.train_function = _keeping(model, model.train_function)
        model.train_function.ring_size = ranks
        return None

    make_train_function._ring_extended = True  # type: ignore[attr-defined]
    keras.Model.make_train_function = make_train_function


@contextmanager
def _without_donation(trainer: Any) -> Iterator[None]:
    owner: Any = trainer if hasattr(trainer, "jit") else sys.modules["jax"]  # older Keras names `jax.jit`
    jit = owner.jit

    def without_donation(*functions: Any, **options: Any) -> Any:
        return jit(*functions, **{name: value for name, value in options.items() if not name.startswith("donate")})

    owner.jit = without_donation
    try:
        yield
    finally:
        owner.jit = jit


def _keeping(model: Any, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    jax: Any = sys.modules["jax"]

    def keeping(state: Sequence[Any], iterator: Any) -> Any:
        last = state
        try:
            with step_guard.holding():  # an interrupt between the step and its result would lose the result
                outputs, after = step(state, iterator)
                jax.block_until_ready(after)  # JAX returns before the program has ended
                last = after
        except BaseException:
            model._jax_state = dict(zip(_PARTS, last, strict=True))
            model._jax_state_synced = False
            model.jax_state_sync()
            raise
        return outputs, after

    return keeping
