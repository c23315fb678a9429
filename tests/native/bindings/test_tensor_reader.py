"""Which tensors the core reads by DLPack's C functions, and which it leaves to the framework's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring_notebook.core.buffers import DType
from ring_notebook.core.native import core
from ring_notebook.torch.tensors import buffer_of, reader

READER = reader()
pytestmark = pytest.mark.skipif(READER is None, reason="this torch has no C functions of DLPack")
INTEGERS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool)


def test_tensors_that_it_leaves_alone() -> None:
    """What memory does not say, or only in part: all of them read as None."""
    assert READER is not None

    class Mine(torch.Tensor):
        pass

    plain = torch.arange(6.0)
    strange = {
        "negative": torch._neg_view(plain),
        "transposed": plain.reshape(2, 3).t(),
        "expanded": plain[:1].expand(6),
        "a class of its own": plain.as_subclass(Mine),
        "sparse": plain.to_sparse(),
        "without memory": torch.empty(3, device="meta"),
        "complex": plain + 1j,
        "float8": plain.to(torch.float8_e5m2fnuz),
        "no tensor": [1.0],
    }
    assert {name: READER.read(tensor) for name, tensor in strange.items()} == dict.fromkeys(strange)


def test_tensors_that_it_reads() -> None:
    assert READER is not None
    for dtype in DTYPES:
        tensor = torch.zeros(2, 1, 3, dtype=dtype)[1:]
        address, shape, number = READER.read(tensor) or (0, (), -1)
        assert (address, shape, DType(number).itemsize) == (tensor.data_ptr(), (1, 1, 3), dtype.itemsize)
        assert number == buffer_of(tensor).dtype
    leaf = torch.nn.Parameter(torch.ones(()))
    assert READER.read(leaf) == (leaf.data_ptr(), (), DType.FLOAT32)
    assert READER.read(torch.empty(0, 4)) == (0, (0, 4), DType.FLOAT32)


def test_a_framework_without_such_functions() -> None:
    with pytest.raises(ValueError, match="cannot be read by DLPack's C functions"):
        core.TensorReader((np.ndarray,), len)
