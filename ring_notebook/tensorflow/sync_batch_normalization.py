"""Batch normalization with the mean and variance of all ranks' batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.tensorflow.tensor_collectives import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """``tf.keras.layers.BatchNormalization`` over the batches of all ranks, which have equal sizes.

    Horovod: ``SyncBatchNormalization``. Differentiable: gradients of the moments are those of all ranks.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ring_process_set = process_set

    def _moments(self, *args: Any, **kwargs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = super()._moments(*args, **kwargs)
        if self._ring_process_set.size() == 1:
            return mean, variance
        squares = variance + tf.square(mean)
        both = allreduce(tf.stack([mean, squares]), op=ReduceOp.AVERAGE, process_set=self._ring_process_set)
        return both[0], both[1] - tf.square(both[0])
