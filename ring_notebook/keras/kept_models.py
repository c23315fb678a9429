"""How snapshots keep Keras' models and optimizers: as Keras saves them, with their links to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ring_notebook.core.kept_state import Keeper
from ring_notebook.keras.chosen_keras import OPTIMIZERS, arrays_of, assign, keras
from ring_notebook.keras.distributed_optimizer import DistributedMixin, DistributedOptimizer, ring_of
from ring_notebook.keras.keras_state import (
    build_for,
    built_for,
    loss_scale_of,
    others_of,
    variables_of_optimizer,
    variables_of_other,
)


class KerasKeeper(Keeper):
    """Keras' objects for `ring_notebook.core.kept_state`: see `Keeper` there."""

    name = "keras"

    def reduced(self, value: Any) -> Any:
        """A model with its optimizer, and an optimizer with its distribution; its state is in the model."""
        if isinstance(value, keras.Model):
            if hasattr(value, "jax_state_sync"):
                value.jax_state_sync()  # within `fit` JAX's trainer has the values
            optimizer = getattr(value, "optimizer", None)
            make, arguments = value.__reduce__()[:2]
            local, scale = _places_of_local(value, ring_of(optimizer)), arrays_of(loss_scale_of(optimizer))
            own = others_of(value, optimizer)
            others = [(_distribution(one), arrays_of(variables_of_other(one, value))) for one in own]
            return _model, (make, arguments, optimizer, local, scale, others, built_for(value, optimizer))
        if isinstance(value, OPTIMIZERS):
            kind = type(value)
            kind = kind.__bases__[1] if isinstance(value, DistributedMixin) else kind
            return _optimizer, (kind, value.get_config(), _distribution(value))
        return NotImplemented

    def loses(self, value: Any) -> str:
        """The state of an optimizer belongs to its model."""
        if isinstance(value, OPTIMIZERS):
            return "its state, unless a model that is kept too has it"
        return ""


def _places_of_local(model: Any, ring: Any) -> list[int]:
    local = {id(variable) for variable in ring.local} if ring is not None else ()
    known = model.trainable_variables if model.built else []
    return [place for place, variable in enumerate(known) if id(variable) in local]


def _distribution(optimizer: Any) -> Any:
    ring = ring_of(optimizer)
    return None if ring is None else (ring.made_with, ring.prepared, ring.scaled)


def _optimizer(kind: Any, config: Any, distributed: Any) -> Any:
    return _distributed(kind.from_config(config), distributed)


def _distributed(optimizer: Any, distributed: Any) -> Any:
    """An optimizer distributed as `_distribution` describes."""
    if distributed is not None and ring_of(optimizer) is None:
        made_with, prepared, scaled = distributed
        optimizer = DistributedOptimizer(optimizer, **made_with)
        ring: Any = ring_of(optimizer)
        ring.prepared, ring.scaled = prepared, scaled
    return optimizer


def _model(
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    optimizer: Any,
    local: list[int],
    scale: list[Any],
    others: list[tuple[Any, list[Any]]],
    built: list[list[int]],
) -> Any:
    model = make(*arguments)
    saved = getattr(model, "optimizer", None)
    if optimizer is None or saved is None:
        return model
    trained = model.trainable_variables if model.built else []
    values = arrays_of(variables_of_optimizer(saved, trained)) if model.built else []
    model.optimizer = optimizer
    if model.built:
        assign(variables_of_optimizer(optimizer, trained), values)
        assign(loss_scale_of(optimizer), scale)
        ring: Any = ring_of(optimizer)
        for place in local:
            ring.local.append(model.trainable_variables[place])
    build_for(model, optimizer, built)
    for one, (distributed, values) in zip(others_of(model, optimizer), others, strict=False):
        assign(variables_of_other(_distributed(one, distributed), model), values)
    return model
