"""Compression of TensorFlow's tensors for an allreduce."""

from __future__ import annotations

import tensorflow as tf
from ring_notebook.api.compressors import CastCompression, Compressor, NoCompression

__all__ = ["Compression", "Compressor"]


def _float_size(tensor: tf.Tensor) -> int:
    return tensor.dtype.size if tensor.dtype.is_floating else 0


class Compression:
    """The compressors that come with the package: ``none``, ``fp16`` and, beyond Horovod, ``bf16``."""

    none: Compressor = NoCompression()
    fp16: Compressor = CastCompression("fp16", tf.float16, _float_size, tf.cast)
    bf16: Compressor = CastCompression("bf16", tf.bfloat16, _float_size, tf.cast)
