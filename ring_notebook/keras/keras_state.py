"""What an elastic training with Keras keeps, and the callbacks that keep it."""

from __future__ import annotations

from typing import Any

from ring_notebook.api.object_state import ObjectState
from ring_notebook.keras.chosen_keras import OPTIMIZERS, arrays_of, assign, keras


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
        self.weights = arrays_of(variables_of(self._model, self._optimizer))
        super().save()

    def sync(self) -> None:
        """Take rank 0's values on all ranks, and keep them."""
        self.weights = arrays_of(variables_of(self._model, self._optimizer))
        super().sync()

    def reset(self) -> None:
        """Have Keras trace the step again, whose graph may know how many ranks there were."""
        self._model.train_function = None

    def load_content(self, name: str, content: Any) -> None:
        """Also assigns the variables."""
        super().load_content(name, content)
        if name == "weights":
            assign(variables_of(self._model, self._optimizer), content)


def is_built(model: Any) -> bool:
    """Whether the model has its weights: Keras also calls one built whose layers get theirs in the first step."""
    return bool(model.built and model.weights)


def optimizers_of(model: Any) -> list[Any]:
    """That of `compile`, and those in attributes of the model, with which a ``train_step`` of its own steps."""
    found = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        found += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return list({id(one): one for one in found if isinstance(one, OPTIMIZERS)}.values())


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """The variables that ranks share: those of the model without seeds, and those of its optimizers."""
    seeds = {id(seed) for layer in model._flatten_layers() for seed in _seeds(layer)}
    found = [variable for variable in model.variables if id(variable) not in seeds]
    for one in [] if optimizer is None else [optimizer, *optimizers_of(model)]:
        # The averages of one that trains a part of the weights would be those of all.
        if one is optimizer or not getattr(one, "use_ema", False):
            found += variables_of_optimizer(one, model.trainable_variables)
    return list({id(variable): variable for variable in found}.values())


def variables_of_optimizer(optimizer: Any, trained: Any) -> list[Any]:
    """The variables of an optimizer, which is built for those that it trains, if that has not been done."""
    if hasattr(optimizer, "build"):
        if not getattr(optimizer, "built", False):  # tf_keras looks itself
            optimizer.build(trained)
    elif hasattr(optimizer, "_create_all_weights"):  # of tf_keras.optimizers.legacy
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
