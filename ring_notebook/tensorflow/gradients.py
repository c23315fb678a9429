"""Gradients of all ranks as one operation: for a tape, and for the optimizers of TensorFlow and Keras."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ring_notebook.api.arguments import (
    check_integer,
    check_predivide,
    check_process_set,
    number_of,
    variables_of_layers,
)
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.tensorflow.graph_call import number_op
from ring_notebook.tensorflow.tensor_collectives import grouped_allreduce
from ring_notebook.tensorflow.tensor_compression import Compression, Compressor


def refuse_strategies() -> None:
    """Raise RuntimeError within a ``tf.distribute`` strategy, which reduces gradients of replicas by itself."""
    if tf.distribute.has_strategy():
        strategy = type(tf.distribute.get_strategy()).__name__
        raise RuntimeError(
            f"ranks average gradients themselves, and {strategy} of tf.distribute would do so again: "
            "make the model and the optimizer outside of strategy.scope(), one rank for each device"
        )


def grouping_of(num_groups: int, groups: Any) -> int | Sequence[Sequence[Any]]:
    """Horovod's two arguments for groups as one. Raises TypeError or ValueError for anything but a number or lists."""
    grouping: int | Sequence[Sequence[Any]] = num_groups if groups is None else groups
    if not isinstance(grouping, (list, tuple)) and check_integer(grouping, "groups") < 0:
        raise ValueError(f"groups must be a number of groups, or lists of variables, got {groups!r}")
    return grouping


@dataclass(frozen=True)
class GradientReduction:
    """How gradients are reduced; the arguments of `DistributedGradientTape`."""

    compression: Compressor = Compression.none
    sparse_as_dense: bool = False
    op: ReduceOp = ReduceOp.AVERAGE
    predivide: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local: bool = True

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Sequence[Any] = ()) -> list[Any]:
        """The gradients of ``variables`` over all ranks; None stays None, and those of ``local`` stay this rank's own.

        Dense ones are one operation for each group. No rank gets the last before all have theirs. A rank outside of the
        process set keeps its own.
        """
        refuse_strategies()
        if not self.process_set.included():
            return list(gradients)
        results, number = list(gradients), number_of(self.process_set)
        local_ids = {id(variable) for variable in local}
        shared = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) in local_ids:
                if self.scale_local:
                    results[index] = _scaled(gradient, 1 / tf.cast(number_op("size", number), tf.float64))
            else:
                shared.append(index)
                if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                    results[index] = tf.convert_to_tensor(gradient)
        if self.process_set.size() == 1 and tf.executing_eagerly():  # a function may be called with more ranks later
            return results
        parts = [part for part in self._parts(shared, variables) if part]
        for part in parts:
            reduced = grouped_allreduce(
                [results[index] for index in part],
                compression=self.compression,
                op=self.op,
                prescale_factor=1.0 / self.predivide,
                postscale_factor=self.predivide,
                process_set=self.process_set,
                name="gradients",
                commits=part is parts[-1],
            )
            for index, gradient in zip(part, reduced, strict=True):
                results[index] = gradient
        return results

    def _parts(self, shared: list[int], variables: Sequence[Any]) -> list[list[int]]:
        if not self.groups:
            return [shared]
        if isinstance(self.groups, int):
            base, extra = divmod(len(shared), self.groups)
            ends = [(number + 1) * base + min(number + 1, extra) for number in range(self.groups)]
            return [shared[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        owner = {_reference(variable): number for number, group in enumerate(self.groups) for variable in group}
        parts: dict[int, list[int]] = {}
        for index in shared:
            parts.setdefault(owner.get(_reference(variables[index]), -1), []).append(index)
        return list(parts.values())


def _reference(variable: Any) -> Any:
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def _scaled(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


class _DistributedTape:
    """The mixin of a wrapped tape's class."""

    _ring_reduction: GradientReduction
    _ring_local: list[Any]

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **more: Any
    ) -> Any:
        """As ``tf.GradientTape.gradient``, reduced over all ranks; ``use_generic_names`` has no effect."""
        gradients = super().gradient(target, sources, output_gradients, **more)  # type: ignore[misc]
        flat = self._ring_reduction.reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources), self._ring_local)
        return tf.nest.pack_sequence_as(gradients, flat)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """The pairs of source and gradient that stay local, and the reduced ones, with the gradients of `gradient`.

        Horovod: ``get_local_and_global_gradients``.
        """
        sources = tf.nest.flatten(sources)
        local_ids = {id(source) for source in self._ring_local}
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients, use_generic_names), strict=True))
        return (
            [pair for pair in pairs if id(pair[0]) in local_ids],
            [pair for pair in pairs if id(pair[0]) not in local_ids],
        )

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of this source local to the rank (Horovod: ``register_local_source``)."""
        self._ring_local.append(source)


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape of the same class and recording whose ``gradient`` is reduced over all ranks.

    Horovod: ``DistributedGradientTape``. All gradients are one operation, or one for each of ``groups`` (a number, or
    lists of variables). Every rank gets them, or every rank raises. ``sparse_as_dense`` reduces ``tf.IndexedSlices`` as
    dense tensors instead of gathering their rows. ``gradient_predivide_factor`` is the part of Average's division that
    is done before the sum. ``device_dense`` and ``device_sparse`` have no effect.
    """
    check_process_set(process_set)
    check_predivide(gradient_predivide_factor, op)
    kind = type(gradtape)
    tape = copy.copy(gradtape)
    tape.__class__ = type(kind.__name__, (_DistributedTape, kind), {})
    tape._ring_reduction = GradientReduction(
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        grouping_of(num_groups, groups),
        process_set,
        scale_local_gradients,
    )
    tape._ring_local = []
    return tape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape, *arguments: Any, local_layers: Any = None, **options: Any
) -> Any:
    """`DistributedGradientTape` that leaves the gradients of ``local_layers`` to each rank.

    Horovod: ``PartialDistributedGradientTape``. Local gradients are divided by the number of ranks, unless
    ``scale_local_gradients`` is False.
    """
    tape = DistributedGradientTape(gradtape, *arguments, **options)
    for variable in variables_of_layers(local_layers):
        tape.register_local_source(variable)
    return tape
