"""Gradients of several backward passes, added up before they are reduced (Horovod: ``backward_passes_per_step``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class GradientSum:
    """Sums of ``passes`` passes in variables of its own: eagerly, in a ``tf.function`` and in a graph of TensorFlow 1.

    With ``average``, means. Sums of ``tf.IndexedSlices`` are dense. The graph of a session makes two calls, `add` for
    the gradients and `when_complete` for the step, between which a user may clip.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self._passes = passes
        self._factor = 1.0 / passes if average else 1.0
        self._sums: list[Any] = []
        self._count: Any = None
        self._is_complete: Any = None

    @property
    def counter(self) -> Any:
        """The variable that counts passes since the last step; None before the first (Horovod: ``counter``)."""
        return self._count

    def add(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """After the last pass, the sums after ``reduce``, and new sums begin; before that, zeros.

        None stays None.
        """
        at = [index for index, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.convert_to_tensor(gradients[index]) for index in at]
        self._make_variables(dense, [variables[index] for index in at])
        added = [total.assign_add(gradient) for total, gradient in zip(self._sums, dense, strict=True)]
        with tf.control_dependencies(_operations(added)):
            self._is_complete = tf.equal(self._count.assign_add(1), self._passes)

        def complete() -> list[Any]:
            sums = [total.read_value() * tf.cast(self._factor, total.dtype) for total in self._sums]
            with tf.control_dependencies(_operations(sums)):
                cleared = [total.assign(tf.zeros_like(total)) for total in self._sums]
                cleared.append(self._count.assign(0))
            reduced = reduce(sums)
            with tf.control_dependencies(_operations(cleared)):
                return [tf.identity(gradient) for gradient in reduced]

        results: list[Any] = list(gradients)
        if at:
            found = tf.cond(self._is_complete, complete, lambda: [tf.zeros_like(gradient) for gradient in dense])
            for index, gradient in zip(at, found if isinstance(found, (list, tuple)) else [found], strict=True):
                results[index] = gradient
        return results

    def when_complete(self, apply: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """``apply()`` where the last `add` completed the sums, else ``otherwise()``; both return a tensor or an op.

        In a graph returns an operation, as optimizers do: a LossScaleOptimizer chooses between it and one that skips.
        """
        made = tf.cond(self._is_complete, apply, otherwise)
        return made if tf.executing_eagerly() else tf.group(made)

    def _make_variables(self, gradients: list[Any], variables: list[Any]) -> None:
        if self._count is not None:
            return
        with tf.init_scope():
            self._sums = [
                tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False, name="gradient_sum")
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
            self._count = tf.Variable(0, trainable=False, name="backward_passes")


def _operations(tensors: Sequence[Any]) -> list[Any]:
    """What a graph can wait for; eagerly nothing has to."""
    return [] if tf.executing_eagerly() else list(tensors)
