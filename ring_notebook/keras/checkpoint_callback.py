"""Checkpoints of a training with Keras: a callback of `fit`, and for loops of one's own as with PyTorch."""

from __future__ import annotations

import os
from typing import Any

from ring_notebook.api.basics import rank
from ring_notebook.api.checkpoints import Checkpoint
from ring_notebook.errors import RingError
from ring_notebook.keras.chosen_keras import OPTIMIZERS, arrays_of, assign, keras, new_batches
from ring_notebook.keras.distributed_optimizer import ring_of
from ring_notebook.keras.keras_state import (
    build_for,
    built_for,
    is_built,
    optimizers_of,
    rate_of,
    variables_of,
    variables_of_optimizer,
)


def checkpoint(
    *objects: Any,
    every: str = "epoch",
    keep: int = 3,
    best: str = "",
    largest: bool = False,
    folder: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] | None = None,
) -> KerasCheckpoint:
    """Write checkpoints of a training, and continue from the last one; all ranks call this, after `prepare`.

        saved = ring.checkpoint(model, every="5 min", keep=3, best="val_loss")
        model.fit(x, y, epochs=10, validation_data=validation, callbacks=[saved])

    Takes models, with the optimizers that they were compiled with or have as attributes, and those of other loops, in
    the same order in every run. Rank 0 writes one file, whole or not at all, with a checksum. It resumes on any number
    of ranks. Beyond Horovod.

    The result is a callback, which is called after all others. The first `fit` after a resume begins at the epoch in
    which the checkpoint was written, from its first batch on. In a loop of one's own it is used as with PyTorch, see
    `Checkpoint`: ``for epoch in saved.epochs(10)``, with ``saved.step()`` after each batch.

    every: "5 min", "30 s", "2 h", "100 steps", "epoch" or "5 epochs"; there is also one at the end of the training.
    keep: how many of the newest stay on disk.
    best: a metric of an epoch, or one that `log` records, on rank 0: when it is smaller than ever (``largest``:
        larger), the checkpoint then stays beside them.
    folder: by default that of the run, in a script ``checkpoints``. It is made readable by this user only.
    resume: True continues from the newest checkpoint, "best" from the best, a path from that one; the default as
        ``%%ringtrain --resume`` says. With True a script whose folder has none begins anew.

    Rates of ``prepare(scale_lr=True)`` follow the number of ranks. Random numbers, and what other callbacks remember,
    are not kept; of layers that are local to a rank those of rank 0. Raises TypeError and ValueError for wrong
    arguments, and RingError for a checkpoint that does not fit.
    """
    for number, one in enumerate(objects, 1):
        if not isinstance(one, (keras.Model, *OPTIMIZERS)):
            raise TypeError(
                f"checkpoint takes models and optimizers of Keras; argument {number} is of class {type(one).__name__}"
            )
    saved = KerasCheckpoint(objects, every, keep, best, largest, folder)
    saved.resume_as(resume)
    return saved


class KerasCheckpoint(Checkpoint, keras.callbacks.Callback):  # type: ignore[misc]
    """The checkpoints of one training with Keras, see `checkpoint`."""

    def __init__(self, objects: tuple[Any, ...], *options: Any) -> None:
        keras.callbacks.Callback.__init__(self)
        Checkpoint.__init__(self, objects, *options)
        self._is_resumed = False

    def _models(self) -> list[Any]:
        return [one for one in self._objects if isinstance(one, keras.Model)]

    def _variables(self, one: Any) -> list[Any]:
        if isinstance(one, keras.Model):
            return variables_of(one, _optimizer_of(one))
        if any(one is own for model in self._models() for own in optimizers_of(model)):
            return []  # they are kept with the model
        trained = [variable for model in self._models() for variable in model.trainable_variables]
        return variables_of_optimizer(one, trained)

    def state_of(self, one: Any) -> dict[str, Any]:
        """The variables of ``one`` as arrays, and its optimizer's learning rate, which may not be a variable."""
        if hasattr(one, "jax_state_sync"):
            one.jax_state_sync()  # within `fit` JAX's trainer has the values
        optimizer = _optimizer_of(one)
        return {
            "arrays": arrays_of(self._variables(one)),
            "built": built_for(one, optimizer) if isinstance(one, keras.Model) else [],
            "rate": None if optimizer is None else rate_of(optimizer),
            "scaled": _scaled(optimizer),
        }

    def restored(self, one: Any, state: dict[str, Any]) -> Any:
        """The object itself."""
        for model in self._models():
            if not is_built(model):
                raise RingError(
                    f"rank {rank()}: a checkpoint cannot be restored into {model.name!r}, which has no weights yet; "
                    "call model.build(input_shape) before"
                )
        if isinstance(one, keras.Model):
            build_for(one, _optimizer_of(one), state["built"])
        variables = self._variables(one)
        own, kept = ([tuple(array.shape) for array in arrays] for arrays in (variables, state["arrays"]))
        if own != kept:
            differ = next((pair for pair in zip(own, kept, strict=False) if pair[0] != pair[1]), None)
            where = f"; the first that differs has shape {differ[0]} here, {differ[1]} there" if differ else ""
            raise RingError(
                f"rank {rank()}: the checkpoint has {len(kept)} variables of {getattr(one, 'name', one)!r}, which has "
                f"{len(own)} now{where}; build and compile the model as when it was written"
            )
        assign(variables, state["arrays"])
        optimizer = _optimizer_of(one)
        if optimizer is not None and state["rate"] is not None and rate_of(optimizer) is not None:
            # Perhaps of another number of ranks.
            optimizer.learning_rate = state["rate"] * _scaled(optimizer) / state["scaled"]
        self._is_resumed = True
        return one

    def first_epoch(self, initial: int) -> int:
        """The epoch at which the next `fit` begins, whose ``initial_epoch`` is ``initial``."""
        is_resumed, self._is_resumed = self._is_resumed, False
        return max(initial, self.epoch) if is_resumed else initial

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note where the training is."""
        self.epoch, self.batch = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write a checkpoint where one is due; several batches may have passed (``steps_per_execution``)."""
        new = new_batches(self.model, batch, self.batch, (self.params or {}).get("steps"))
        self.steps += new
        self.batch += new
        self.write_when_due(new, None)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write a checkpoint where one is due, or ``best`` is better than ever."""
        value = (logs or {}).get(self._metric)
        self.end_epoch()
        self.write_when_due(0, self.logged() if value is None else float(value))

    def on_train_end(self, logs: Any = None) -> None:
        """Write the last checkpoint."""
        self.write_last()


def _optimizer_of(one: Any) -> Any:
    return getattr(one, "optimizer", None) if isinstance(one, keras.Model) else one


def _scaled(optimizer: Any) -> int:
    ring = ring_of(optimizer)
    return 1 if ring is None else ring.scaled
