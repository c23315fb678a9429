"""DistributedOptimizer for Keras: one for TensorFlow, JAX and PyTorch under Keras 3, and for ``tf_keras``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any

from ring_notebook.api.arguments import check_passes, check_predivide, check_process_set, variables_of_layers
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.core.step_guard import step_guard
from ring_notebook.keras.chosen_keras import IS_LEGACY, backend, face, keras
from ring_notebook.keras.gradient_compression import Compression, Compressor


@dataclass(eq=False)
class _Options:
    """How an optimizer reduces, and the step under way."""

    compression: Compressor
    sparse_as_dense: bool
    predivide: float
    op: ReduceOp
    groups: int | Sequence[Sequence[Any]] | None
    process_set: ProcessSet
    scale_local: bool
    factor: float
    total: Any
    """A `GradientSum` of tf_keras, which has none of its own."""
    made_with: dict[str, Any]
    """The arguments of `DistributedOptimizer`, for a snapshot."""
    prepared: int | None = None
    """The rank whose variables `prepare` has given to all; None where it has not been called."""
    scaled: int = 1
    """The factor of `prepare` in the learning rate."""
    local: list[Any] = field(default_factory=list)
    variables: list[Any] = field(default_factory=list)  # of the gradients that are applied now
    frame: Any = None  # of the step, if Python makes it
    set_aside: BaseException | None = None
    reduced: list[int] | None = None
    """The ids of the variables whose gradients have been reduced for the step to come or under way."""

    def take_reduced(self, variables: Sequence[Any]) -> bool:
        """Whether the gradients of these have been reduced; true once only."""
        reduced, self.reduced = self.reduced, None
        return reduced is not None and {id(variable) for variable in variables} <= set(reduced)

    def begin(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Note that a step begins with these; Keras drops pairs without a gradient, and checks their number."""
        self.variables = [v for g, v in zip(gradients, variables, strict=False) if g is not None]

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients reduced over all ranks, once all ranks agree that this succeeded; None stays None."""
        gradients = list(gradients)
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not given or not self.process_set.included() or (self.process_set.size() == 1 and backend() == "torch"):
            return gradients  # a program is traced once, and may run with more ranks later
        local = {id(variable) for variable in self.local}
        known = dict(zip(given, self.variables, strict=True)) if len(self.variables) == len(given) else {}
        own = [index for index in given if id(known.get(index)) in local]
        shared = [index for index in given if index not in own and not _is_replaced(known.get(index))]
        if self.scale_local:
            for index in own:
                gradients[index] = _divided(gradients[index], self.process_set.size())
        reduced = self._reduce_shared([gradients[index] for index in shared], [known.get(index) for index in shared])
        for index, gradient in zip(shared, reduced, strict=True):
            gradients[index] = gradient if self.factor == 1 else gradient * self.factor
        return gradients

    def _reduce_shared(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        if backend() == "tensorflow":
            from ring_notebook.tensorflow.gradients import GradientReduction

            return GradientReduction(
                self.compression,
                self.sparse_as_dense,
                self.op,
                self.predivide,
                self.groups if variables and variables[0] is not None else None,
                self.process_set,
            ).reduce(gradients, variables)
        pairs = [self.compression.compress(gradient) for gradient in gradients]
        options: dict[str, Any] = {
            "op": self.op,
            "prescale_factor": 1.0 / self.predivide,
            "postscale_factor": self.predivide,
            "process_set": self.process_set,
            "name": "gradients",
        }
        if backend() == "jax":
            options["commits"] = True
        reduced = face().grouped_allreduce([tensor for tensor, _ in pairs], **options)
        if backend() == "torch" and self.frame is not None:
            self.set_aside = step_guard.begin(self.process_set.communicator, self.frame)
        return [self.compression.decompress(tensor, c) for tensor, (_, c) in zip(reduced, pairs, strict=True)]


def _divided(gradient: Any, count: int) -> Any:
    if hasattr(gradient, "dense_shape"):  # tf.IndexedSlices; a tensor of torch has methods `values` and `indices`
        return type(gradient)(gradient.values / count, gradient.indices, gradient.dense_shape)
    return gradient / count


def _is_replaced(variable: Any) -> bool:
    """Whether a "gradient" is the new value, as for scales of float8: each rank keeps its own."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


