"""What an elastic training of TensorFlow keeps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import tensorflow as tf
from ring_notebook.api.object_state import ObjectState


class TensorFlowState(ObjectState):
    """The state of a training: ``variables``, and whatever else is given, as attributes of those names.

    Without ``variables`` those of the default graph of TensorFlow 1, with ``session`` for their values. (Horovod:
    ``TensorFlowState``.)
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        self._session = session
        self._given = variables
        super().__init__(variables=None, **kwargs)

    def _variables(self) -> list[Any]:
        return list(tf.compat.v1.global_variables() if self._given is None else self._given)

    def save(self) -> None:
        """Keep the present values in memory, as those to go back to."""
        self.variables = self._values()
        super().save()

    def sync(self) -> None:
        """Take rank 0's values on all ranks, and keep them."""
        self.variables = self._values()
        super().sync()

    def load_content(self, name: str, content: Any) -> None:
        """Also assigns the variables."""
        super().load_content(name, content)
        if name == "variables":
            for variable, value in zip(self._variables(), content, strict=True):
                variable.load(value, self._session) if self._session else variable.assign(value)

    def _values(self) -> list[Any]:
        variables = self._variables()
        if self._session is not None:
            return list(self._session.run(variables))
        return [variable.numpy() for variable in variables]


def TensorFlowKerasState(model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> Any:  # noqa: N802 - Horovod's name
    """`ring_notebook.keras.elastic.KerasState` (Horovod: ``TensorFlowKerasState``)."""
    return import_module("ring_notebook.keras.elastic").KerasState(model, optimizer, backend, **kwargs)
