"""Elastic training with Keras (Horovod: ``horovod.keras.elastic``)."""

from ring_notebook.api.elastic_training import State, run
from ring_notebook.keras.keras_state import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
