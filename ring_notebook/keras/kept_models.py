"""How snapshots keep Keras' models and optimizers: what Keras saves of them, and that they belong together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ring_notebook.core.kept_state import Keeper
from ring_notebook.keras.chosen_keras import OPTIMIZERS, arrays_of, assign, keras
from ring_notebook.keras.distributed_optimizer import DistributedMixin, DistributedOptimizer
from ring_notebook.keras.keras_state import variables_of_optimizer


class KerasKeeper(Keeper):
    """Keras' objects for `ring_notebook.core.kept_state`: see `Keeper` there."""

    name = "keras"

    def reduced(self, value: Any) -> Any:
        """A model with its optimizer, and an optimizer with what makes it distributed. The state is in the model."""
        if isinstance(value, keras.Model):
            if hasattr(value, "jax_state_sync"):
                value.jax_state_sync()  # within `fit` JAX's trainer has the values
            optimizer = getattr(value, "optimizer", None)
            make, arguments = value.__reduce__()[:2]
            local = _places_of_local(value, optimizer) if isinstance(optimizer, DistributedMixin) else []
            return _model, (make, arguments, optimizer, local)
        if isinstance(value, OPTIMIZERS):
            config = value.get_config()
            if not isinstance(value, DistributedMixin):
                return _optimizer, (type(value), config, None)
            ring = value._ring
            return _optimizer, (type(value).__bases__[1], config, (ring.made_with, ring.prepared, ring.scaled))
        return NotImplemented

    def loses(self, value: Any) -> str:
        """The state of an optimizer belongs to its model."""
        if isinstance(value, OPTIMIZERS):
            return "its state, unless a model that is kept too was compiled with it"
        return ""


def _places_of_local(model: Any, optimizer: Any) -> list[int]:
    local = {id(variable) for variable in optimizer._ring.local}
    known = model.trainable_variables if model.built else []
    return [place for place, variable in enumerate(known) if id(variable) in local]


def _optimizer(kind: Any, config: Any, distributed: Any) -> Any:
    optimizer = kind.from_config(config)
    if distributed is not None:
        made_with, prepared, scaled = distributed
        optimizer = DistributedOptimizer(optimizer, **made_with)
        optimizer._ring.prepared, optimizer._ring.scaled = prepared, scaled
    return optimizer


def _model(make: Callable[..., Any], arguments: tuple[Any, ...], optimizer: Any, local: list[int]) -> Any:
    model = make(*arguments)
    saved = getattr(model, "optimizer", None)
    if optimizer is None or saved is None:
        return model
    trained = model.trainable_variables if model.built else []
    values = arrays_of(variables_of_optimizer(saved, trained)) if model.built else []
    model.optimizer = optimizer
    if model.built:
        assign(variables_of_optimizer(optimizer, trained), values)
        for place in local:
            optimizer.register_local_var(model.trainable_variables[place])
    return model
