"""Models of ``tf.keras`` in cells that import TensorFlow only."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def prepare(*objects: Any, **options: Any) -> Any:
    """`ring_notebook.keras.prepare`, for models of ``tf.keras`` and their data. Beyond Horovod."""
    return import_module("ring_notebook.keras").prepare(*objects, **options)


def checkpoint(*objects: Any, **options: Any) -> Any:
    """`ring_notebook.keras.checkpoint`, for models of ``tf.keras`` and their optimizers. Beyond Horovod."""
    return import_module("ring_notebook.keras").checkpoint(*objects, **options)
