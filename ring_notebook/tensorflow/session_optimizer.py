"""DistributedOptimizer for the optimizers of TensorFlow 1; those of Keras go to `ring_notebook.keras`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import tensorflow as tf
from ring_notebook.api.arguments import check_passes, check_predivide, check_process_set
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.tensorflow.gradient_sum import GradientSum
from ring_notebook.tensorflow.gradients import GradientReduction, grouping_of
from ring_notebook.tensorflow.tensor_compression import Compression, Compressor

_Optimizer: Any = tf.compat.v1.train.Optimizer


class SessionOptimizer(_Optimizer):  # type: ignore[misc]
    """An optimizer of TensorFlow 1 whose ``compute_gradients`` returns the reduced gradients."""

    def __init__(
        self,
        optimizer: Any,
        reduction: GradientReduction,
        total: GradientSum | None,
        name: str | None,
        use_locking: bool,
    ) -> None:
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction
        self._total = total
        self._local: list[Any] = []

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of ``var`` local to the rank (Horovod: ``register_local_var``)."""
        self._local.append(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer's own, reduced; with ``backward_passes_per_step`` zeros until the last of these passes."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if self._total is None:
            gradients = self._reduction.reduce(gradients, variables, self._local)
        else:
            known = [variable for gradient, variable in pairs if gradient is not None]
            gradients = self._total.add(
                gradients, variables, lambda sums: self._reduction.reduce(sums, known, self._local)
            )
        return list(zip(gradients, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As the optimizer's own; before the last of ``backward_passes_per_step`` it counts ``global_step`` only."""
        if self._total is None:
            return self._optimizer.apply_gradients(grads_and_vars, global_step, name)

        def count() -> Any:
            return tf.no_op() if global_step is None else global_step.assign_add(1).op

        return self._total.when_complete(
            lambda: self._optimizer.apply_gradients(grads_and_vars, global_step, name), count
        )

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
    `ring_notebook.keras.DistributedOptimizer`. The other arguments are those of `DistributedGradientTape`; of
    ``backward_passes_per_step`` passes the gradients are added up, or averaged with ``average_aggregated_gradients``,
    before they are reduced. Raises TypeError for any other optimizer, ValueError for several passes of an optimizer of
    TensorFlow 1 with eager execution.
    """
    grouping = grouping_of(num_groups, groups)
    if isinstance(optimizer, _Optimizer):
        check_process_set(process_set)
        check_predivide(gradient_predivide_factor, op)
        total = None
        if check_passes(backward_passes_per_step) > 1:
            if tf.executing_eagerly():
                raise ValueError(
                    f"backward_passes_per_step={backward_passes_per_step} of an optimizer of TensorFlow 1 needs a "
                    "graph: make it in `with tf.Graph().as_default():`, or take one of Keras"
                )
            total = GradientSum(backward_passes_per_step, average_aggregated_gradients)
        reduction = GradientReduction(
            compression, sparse_as_dense, op, gradient_predivide_factor, grouping, process_set, scale_local_gradients
        )
        return SessionOptimizer(optimizer, reduction, total, name, use_locking)
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