class DistributedMixin:
    """The mixin of a distributed optimizer's class."""

    _ring: _Options
    _ring_made_with: dict[str, Any]
    _trainable_variables: list[Any]  # of Keras
    iterations: Any

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of ``variable`` local to the rank (Horovod: ``register_local_var``)."""
        self._ring.local.append(variable)

    @classmethod
    def from_config(cls, config: Any, *arguments: Any, **options: Any) -> Any:
        """A distributed optimizer of this configuration, with the arguments of `DistributedOptimizer` as here."""
        made = cls.__bases__[1].from_config(config, *arguments, **options)  # type: ignore[attr-defined]
        return made if isinstance(made, DistributedMixin) else DistributedOptimizer(made, **cls._ring_made_with)

    @property
    def _agg_helper(self) -> Any:
        """The sum of gradients of several passes, or None (Horovod's name; scripts read its ``counter``)."""
        return self._ring.total

    def _ring_step(self, step: Callable[[], Any]) -> Any:
        """Make a step of Python on all ranks or on none, without interrupts."""
        if backend() != "torch" or self._ring.frame is not None:  # within that of a LossScaleOptimizer around this one
            return step()
        self._ring.frame, self._ring.set_aside = sys._getframe(), None
        try:
            return step()
        finally:
            self._ring.frame = None
            step_guard.release(self._ring.set_aside)


class _Keras(DistributedMixin):
    """For Keras 3: gradients are reduced before they are clipped, once for each update of the weights."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        shared = [pair for pair in zip(grads, variables, strict=False) if not _is_replaced(pair[1])]
        self._ring.begin([gradient for gradient, _ in shared], [variable for _, variable in shared])
        return self._ring_step(lambda: super(_Keras, self).apply(grads, trainable_variables))  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        known = self._ring.reduced is not None  # by a LossScaleOptimizer around this one
        return super()._clip_gradients(grads if known else self._ring.reduce(grads))  # type: ignore[misc]


class _KerasOwnApply(DistributedMixin):
    """For optimizers of Keras 3 with an ``apply`` of their own: gradients are reduced before it.

    So all ranks see the same overflow in a LossScaleOptimizer, and the parts of a MultiOptimizer, which clip and step
    by themselves, get reduced gradients.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        apply = super().apply  # type: ignore[misc]
        return self._ring_checked(grads, variables, lambda grads: apply(grads, trainable_variables))

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        apply = super().stateless_apply  # type: ignore[misc]
        return self._ring_checked(
            grads,
            self._trainable_variables,  # those given are their values
            lambda grads: apply(optimizer_variables, grads, trainable_variables),
        )

    def _ring_checked(self, grads: Any, variables: Sequence[Any], apply: Callable[[list[Any]], Any]) -> Any:
        grads = list(grads)
        if self._ring.reduced is not None:  # by a LossScaleOptimizer around this one, or by `stateless_apply`
            return apply(grads)
        self._ring.begin(grads, variables)

        def step() -> Any:
            reduced = self._ring.reduce(grads)
            self._ring.reduced = [id(variable) for variable in self._ring.variables]
            return apply(reduced)

        try:
            return self._ring_step(step)
        finally:
            self._ring.reduced = None


class _Legacy(DistributedMixin):
    """For all optimizers of tf_keras."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        apply = super().apply_gradients  # type: ignore[misc]
        return self._ring_apply(grads_and_vars, lambda pairs: apply(pairs, *args, **kwargs))

    def _ring_apply(self, grads_and_vars: Any, apply: Callable[[list[Any]], Any]) -> Any:
        """A step of tf_keras, or with ``backward_passes_per_step`` one pass of a step."""
        pairs, total = list(grads_and_vars), self._ring.total
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if self._ring.reduced is None:
            self._ring.begin(gradients, variables)
        if total is None:
            try:
                return apply(pairs)
            finally:
                self._ring.reduced = None
        if self._ring.take_reduced(variables):
            sums = gradients  # `_compute_gradients` has counted the pass
            self._ring.reduced = [id(variable) for variable in variables]
        else:
            sums = total.add(gradients, variables, lambda sums: sums)

        def step() -> Any:
            apply(list(zip(sums, variables, strict=True)))
            return self.iterations.read_value()

        try:
            return total.when_complete(step, lambda: self.iterations.assign_add(1).read_value())
        finally:
            self._ring.reduced = None

    def _ring_aggregated(self, grads_and_vars: Any) -> list[Any]:
        """The pairs of tf_keras with reduced gradients, before a LossScaleOptimizer around us checks them."""
        pairs, known = list(grads_and_vars), self._ring.reduced
        if self._ring.take_reduced([variable for _, variable in pairs]):
            if self._ring.total is not None:
                self._ring.reduced = known  # so that the step does not reduce this pass again
            return pairs
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        self._ring.begin(gradients, variables)
        return list(zip(self._ring.reduce(gradients), variables, strict=True))


class _LegacyKeras(_Legacy):
    """For tf_keras.optimizers."""

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Over all ranks."""
        return self._ring_aggregated(grads_and_vars)


class _LegacyOptimizer(_Legacy):
    """For tf_keras.optimizers.legacy."""

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """Reduced already, as in Horovod: a step may follow that is told not to aggregate."""
        pairs = list(super()._compute_gradients(loss, var_list, grad_loss, tape=tape))  # type: ignore[misc]
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        self._ring.begin(gradients, variables)
        if self._ring.total is not None:
            found = self._ring.total.add(gradients, variables, self._ring.reduce)
        else:
            found = self._ring.reduce(gradients)
        self._ring.reduced = [id(variable) for variable in variables]
        return list(zip(found, variables, strict=True))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return self._ring_aggregated(grads_and_vars)


def ring_of(optimizer: Any) -> _Options | None:
    """How an optimizer, or the one in tf_keras's LossScaleOptimizer, reduces; None if it is not distributed."""
    parts = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return next((one._ring for one in parts if isinstance(one, DistributedMixin)), None)


def extend_loss_scaling() -> None:
    """Make Keras 3's LossScaleOptimizer distributed if the optimizer within it is.

    So all ranks see the same overflow, whether a user or `compile` makes it. Does nothing the second time.
    """
    if IS_LEGACY or hasattr(keras.optimizers.LossScaleOptimizer.__init__, "_ring_extended"):
        return
    make = keras.optimizers.LossScaleOptimizer.__init__

    @wraps(make)
    def extended(self: Any, inner_optimizer: Any, *arguments: Any, **options: Any) -> None:
        make(self, inner_optimizer, *arguments, **options)
        if isinstance(inner_optimizer, DistributedMixin):
            _distribute(self, _KerasOwnApply, inner_optimizer._ring)

    extended._ring_extended = True  # type: ignore[attr-defined]
    keras.optimizers.LossScaleOptimizer.__init__ = extended


def _distribute(optimizer: Any, mixin: type[DistributedMixin], ring: _Options) -> Any:
    kind = type(optimizer)
    members = {"__module__": kind.__module__, "_ring_made_with": ring.made_with}
    optimizer.__class__ = type(kind.__name__, (mixin, kind), members)
    package, _, own = keras.saving.get_registered_name(kind).partition(">")
    if own:  # registered by the user: saved under the user's name, and loaded as the user's class
        name, known = f"{package}>{own}", keras.saving.get_custom_objects()
        before = known.get(name, kind)
        keras.saving.register_keras_serializable(package, own)(optimizer.__class__)
        known[name] = before
    optimizer._ring = ring
    return optimizer


def _mixin_of(optimizer: Any) -> type[DistributedMixin]:
    if IS_LEGACY:
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        legacy = isinstance(optimizer, keras.optimizers.legacy.Optimizer)
        if not legacy and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(f"DistributedOptimizer takes an optimizer of tf_keras, got {type(optimizer).__name__}")
        return _LegacyOptimizer if legacy else _LegacyKeras
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes an optimizer of Keras, got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}; for one of tf_keras set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
        )
    return _Keras if type(optimizer).apply is keras.optimizers.Optimizer.apply else _KerasOwnApply


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """``optimizer`` itself, which from now on steps on the gradients of all ranks (Horovod: ``DistributedOptimizer``).

    Its class becomes a subclass of the same name, so that saved models need nothing of ours. All gradients are one
    operation, also under ``gradient_accumulation_steps``, which are summed up locally first: on PyTorch and TensorFlow
    once for each update, on JAX, and with a LossScaleOptimizer or another with an ``apply`` of its own, once for each
    batch. Clipping comes after it. Every rank makes a step, or none does.

    compression: the form in which gradients are sent.
    sparse_as_dense, groups, num_groups: with TensorFlow only, as in `ring_notebook.tensorflow.DistributedGradientTape`.
    gradient_predivide_factor: the part of Average's division that is done before the sum.
    backward_passes_per_step: sets Keras 3's ``gradient_accumulation_steps``. Their sum is applied, or with
        ``average_aggregated_gradients`` their mean, as with Keras' own argument. With tf_keras the same, in variables
        of ours, once for each update.
    process_set: the ranks that take part.
    name, device_dense, device_sparse: Horovod's arguments, without effect.

    A LossScaleOptimizer may be within it or around it, as ``compile`` puts one with ``mixed_float16``.
    With TensorFlow ``model.jit_compile`` is False from the first step on: XLA compiles no collectives. Raises TypeError
    for anything but an optimizer of Keras, ValueError for one that is distributed already.
    """
    check_process_set(process_set)
    check_predivide(gradient_predivide_factor, op)
    passes = check_passes(backward_passes_per_step)
    if ring_of(optimizer) is not None:
        raise ValueError("this optimizer is distributed already; call DistributedOptimizer once")
    mixin, inner = _mixin_of(optimizer), getattr(optimizer, "inner_optimizer", optimizer)
    _check_strategy()
    total, factor = None, 1.0
    if passes > 1 and IS_LEGACY:
        total = import_module("ring_notebook.tensorflow.gradient_sum").GradientSum(passes, average_aggregated_gradients)
    elif passes > 1:
        _accumulate(inner, passes)
        factor = 1.0 if average_aggregated_gradients else float(passes)
    grouping = num_groups if groups is None else groups
    if backend() == "tensorflow":
        grouping = import_module("ring_notebook.tensorflow.gradients").grouping_of(num_groups, groups)
    made_with: dict[str, Any] = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "gradient_predivide_factor": gradient_predivide_factor,
        "op": op,
        "backward_passes_per_step": passes,
        "average_aggregated_gradients": average_aggregated_gradients,
        "num_groups": grouping if isinstance(grouping, int) else 0,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    ring = _Options(
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        grouping,
        process_set,
        scale_local_gradients,
        factor,
        total,
        made_with,
    )
    # tf_keras's LossScaleOptimizer asks the one within it for the gradients of all replicas before it checks them.
    _distribute(inner if IS_LEGACY else optimizer, mixin, ring)
    return optimizer


