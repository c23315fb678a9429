"""Pickles of functions that other processes call."""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle


def dumps(value: Any) -> bytes:
    """``value`` by cloudpickle, as its own ``dumps``, with the file names of the functions in it.

    cloudpickle 3.1.3 leaves these out. Tracebacks show their lines then, and ``inspect.getsource`` finds them, as
    TensorFlow's AutoGraph must.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _code(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    make, values = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in values)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)
