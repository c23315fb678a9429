"""Models that were saved with their optimizer."""

from __future__ import annotations

from typing import Any

from ring_notebook.keras.chosen_keras import keras
from ring_notebook.keras.distributed_optimizer import DistributedOptimizer, ring_of
from ring_notebook.keras.gradient_compression import Compression, Compressor


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Compressor = Compression.none,
    **options: Any,
) -> Any:
    """``keras.models.load_model``, with the optimizer of the model distributed (Horovod: ``load_model``).

    ``custom_optimizers`` are classes that the file names and Keras does not know; other options are Keras's. All ranks
    read the file.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})}, **options)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and ring_of(optimizer) is None:
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
    return model
