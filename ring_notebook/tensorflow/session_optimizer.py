"""DistributedOptimizer: for the optimizers of TensorFlow 1, and for those of Keras, which its own module wraps."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import tensorflow as tf
from ring_notebook.api.arguments import check_passes
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.tensorflow.gradients import GradientReduction
from ring_notebook.tensorflow.tensor_compression import Compression, Compressor

_Optimizer: Any = tf.compat.v1.train.Optimizer


class SessionOptimizer(_Optimizer):  # type: ignore[misc]
    """An optimizer of TensorFlow 1 whose ``compute_gradients`` returns those of all ranks."""

    def __init__(self, optimizer: Any, reduction: GradientReduction, name: str | None, use_locking: bool) -> None:
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer's own, reduced."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients = self._reduction.reduce([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs, strict=True)]

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that steps on the gradients of all ranks (Horovod: ``DistributedOptimizer``).

    ``optimizer`` is a ``tf.compat.v1.train.Optimizer``, or one of Keras, for which see
    `ring_notebook.keras.DistributedOptimizer`. The other arguments are those of `DistributedGradientTape`. Raises
    NotImplementedError for ``backward_passes_per_step`` above 1 with an optimizer of TensorFlow 1.
    """
    grouping = groups if groups is not None else num_groups
    if isinstance(optimizer, _Optimizer):
        if check_passes(backward_passes_per_step) > 1:
            raise NotImplementedError(
                "backward_passes_per_step above 1 needs an optimizer of Keras; with one of TensorFlow 1 add up the "
                "gradients of several batches in your graph"
            )
        reduction = GradientReduction(
            compression, sparse_as_dense, op, gradient_predivide_factor, grouping, process_set, scale_local_gradients
        )
        return SessionOptimizer(optimizer, reduction, name, use_locking)
    return import_module("ring_notebook.keras").DistributedOptimizer(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=grouping,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )
