"""Collectives on TensorFlow's tensors, under Horovod's names: eagerly, in functions and in graphs, with gradients.

``device_dense``, ``device_sparse`` and ``ignore_name_scope`` are Horovod's arguments without effect: a tensor on a GPU
goes through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from ring_notebook.api.arguments import number_of, reduction_of
from ring_notebook.api.foreign_calls import ForeignCall
from ring_notebook.api.process_sets import ProcessSet, global_process_set, process_set_of
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.tensorflow.graph_call import call, check_dtype, number_op, of_both
from ring_notebook.tensorflow.tensor_compression import Compression, Compressor

Values = Any
"""A tensor, a variable, or what TensorFlow makes a tensor of."""


def _tensors(values: Sequence[Values], operation: str) -> list[tf.Tensor]:
    tensors = [tf.convert_to_tensor(value) for value in values]
    for tensor in tensors:
        check_dtype(tensor.dtype, operation)
    return tensors


def _number_of(process_set: ProcessSet, root: int | None = None) -> int:
    """The number of a set with this rank and ``root``; else raises a ValueError that is also a TensorFlow error."""
    try:
        number = number_of(process_set)
        if root is not None:
            process_set.group_rank(root)
    except ValueError as error:
        kind: Any = type(error)
        raise of_both(kind, tf.errors.InvalidArgumentError)(None, None, str(error)) from None
    return number


def allreduce(
    tensor: Values,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """``tensor`` reduced over all ranks, as a new tensor; ``op`` is Average by default (Horovod: ``allreduce``).

    For ``tf.IndexedSlices``, the slices of all ranks, for Average divided by their number; integers then become floats,
    as in Horovod. All ranks give the same shape and dtype; else all raise CollectiveMismatch, which is also a
    ``tf.errors.FailedPreconditionError``. Differentiable for Average and Sum.
    """
    return grouped_allreduce(
        [tensor], average, "", "", compression, op, prescale_factor, postscale_factor, process_set, name=name
    )[0]


def grouped_allreduce(
    tensors: Sequence[Values],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    commits: bool = False,
) -> list[Any]:
    """`allreduce` of each of ``tensors``; dense ones of one dtype are one operation (Horovod: ``grouped_allreduce``).

    With ``commits``, no rank gets the results before all have theirs: an optimizer step follows.
    """
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    results = list(tensors)
    dense = [index for index, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    number, sparse = _number_of(process_set), sorted(set(range(len(results))) - set(dense))
    for index in sparse:
        gather = ForeignCall("allgather", name or "", process_set=number, rows=True)
        if commits and not dense and index == sparse[-1]:
            gather = replace(gather, commits=True)
        results[index] = _allreduce_slices(tensors[index], how.op, how.prescale * how.postscale, gather)
    if dense:
        what = ForeignCall("allreduce", name or "", how.op, how.prescale, how.postscale, 0, number, commits=commits)
        pairs = [compression.compress(tensor) for tensor in _tensors([tensors[index] for index in dense], "allreduce")]
        reduced = call(what, [tensor for tensor, _ in pairs])
        for index, value, (_, context) in zip(dense, reduced, pairs, strict=True):
            results[index] = compression.decompress(value, context)
    return results


def _allreduce_slices(slices: tf.IndexedSlices, op: ReduceOp, scale: float, gather: ForeignCall) -> tf.IndexedSlices:
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotImplementedError(
            f"rank {process_set_of(gather.process_set).rank()}: allreduce of tf.IndexedSlices takes Average or Sum, "
            f"not {op.name.capitalize()}; pass a dense tensor: tf.convert_to_tensor(slices)"
        )
    values, indices = call(gather, _tensors([slices.values, slices.indices], "allreduce"))[:2]
    if op is ReduceOp.AVERAGE:  # of integers these are floats
        values = values / tf.cast(number_op("size", gather.process_set), values.dtype)
    if scale != 1:
        values = values * tf.cast(scale, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def allgather(
    tensor: Values,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The tensors of all ranks, concatenated along the first dimension, which may differ (Horovod: ``allgather``).

    A tensor without dimensions counts as one row. Differentiable: each rank gets the average of all ranks' gradients of
    its own rows, as in Horovod.
    """
    return grouped_allgather([tensor], name, process_set=process_set)[0]


def grouped_allgather(
    tensors: Sequence[Values],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """`allgather` of each of ``tensors`` (Horovod: ``grouped_allgather``)."""
    if not tensors:
        return []
    what = ForeignCall("allgather", name or "", process_set=_number_of(process_set), rows=True)
    return call(what, _tensors(tensors, "allgather"))[: len(tensors)]


def broadcast(
    tensor: Values,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """A new tensor with the values of ``root_rank``'s ``tensor``; a global rank (Horovod: ``broadcast``).

    Differentiable: the root gets the average of all ranks' gradients, the others zeros, as in Horovod.
    """
    return broadcast_tensors([tensor], root_rank, name, process_set)[0]


def broadcast_tensors(
    tensors: Sequence[Values], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[tf.Tensor]:
    """`broadcast` of each of ``tensors``."""
    what = ForeignCall("broadcast", name or "", root=int(root_rank), process_set=_number_of(process_set, root_rank))
    return call(what, _tensors(tensors, "broadcast"))


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Overwrite ``variables`` with those of ``root_rank``; returns what assigned them (Horovod: ``broadcast_``)."""
    variables = list(variables)
    if not variables:
        return []
    values = broadcast_tensors(variables, root_rank, name, process_set)
    return [variable.assign(value) for variable, value in zip(variables, values, strict=True)]


def alltoall(
    tensor: Values,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[r]`` rows of ``tensor`` to each rank r; returns the received rows, in rank order.

    Without ``splits`` every rank gets an equal share, and the result is the tensor alone; with them it is
    ``(tensor, received_splits)``, the latter int32. Differentiable. (Horovod: ``alltoall``.)
    """
    inputs = _tensors([tensor], "alltoall")
    if splits is not None:
        splits = tf.convert_to_tensor(splits)
        inputs.append(splits if splits.dtype in (tf.int32, tf.int64) else tf.cast(splits, tf.int32))
    what = ForeignCall("alltoall", name or "", process_set=_number_of(process_set), rows=True)
    result, received = call(what, inputs)
    return result if splits is None else (result, received)


def reducescatter(
    tensor: Values,
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """This rank's rows of the reduction of ``tensor``; the first ranks get one more (Horovod: ``reducescatter``)."""
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, prescale_factor, postscale_factor, name
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Values],
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """`reducescatter` of each of ``tensors`` (Horovod: ``grouped_reducescatter``)."""
    if not tensors:
        return []
    how = reduction_of(None, op, prescale_factor, postscale_factor, process_set)
    what = ForeignCall("reducescatter", name or "", how.op, how.prescale, how.postscale, 0, _number_of(process_set))
    pairs = [compression.compress(tensor) for tensor in _tensors(tensors, "reducescatter")]
    results = call(what, [tensor for tensor, _ in pairs])
    return [compression.decompress(value, context) for value, (_, context) in zip(results, pairs, strict=True)]


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks when the op runs, int32."""
    return number_op("size", process_set_id)


def rank_op(name: str | None = None) -> tf.Tensor:
    """This rank when the op runs, int32."""
    return number_op("rank")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks of this host when the op runs, int32."""
    return number_op("local_size")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This rank among those of its host when the op runs, int32."""
    return number_op("local_rank")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the process set when the op runs, else 0; int32."""
    return number_op("included", process_set_id)
