"""Collectives on values of Keras: numbers, arrays and tensors of the framework under it, as arrays of the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from ring_notebook.api.arguments import number_of, reduction_of
from ring_notebook.api.foreign_calls import ForeignCall, execute
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.buffers import Buffer, DType, from_memoryview
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.keras.chosen_keras import IS_LEGACY, arrays_of, assign, backend, face, keras


class HostArray(np.ndarray):
    """An array with ``numpy()``, which programs call on eager tensors of Horovod."""

    def numpy(self) -> Any:
        """The plain array; a number where it has no dimension."""
        return self.view(np.ndarray)[()]


def _collective(what: ForeignCall, value: Any) -> Any:
    value = value if IS_LEGACY or not keras.ops.is_tensor(value) else keras.ops.convert_to_numpy(value)
    array = np.array(value, order="C")
    outputs: list[Any] = []

    def memory(_index: int, shape: tuple[int, ...]) -> int:
        outputs.append(np.empty(shape, array.dtype).view(HostArray))
        return _buffer_of(outputs[-1]).address

    execute(what, [_buffer_of(array)], memory)
    return outputs[0]


def _buffer_of(array: Any) -> Buffer:
    if array.dtype.name != "bfloat16":
        return from_memoryview(array)
    # Python's buffer protocol does not know these dtypes.
    return Buffer(from_memoryview(array.view(np.int16)).address, array.shape, DType.BFLOAT16, owner=array)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """``value`` reduced over all ranks, Average by default, as an array (Horovod: ``horovod.keras.allreduce``).

    ``compression`` is Horovod's argument and has no effect: values do not leave the host's memory.
    """
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    what = ForeignCall("allreduce", name or "", how.op, how.prescale, how.postscale, 0, number_of(process_set))
    return _collective(what, value)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The values of all ranks along the first dimension, as an array (Horovod: ``horovod.keras.allgather``)."""
    return _collective(ForeignCall("allgather", name or "", process_set=number_of(process_set)), value)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """``root_rank``'s value, as an array (Horovod: ``horovod.keras.broadcast``)."""
    what = ForeignCall("broadcast", name or "", root=root_rank, process_set=number_of(process_set))
    return _collective(what, value)


def broadcast_values(variables: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give ``variables`` the values of ``root_rank``, on any framework: through host memory, as bytes."""
    variables = list(variables)
    arrays = arrays_of(variables)
    parts = [from_memoryview(array.reshape(-1).view(np.uint8)) for array in arrays]
    shown = [Buffer(part.address, part.shape, part.dtype, array) for part, array in zip(parts, arrays, strict=True)]
    call = ForeignCall("broadcast", "variables", root=root_rank, process_set=number_of(process_set))
    execute(call, shown, lambda index, _shape: shown[index].address)
    assign(variables, arrays)


def broadcast_global_variables(root_rank: int) -> Any:
    """`ring_notebook.tensorflow.broadcast_global_variables` (Horovod: ``horovod.keras.broadcast_global_variables``).

    Raises RuntimeError with eager execution, and on other frameworks than TensorFlow.
    """
    if backend() != "tensorflow":
        raise RuntimeError("broadcast_global_variables needs TensorFlow 1; give fit a BroadcastGlobalVariablesCallback")
    return face().broadcast_global_variables(root_rank)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """This rank's rows of the reduced value, as an array (Horovod: ``horovod.keras.reducescatter``)."""
    what = ForeignCall("reducescatter", name or "", op, process_set=number_of(process_set))
    return _collective(what, value)
