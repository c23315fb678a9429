"""Callbacks for ``fit`` on several ranks (Horovod: ``horovod.keras.callbacks``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ring_notebook.api.basics import size
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.keras.chosen_keras import arrays_of, keras
from ring_notebook.keras.keras_state import broadcast_state, is_built

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

_Callback: Any = keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(_Callback):  # type: ignore[misc]
    """Gives all ranks the weights and the optimizer's state of ``root_rank`` when ``fit`` begins.

    Horovod: ``BroadcastGlobalVariablesCallback``. A model that is not built yet gets them after its first batch.
    ``local_variables`` stay each rank's own. ``device`` has no effect.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Sequence[Any] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.local_variables = list(local_variables or ())
        self.process_set = process_set
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if the model is built."""
        self._done = False
        if is_built(self.model):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if that has not been done."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_state(self.model, self.root_rank, self.process_set, self.local_variables)
        self._done = True


class MetricAverageCallback(_Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over all ranks, for the callbacks that come after it.

    Horovod: ``MetricAverageCallback``. ``device`` has no effect.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the values in ``logs``, numbers and arrays."""
        names = sorted(logs or ())
        # In the operation's name, for the mismatch of ranks that still train.
        why = ", since a callback has set stop_training" * self._has_stopped()
        if names:
            arrays = [np.asarray(logs[name], np.float64) for name in names]  # of a metric with a number for each class
            values = np.concatenate([array.reshape(-1) for array in arrays]).tolist()
            means = allreduce_numbers(values, ReduceOp.AVERAGE, f"metrics{why}", self.process_set)
            ends = np.cumsum([array.size for array in arrays])
            for name, array, part in zip(names, arrays, np.split(means, ends[:-1]), strict=True):
                logs[name] = part.reshape(array.shape) if array.ndim else part.item()

    def _has_stopped(self) -> bool:
        return bool(getattr(self.model, "stop_training", False))


class AgreedStop(_Callback):  # type: ignore[misc]
    """Ends `fit` on all ranks after an epoch if a callback of one rank has set ``stop_training``."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        (stops,) = allreduce_numbers([int(self.model.stop_training)], ReduceOp.MAX, "stop_training")
        self.model.stop_training = bool(stops)


class LearningRateScheduleCallback(_Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr`` times a number, or a function of the epoch.

    From ``start_epoch`` until ``end_epoch``; with ``staircase`` at the beginning of an epoch, else of every batch, with
    fractions of epochs, for which Keras or ``steps_per_epoch`` says how many batches there are. ``momentum_correction``
    (Goyal et al. 2017) acts where the optimizer's momentum is a variable: in ``tf_keras.optimizers.legacy``. (Horovod:
    ``LearningRateScheduleCallback``.)
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: float = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("LearningRateScheduleCallback needs initial_lr, the learning rate for all ranks together")
        self.initial_lr = initial_lr
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.staircase = staircase or not callable(multiplier)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._momentum: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has."""
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not self.staircase and not steps:
            raise ValueError(f"{type(self).__name__} changes at every batch, and needs steps_per_epoch for this data")
        self.steps_per_epoch = steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, if it changes here."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase:
            if batch == 0:
                self._set(self.multiplier(self.current_epoch))
        else:
            self._set(self.multiplier(self.current_epoch + batch / (self.steps_per_epoch or 1)))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Put the momentum back."""
        if self._momentum is not None:
            self.model.optimizer.momentum.assign(self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tell the learning rate as a metric."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(arrays_of([self.model.optimizer.learning_rate])[0])

    def _set(self, factor: float) -> None:
        optimizer, new = self.model.optimizer, self.initial_lr * factor
        old = self._rate()
        optimizer.learning_rate = new
        momentum: Any = getattr(optimizer, "momentum", None)
        if self.momentum_correction and hasattr(momentum, "assign") and old:
            self._momentum = keras.backend.get_value(momentum)
            momentum.assign(self._momentum * new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` during ``warmup_epochs``.

    Goyal et al. 2017; ``initial_lr`` is that for all ranks together. (Horovod: ``LearningRateWarmupCallback``.)
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / (self.steps_per_epoch or 1)  # so that whole epochs end on their numbers
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Also say when the warm-up has ended."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            print(f"Epoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")  # noqa: T201


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """``ModelCheckpoint`` of the best model, which rank 0 alone writes (Horovod: ``BestModelCheckpoint``).

    ``filepath`` is where: Horovod's Spark estimators set it later.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str = "best.keras",
    ) -> None:
        super().__init__(
            filepath, monitor=monitor, verbose=verbose, save_best_only=True, mode=mode, save_freq=save_freq
        )

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if global_process_set.rank() == 0:
            super()._save_model(*args, **kwargs)
