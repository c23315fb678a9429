"""prepare: a compiled Keras model and its data, made data parallel in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ring_notebook.api.basics import size
from ring_notebook.api.preparation import by_kind, check_same_options, furthest, in_order
from ring_notebook.core.metrics import note_params
from ring_notebook.keras.callbacks import AgreedStop, BroadcastGlobalVariablesCallback, MetricAverageCallback
from ring_notebook.keras.chosen_keras import OPTIMIZERS, keras
from ring_notebook.keras.distributed_optimizer import DistributedOptimizer, ring_of
from ring_notebook.keras.keras_state import broadcast_state, is_built, optimizers_of, rate_of
from ring_notebook.keras.training_data import is_data, share

_KINDS: dict[str, Callable[[Any], bool]] = {
    "models": lambda one: isinstance(one, keras.Model),
    "optimizers": lambda one: isinstance(one, OPTIMIZERS),
    "data": is_data,
}


def prepare(*objects: Any, scale_lr: bool = False, **options: Any) -> Any:
    """Make a training with ``fit`` data parallel; all ranks must call this. Beyond Horovod.

    Takes compiled models, optimizers and data, any number of each in any order, and returns their replacements in that
    order, as a tuple; for a single object, its replacement alone:

    - the model itself. Its optimizer is a `DistributedOptimizer` now, as are those in its attributes, of a GAN say, and
      it has the variables of rank 0 (after a failed run: of the rank that has made the most steps), or gets them in its
      first `fit` if it is not built yet.
      ``fit`` averages its metrics over the ranks at the end of an epoch, so that callbacks decide alike on all ranks;
    - the optimizer itself, distributed, for a training loop of one's own;
    - this rank's share of the data: of arrays, and tuples, lists and dicts of them, every p-th row of p ranks; of a
      PyDataset, a ``tf.data.Dataset`` and a DataLoader of PyTorch every p-th batch. All shares are equally long.

    May be called again on its results, with the same options, and must be after another ``compile``, without which
    `fit` raises RuntimeError.

    scale_lr: multiply the learning rate by ``size()`` (Goyal et al. 2017), once per optimizer. Not with a schedule.
    options: keyword arguments of `DistributedOptimizer`.

    Raises NotInitializedError before ``init()``; TypeError, which names the argument, for any other object; ValueError
    for other options than before, for a model without an optimizer, and for data that is too short for the ranks or of
    unknown length.
    """
    models, optimizers, data = by_kind(objects, _KINDS).values()
    prepared: dict[int, Any] = {id(one): one for one in objects}
    for model in models:
        if getattr(model, "optimizer", None) is None:
            raise ValueError("prepare: the model has no optimizer; call model.compile(optimizer=..., loss=...) before")
    for one in data:
        prepared[id(one)] = share(one)
    for model in models:
        own = optimizers_of(model)
        if not all(map(ring_of, own)):
            model.train_function = None  # of an earlier `fit`, for one process
        root, _ = furthest([max(map(_steps, own))])
        for optimizer in own:
            _, ring = _distributed(optimizer, scale_lr, options)
            ring.prepared = root
        model._ring_prepared = True
        if is_built(model):
            broadcast_state(model, root)
    for optimizer in optimizers:
        prepared[id(optimizer)], _ = _distributed(optimizer, scale_lr, options)
    return in_order(objects, prepared)


def callbacks_of(model: Any) -> tuple[list[Any], list[Any]]:
    """The callbacks that ``fit`` of a prepared model calls before and after those that it was given."""
    ring = ring_of(getattr(model, "optimizer", None))
    if ring is None or ring.prepared is None:
        return [], []
    start = [] if is_built(model) else [BroadcastGlobalVariablesCallback(ring.prepared)]
    return [*start, MetricAverageCallback()], [AgreedStop()]


def _distributed(optimizer: Any, scale_lr: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    """The optimizer, distributed, and how it reduces."""
    if (ring := ring_of(optimizer)) is None:
        optimizer = DistributedOptimizer(optimizer, **options)
        ring = ring_of(optimizer)
    assert ring is not None
    check_same_options(options, ring.made_with)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if scale_lr:
        # The factor stays with the optimizer: a cell that is run again does not scale again.
        rate = rate_of(inner)
        if rate is None:
            raise ValueError(
                "prepare(scale_lr=True): the learning rate is a schedule, or one of several; multiply the rates by "
                "ring.size() instead"
            )
        inner.learning_rate = rate * size() / ring.scaled
        ring.scaled = size()
    note_params(optimizer=type(inner).__name__)
    return optimizer, ring


def _steps(optimizer: Any) -> int:
    return int(optimizer.iterations)
