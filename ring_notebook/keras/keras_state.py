"""What an elastic training with Keras keeps, and the callbacks that keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ring_notebook.api.object_state import ObjectState
from ring_notebook.api.objects import allgather_object
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.keras.chosen_keras import IS_LEGACY, OPTIMIZERS, arrays_of, assign, keras
from ring_notebook.keras.values import broadcast_values


class KerasState(ObjectState):
    """``model`` with its optimizer, or ``optimizer``, and whatever else is given, as attributes of those names.

    Raises ValueError for a model that is not built. ``backend`` is Horovod's argument and has no effect. (Horovod:
    ``KerasState``.)
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not is_built(model):
            raise ValueError(
                "KerasState: the model has no weights yet; call model.build(input_shape), or fit one batch"
            )
        self._model = model
        self._optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(weights=None, **kwargs)
        self.model, self.optimizer = self._model, self._optimizer

    def save(self) -> None:
        """Keep the present values in memory, as those to go back to."""
        self.weights = self._values()
        super().save()

    def sync(self) -> None:
        """Take rank 0's values on all ranks, and keep them."""
        self.weights = self._values()
        super().sync()

    def reset(self) -> None:
        """Make Keras trace the step again: its graph may contain the number of ranks."""
        self._model.train_function = None

    def load_content(self, name: str, content: Any) -> None:
        """Also assigns the variables."""
        super().load_content(name, content)
        if name == "weights":
            built, arrays = content
            build_for(self._model, self._optimizer, built)
            assign(variables_of(self._model, self._optimizer), arrays)

    def _values(self) -> tuple[list[list[int]], list[Any]]:
        arrays = arrays_of(variables_of(self._model, self._optimizer))
        return built_for(self._model, self._optimizer), arrays


def is_built(model: Any) -> bool:
    """Whether the model has its weights: Keras also calls a model built whose layers get theirs in the first step."""
    return bool(model.built and model.weights)


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer of `compile`, and those in attributes of the model, which its own ``train_step`` uses."""
    found = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        found += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return list({id(one): one for one in found if isinstance(one, OPTIMIZERS)}.values())


def others_of(model: Any, optimizer: Any) -> list[Any]:
    """The optimizers in attributes besides ``optimizer``, whose state is kept too; none without ``optimizer``."""
    return [] if optimizer is None else [one for one in optimizers_of(model) if one is not optimizer]


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """The variables that ranks share: those of the model without seeds, and those of its optimizers."""
    seeds = {id(seed) for layer in model._flatten_layers() for seed in _seeds(layer)}
    found = [variable for variable in model.variables if id(variable) not in seeds]
    if optimizer is not None:
        found += variables_of_optimizer(optimizer, model.trainable_variables)
    for one in others_of(model, optimizer):
        found += variables_of_other(one, model)
    return list({id(variable): variable for variable in found}.values())


def variables_of_other(optimizer: Any, model: Any) -> list[Any]:
    """The variables of one of `others_of`; only its first step says which weights it trains (tf_keras: maybe all)."""
    return variables_of_optimizer(optimizer, model.trainable_variables if IS_LEGACY else None)


def built_for(model: Any, optimizer: Any) -> list[list[int]]:
    """For each of `others_of`, the places of its weights among the model's, in its order; [] if it is not built."""
    places = {id(weight): place for place, weight in enumerate(model.weights)}
    trained = [getattr(one, "_trainable_variables", ()) if not IS_LEGACY else () for one in others_of(model, optimizer)]
    return [[places.get(id(weight), -1) for weight in weights] for weights in trained]


def build_for(model: Any, optimizer: Any, places: Sequence[list[int]]) -> None:
    """Build `others_of` as `built_for` describes, on another rank or in another process."""
    weights = model.weights
    for one, own in zip(others_of(model, optimizer), places, strict=False):
        if own and not one.built and 0 <= min(own) <= max(own) < len(weights):
            one.build([weights[place] for place in own])


def broadcast_state(model: Any, root_rank: int, process_set: ProcessSet = global_process_set, local: Any = ()) -> None:
    """Give the model and its optimizers the values of ``root_rank``, but for the variables in ``local``."""
    if others_of(model, model.optimizer):
        told = allgather_object(built_for(model, model.optimizer), process_set=process_set)
        told = [told[process_set.group_rank(root_rank)], *told]
        build_for(model, model.optimizer, [next(filter(None, own), []) for own in zip(*told, strict=True)])
    left_out = {id(variable) for variable in local}
    variables = [one for one in variables_of(model, model.optimizer) if id(one) not in left_out]
    broadcast_values(variables, root_rank, process_set)


def variables_of_optimizer(optimizer: Any, trained: Any = None) -> list[Any]:
    """The variables of an optimizer; first builds it for the ``trained`` ones, if given and needed."""
    if trained is not None and hasattr(optimizer, "build"):
        if not getattr(optimizer, "built", False):  # tf_keras looks itself
            optimizer.build(trained)
    elif trained is not None and hasattr(optimizer, "_create_all_weights"):  # of tf_keras.optimizers.legacy
        optimizer._create_all_weights(trained)
    return [
        *(optimizer.variables() if callable(optimizer.variables) else optimizer.variables),
        *loss_scale_of(optimizer),
    ]


def loss_scale_of(optimizer: Any) -> list[Any]:
    """The variables of tf_keras's LossScaleOptimizer, which it neither counts among its own nor saves with a model."""
    state = getattr(optimizer, "_loss_scale", None)
    return [getattr(state, name) for name in ("current_loss_scale", "counter") if hasattr(state, name)]


def rate_of(optimizer: Any) -> float | None:
    """The learning rate; None where a schedule sets it, or parts of a MultiOptimizer have their own."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    schedule = isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule)
    return None if schedule or hasattr(optimizer, "optimizers") else float(arrays_of([optimizer.learning_rate])[0])


def _seeds(layer: Any) -> list[Any]:
    """States of random generators, which differ between ranks on purpose: each drops units of its own batch."""
    return [seed.state for seed in getattr(layer, "_seed_generators", ())]


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits ``state`` every ``batches_per_commit`` batches, and at the end of an epoch (Horovod: the same name)."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Count anew."""
        self._left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        self._left -= 1
        if self._left == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self._commit()

    def _commit(self) -> None:
        _ = self.model  # with JAX, brings the variables up to date
        self.state.commit()
        self._left = self.batches_per_commit


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.batch``, the batches of the epoch so far, so that a restart skips them (Horovod: the same name)."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._steps: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Note the steps of a whole epoch."""
        self._steps = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Leave out the batches that the interrupted epoch has done."""
        if self.params.get("steps"):
            self._steps = self._steps or self.params["steps"]
            self.params["steps"] = self._steps - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin anew."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.epoch``, the number of epochs that are done, also over restarts (Horovod: the same name)."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Epochs of this `fit` come after those that are done."""
        self._first = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count."""
        self.state.epoch = self._first + epoch + 1
