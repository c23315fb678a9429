"""``fit`` in a notebook's run: loss, metrics, samples and progress become rows of its record by themselves."""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import Any

from ring_notebook.core.metrics import is_attached, log, set_progress
from ring_notebook.keras.chosen_keras import keras

_DEFAULT_BATCH = 32  # of Keras, for arrays


class _Rows(keras.callbacks.Callback):  # type: ignore[misc]
    """Logs each batch."""

    def __init__(self, batch_size: int, first_epoch: int, epochs: int) -> None:
        super().__init__()
        self._samples = batch_size
        self._first_epoch = first_epoch
        self._epochs = epochs
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = (self.params or {}).get("steps") or 0
        done = (self._epoch - self._first_epoch) * steps + batch + 1
        set_progress(done, (self._epochs - self._first_epoch) * steps)
        values: dict[str, Any] = {name: float(value) for name, value in (logs or {}).items()}
        if self._samples:
            values["samples"] = float(self._samples)
        log(**values, epoch=self._epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        validation: dict[str, Any] = {
            name: float(value) for name, value in (logs or {}).items() if name.startswith("val_")
        }
        if validation:
            log(**validation, epoch=epoch)


def log_fits() -> None:
    """From now on, in runs of a notebook, ``fit`` of every model logs. Does nothing the second time."""
    fit = keras.Model.fit
    if hasattr(fit, "_ring_logs"):
        return

    arguments = signature(fit)

    @wraps(fit)
    def logged(*args: Any, **kwargs: Any) -> Any:
        if not is_attached():
            return fit(*args, **kwargs)
        call = arguments.bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        rows = _Rows(_batch_size(options["x"], options["batch_size"]), options["initial_epoch"], options["epochs"])
        given = options["callbacks"]
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(rows)
        else:
            given = [given] if isinstance(given, keras.callbacks.Callback) else list(given or ())
            options["callbacks"] = [*given, rows]
        return fit(*call.args, **call.kwargs)

    logged._ring_logs = True  # type: ignore[attr-defined]
    keras.Model.fit = logged


def _batch_size(data: Any, batch_size: int | None) -> int:
    """The samples of a step; 0 where the data has not said it."""
    spec: Any = getattr(data, "element_spec", None)  # of a tf.data.Dataset
    while isinstance(spec, (tuple, list, dict)) and spec:
        spec = next(iter(spec.values())) if isinstance(spec, dict) else spec[0]
    if spec is not None:
        return int(spec.shape[0] or 0) if getattr(spec, "shape", None) else 0
    for owner in (data, getattr(data, "batch_sampler", None)):
        if isinstance(size := getattr(owner, "batch_size", None), int):  # of a PyDataset, or of a loader of PyTorch
            return size
    if hasattr(data, "shape") or isinstance(data, (list, tuple, dict)):
        return batch_size or _DEFAULT_BATCH
    return 0
