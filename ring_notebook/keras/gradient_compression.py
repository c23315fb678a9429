"""Compression of gradients for an allreduce, on any framework under Keras."""

from __future__ import annotations

from typing import Any

from ring_notebook.api.compressors import CastCompression, Compressor, NoCompression
from ring_notebook.keras.chosen_keras import IS_LEGACY, face, keras

__all__ = ["Compression", "Compressor"]

_SIZES = {"float32": 4, "float64": 8}


def _float_size(tensor: Any) -> int:
    return _SIZES.get(keras.backend.standardize_dtype(tensor.dtype), 0)


class _OfKeras:
    """The compressors that come with the package: ``none``, ``fp16`` and, beyond Horovod, ``bf16``."""

    none: Compressor = NoCompression()
    fp16: Compressor = CastCompression("fp16", "float16", _float_size, lambda one, dtype: keras.ops.cast(one, dtype))
    bf16: Compressor = CastCompression("bf16", "bfloat16", _float_size, lambda one, dtype: keras.ops.cast(one, dtype))


Compression: Any = face().Compression if IS_LEGACY else _OfKeras
