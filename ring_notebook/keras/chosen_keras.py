"""The Keras of this process: Keras 3, or ``tf_keras`` where ``TF_USE_LEGACY_KERAS`` asks TensorFlow for that."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

IS_LEGACY = os.environ.get("TF_USE_LEGACY_KERAS", "") in ("1", "True", "true")
_OLDEST = (3, 5)


def _chosen() -> ModuleType:
    name = "tf_keras" if IS_LEGACY else "keras"
    try:
        found = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        package = "tf_keras" if IS_LEGACY else "'ring-notebook[keras]'"
        raise ModuleNotFoundError(
            f"ring_notebook.keras needs {name}, which is not installed: `pip install {package}`", name=name
        ) from None
    if not IS_LEGACY and tuple(map(int, found.__version__.split(".")[:2])) < _OLDEST:
        raise ImportError(
            f"ring_notebook.keras needs Keras {'.'.join(map(str, _OLDEST))} or newer, and this is {found.__version__}: "
            "`pip install --upgrade keras`, or for models of Keras 2 `pip install tf_keras` and TF_USE_LEGACY_KERAS=1"
        )
    return found


keras: Any = _chosen()
OPTIMIZERS = (keras.optimizers.Optimizer, *([keras.optimizers.legacy.Optimizer] if IS_LEGACY else []))
"""The classes of all optimizers."""


def backend() -> str:
    """The name of the framework under Keras, and of our face for it."""
    return "tensorflow" if IS_LEGACY else str(keras.backend.backend())


def face() -> Any:
    """Our face for the framework under Keras."""
    if backend() not in ("tensorflow", "jax", "torch"):
        raise NotImplementedError(f"Keras with backend {backend()!r}; use tensorflow, jax or torch")
    return import_module(f"ring_notebook.{backend()}")


def arrays_of(variables: Any) -> list[Any]:
    """The values of Keras variables as arrays that belong to the caller."""
    values = keras.backend.batch_get_value(variables) if IS_LEGACY else map(keras.ops.convert_to_numpy, variables)
    return [np.array(value, order="C") for value in values]  # of tf_keras also in a graph of TensorFlow 1


def assign(variables: Any, arrays: Any) -> None:
    """Give variables these values."""
    set_value = keras.backend.set_value if IS_LEGACY else lambda variable, array: variable.assign(array)
    for variable, array in zip(variables, arrays, strict=True):
        set_value(variable, array)


def new_batches(model: Any, batch: int, before: int, steps: int | None) -> int:
    """The number of batches after ``before`` when Keras reports the end of ``batch``; an epoch has ``steps``.

    It is above 1 with ``steps_per_execution``.
    """
    # Keras 3.5 reports the first of several batches; later versions the last, maybe beyond the end of the epoch.
    done = batch + 1 if IS_LEGACY else before + (model.steps_per_execution or 1)
    return min(done, steps or done) - before