def PartialDistributedOptimizer(optimizer: Any, *arguments: Any, local_layers: Any = None, **options: Any) -> Any:  # noqa: N802 - Horovod's name
    """`DistributedOptimizer` that leaves the gradients of ``local_layers`` to each rank.

    Horovod: ``PartialDistributedOptimizer``. Their gradients are divided by the number of ranks, unless
    ``scale_local_gradients`` is False. The layers have been built. Raises ValueError for anything but layers.
    """
    local = variables_of_layers(local_layers)
    distributed = DistributedOptimizer(optimizer, *arguments, **options)
    ring: Any = ring_of(distributed)
    ring.local += local
    return distributed


def _accumulate(optimizer: Any, passes: int) -> None:
    if optimizer.built:
        raise ValueError("backward_passes_per_step needs an optimizer that has made no step; wrap it before")
    parts = getattr(optimizer, "optimizers", [optimizer])  # of a MultiOptimizer, which accumulate by themselves
    if not parts:
        raise ValueError(
            "backward_passes_per_step: the optimizers of this MultiOptimizer are made later; give them "
            f"gradient_accumulation_steps={passes}"
        )
    for part in parts:
        if part.gradient_accumulation_steps not in (None, passes):
            raise ValueError(
                f"backward_passes_per_step={passes} and the optimizer's gradient_accumulation_steps="
                f"{part.gradient_accumulation_steps} differ; give one of them"
            )
        part.gradient_accumulation_steps = passes


def _check_strategy() -> None:
    if backend() == "tensorflow":
        from ring_notebook.tensorflow.gradients import refuse_strategies

        refuse_strategies()
    elif keras.distribution.distribution() is not None:
        raise RuntimeError(
            "ranks average gradients themselves, and keras.distribution would divide the batch of each rank again: "
            "leave out keras.distribution.set_distribution(), one rank for each device"
        )
