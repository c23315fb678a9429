"""Checks of arguments that need no framework, before anything is sent, and the reduction for Horovod's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import index
from typing import Any, NamedTuple

from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp


def check_process_set(value: Any) -> None:
    """Raise TypeError unless ``value`` is a process set."""
    if not isinstance(value, ProcessSet):
        raise TypeError(
            f"process_set must be a ProcessSet, as add_process_set([0, 2]) returns it, got {type(value).__name__}"
        )


def number_of(process_set: ProcessSet) -> int:
    """The number of a process set that has this rank. Raises ValueError for another one, TypeError for another type."""
    check_process_set(process_set)
    _ = process_set.communicator
    return process_set.process_set_id or 0


def check_integer(value: Any, name: str) -> int:
    """``value`` as an int. Raises TypeError for anything but an integer."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def check_scale(value: Any, name: str) -> float:
    """``value`` as a factor. Raises TypeError for anything but a number."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def check_passes(value: int) -> int:
    """``value`` as the number of backward passes in a step. Raises TypeError unless an integer, ValueError below 1."""
    if check_integer(value, "backward_passes_per_step") < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {value}")
    return value


def check_predivide(factor: float, op: int) -> float:
    """``factor`` as the part of Average's division before the sum. Raises ValueError for another ``op`` unless 1."""
    if factor != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor is part of an average; leave it out or use op=Average")
    if not 0 < check_scale(factor, "gradient_predivide_factor") < inf:
        raise ValueError(f"gradient_predivide_factor must be positive and finite, got {factor}")
    return float(factor)


class Reduction(NamedTuple):
    """The arithmetic of an allreduce or reducescatter, and its ranks."""

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet


def operation_of(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The operation for Horovod's arguments: Average unless ``average`` or ``op`` says otherwise."""
    if average is not None:
        if op is not None:
            raise ValueError("give either average or op, not both; average is Horovod's old form of op")
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if isinstance(op, ReduceOp):
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(known.name.capitalize() for known in ReduceOp)
        raise ValueError(f"op must be one of {names}, got {op!r}") from None


def reduction_of(
    average: bool | None, op: ReduceOp | None, prescale: float, postscale: float, process_set: ProcessSet
) -> Reduction:
    """The reduction for Horovod's arguments."""
    if average is None and type(op) is ReduceOp and type(prescale) is type(postscale) is float:
        if process_set is not global_process_set:
            check_process_set(process_set)
        return Reduction(op, prescale, postscale, process_set)
    check_process_set(process_set)
    factors = check_scale(prescale, "prescale_factor"), check_scale(postscale, "postscale_factor")
    return Reduction(operation_of(average, op), *factors, process_set)


def rows_to_send(shape: Sequence[int], splits: Any, rank: int, size: int) -> list[int]:
    """Rows for each rank in an alltoall. Raises ValueError when ``splits`` does not fit ``shape`` and the group."""
    if not len(shape):
        raise ValueError(f"rank {rank}: alltoall splits along the first dimension, but the tensor has none")
    rows = shape[0]
    if splits is not None and not hasattr(splits, "__len__"):
        raise TypeError(f"rank {rank}: alltoall: splits must be a list of one integer per rank, got {splits!r}")
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(
                f"rank {rank}: alltoall without splits needs a multiple of {size} rows, got {rows}; give splits"
            )
        return [rows // size] * size
    try:
        counts = [index(count) for count in splits]
    except TypeError:
        raise ValueError(f"rank {rank}: alltoall: splits must be integers, one per rank, got {splits}") from None
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"rank {rank}: alltoall: splits must be {size} numbers of rows, none negative, that add up to the {rows} "
            f"rows of the tensor, got {counts}"
        )
    return counts


def check_scatterable(shape: Sequence[int], op: ReduceOp, rank: int) -> None:
    """Raise NotImplementedError for Adasum, ValueError for a tensor without dimensions: reducescatter needs rows."""
    if op is ReduceOp.ADASUM:
        raise NotImplementedError(
            f"rank {rank}: reducescatter cannot use Adasum, which needs whole tensors; use Average or Sum, or allreduce"
        )
    if not len(shape):
        raise ValueError(f"rank {rank}: reducescatter splits along the first dimension, but the tensor has none")


def variables_of_layers(layers: Any) -> list[Any]:
    """The trainable variables of a layer, or of several. Raises ValueError for anything but layers."""
    if layers is None:
        return []
    layers = [layers] if hasattr(layers, "trainable_variables") else list(layers)
    for layer in layers:
        if not hasattr(layer, "trainable_variables"):
            raise ValueError(f"local_layers must be layers, got {type(layer).__name__}")
    return [variable for layer in layers for variable in layer.trainable_variables]
