"""Extends ``fit``: adds the callbacks of `prepare`, resumes at the epoch of a checkpoint, and logs rows in a run."""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from inspect import signature
from typing import Any

import numpy as np

from ring_notebook.api.process_sets import global_process_set
from ring_notebook.core.metrics import is_attached, log, set_progress
from ring_notebook.core.steering import Knob, steering
from ring_notebook.core.step_guard import step
from ring_notebook.keras.checkpoint_callback import KerasCheckpoint
from ring_notebook.keras.chosen_keras import keras, new_batches
from ring_notebook.keras.distributed_optimizer import ring_of
from ring_notebook.keras.keras_state import rate_of
from ring_notebook.keras.prepared_models import callbacks_of
from ring_notebook.protocol.knobs import Range

_DEFAULT_BATCH = 32  # of Keras, for arrays


class _Rows(keras.callbacks.Callback):  # type: ignore[misc]
    """Logs each batch. After it the ranks take changes of knobs, such as the learning rate, or pause."""

    def __init__(self, batch_size: int, first_epoch: int, epochs: int, steered: bool) -> None:
        super().__init__()
        self._steered = steered
        self._present_rate = 0.0
        self._samples = batch_size
        self._first_epoch = first_epoch
        self._epochs = epochs
        self._epoch = self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self._steered and (rate := rate_of(self.model.optimizer)) is not None:
            steering.add(Knob("lr", Range(rate, 0.0), rate, lambda: self._present_rate, self._set_rate))

    def _set_rate(self, value: Any) -> None:
        self.model.optimizer.learning_rate = self._present_rate = value

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches = epoch, 0
        if self._steered:
            # Not at every batch: with JAX it copies all variables.
            self._present_rate = rate_of(self.model.optimizer) or 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = (self.params or {}).get("steps") or 0
        new = new_batches(self.model, batch, self._batches, steps)
        self._batches += new
        done = (self._epoch - self._first_epoch) * steps + self._batches
        set_progress(done, (self._epochs - self._first_epoch) * steps)
        values = _numbers_of(logs)
        if self._samples:
            values["samples"] = float(self._samples * new)
        log(**values, epoch=self._epoch)
        if self._steered:
            step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if validation := {name: value for name, value in _numbers_of(logs).items() if name.startswith("val_")}:
            log(**validation, epoch=epoch)


def _numbers_of(logs: Any) -> dict[str, Any]:
    """The metrics that are numbers; arrays, such as ``F1Score(average=None)``, have no curve."""
    return {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}


def extend_fits() -> None:
    """Extend ``fit`` of every model: callbacks that `prepare` asks for, and logs in a notebook's run.

    It begins where a checkpoint among its callbacks has resumed. Does nothing the second time.
    """
    fit = keras.Model.fit
    if hasattr(fit, "_ring_extended"):
        return

    arguments = signature(fit)

    @wraps(fit)
    def extended(*args: Any, **kwargs: Any) -> Any:
        call = arguments.bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        given = options["callbacks"]
        first, last = callbacks_of(options["self"])
        is_list = isinstance(given, keras.callbacks.CallbackList)
        known = given.callbacks if is_list else [given] if isinstance(given, keras.callbacks.Callback) else given or ()
        # They come last, to save what the others have changed, after the row of their step.
        saved = [one for one in known if isinstance(one, KerasCheckpoint)]
        for one in saved:
            options["initial_epoch"] = one.first_epoch(options["initial_epoch"])
        rows = []
        if is_attached():
            samples = _batch_size(options["x"], options["batch_size"])
            ring = ring_of(getattr(options["self"], "optimizer", None))
            steered = ring is not None and ring.process_set is global_process_set
            rows = [_Rows(samples, options["initial_epoch"], options["epochs"], steered)]
        if first or rows or saved:
            ordered = [*first, *(one for one in known if one not in saved), *last, *rows, *saved]
            if is_list:
                given.callbacks[:] = ordered
                for one in (*first, *last, *rows):
                    one.set_model(options["self"])
                    one.set_params(given.params)
            else:
                options["callbacks"] = ordered
        return fit(*call.args, **call.kwargs)

    extended._ring_extended = True  # type: ignore[attr-defined]
    keras.Model.fit = extended


def _batch_size(data: Any, batch_size: int | None) -> int:
    """The samples of a step; 0 where the data has not said it."""
    spec: Any = getattr(data, "element_spec", None)  # of a tf.data.Dataset
    while isinstance(spec, (tuple, list, dict)) and spec:
        spec = next(iter(spec.values())) if isinstance(spec, dict) else spec[0]
    if spec is not None:
        return int((getattr(spec, "shape", None) or [0])[0] or _of_dataset(data))
    for owner in (data, getattr(data, "batch_sampler", None)):
        if isinstance(size := getattr(owner, "batch_size", None), int):  # of a PyDataset, or of a loader of PyTorch
            return size
    if hasattr(data, "shape") or isinstance(data, (list, tuple, dict)):
        return batch_size or _DEFAULT_BATCH
    return 0


def _of_dataset(data: Any) -> int:
    """The batch size of a dataset, or of one that it is made of; TensorFlow has it in private names only."""
    while data is not None and not any(word in type(data).__name__ for word in ("Unbatch", "Flat", "Interleave")):
        with suppress(AttributeError, TypeError, ValueError):
            return int(data._batch_size)
        data = getattr(data, "_input_dataset", None)
    return 0
