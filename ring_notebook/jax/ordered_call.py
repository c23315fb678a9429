"""A JAX primitive that calls the native core, inside and outside of jit, and how JAX transforms it.

Two calls of one program must not change places, or ranks would wait for different ones. A program of one device orders
them by its effects: on CPUs XLA calls the core, on GPUs JAX's ordered callback does, whose arrays Python copies. A
program of several devices cannot order effects: each call has a name there, by which it matches those of other ranks.
"""

from __future__ import annotations

import warnings
from _thread import interrupt_main
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any, NoReturn, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jax
from ring_notebook.api.foreign_calls import ForeignCall, carry_out, parse, register_dtypes
from ring_notebook.api.process_sets import process_set_of
from ring_notebook.core import background_programs
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.core.foreign_interrupts import watch_interrupts
from ring_notebook.core.native import core
from ring_notebook.jax import jax_private

_NUMBERS = {dtype.name.lower(): dtype.xla for dtype in DType if dtype.xla >= 0}  # by JAX's names
register_dtypes("xla", {dtype.xla: dtype for dtype in DType if dtype.xla >= 0})

Result: TypeAlias = Any
"""A ``jax.ShapeDtypeStruct``: shape and dtype of a result."""
Results: TypeAlias = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each result."""

_DIRECT, _CALLED_BACK, _BY_NAME = "direct", "called back", "by name"
_NEEDS_NAME = "collectives without a name; pass name= to each, by which it then matches those of other ranks"


def is_known(dtype: Any) -> bool:
    """Whether the core has this element type."""
    return str(dtype) in _NUMBERS


def refuse(dtype: Any, operation: str) -> NoReturn:
    """Raise TypeError: the core does not have the type."""
    raise TypeError(f"{operation} cannot handle {dtype}; convert the array to one of {', '.join(_NUMBERS)}")


def call(what: ForeignCall, arrays: Sequence[Any], results: Sequence[Result]) -> list[Any]:
    """The results of ``what``, with the shapes and dtypes of ``results``.

    Raises ValueError in a function that is mapped over devices, for a call without a name.
    """
    ways = _ways()
    way = ways.ordered
    operands = tuple(arrays)
    if ways.devices > 1 and any(isinstance(array, jax.core.Tracer) for array in arrays):
        axes = jax_private.mapped_axes()
        if what.name:
            way, what = _BY_NAME, replace(what, by_name=True)
            operands = (_index_in(axes), *operands)
        elif axes:
            raise ValueError(
                f"{what.kind} needs a name in a function that runs on several devices: calls there have no order; pass "
                "name=, by which ranks match them"
            )
    return list(_bind(what, operands, tuple((tuple(one.shape), str(one.dtype)) for one in results), way))


def _index_in(axes: Sequence[str]) -> Any:
    """Which part of a mapped function this is; -1 where it is not mapped."""
    return jnp.asarray(jax.lax.axis_index(tuple(axes)) if axes else -1, jnp.int32)


# --- the primitive ---


@dataclass(frozen=True)
class _Ways:
    """How this process calls the core."""

    ordered: str
    """The way for programs of one device."""
    effects: dict[str, Any]
    devices: int
    lower: Callable[..., Any] | None
    """The lowering of the direct way."""


@lru_cache(maxsize=1)
def _ways() -> _Ways:
    watch_interrupts()
    effects, lower = {_CALLED_BACK: _effects_of_callback(ordered=True), _BY_NAME: _effects_by_name()}, None
    if jax.default_backend() == "cpu":
        try:
            effect = jax_private.effect(_NEEDS_NAME, ordered=True)
            lower = jax_private.token_lowering(effect)
        except AttributeError as error:
            warnings.warn(
                f"JAX {jax.__version__} has no effects that this package knows ({error}): collectives are called back "
                "from XLA through Python's arrays, which copies them",
                RuntimeWarning,
                stacklevel=5,
            )
        else:
            effects[_DIRECT] = {effect}
            jax.ffi.register_ffi_target(jax_private.TARGET, core.xla_handler(), platform="cpu")
            jax_private.shorten_dispatch(effect)
            jax_private.start_compiled_from_python(effect)
    if lower is None:
        jax_private.drop_failed_tokens()
    background_programs.wait_with(jax_private.wait_for_programs)
    return _Ways(_CALLED_BACK if lower is None else _DIRECT, effects, jax.local_device_count(), lower)


def _effects_of_callback(*, ordered: bool) -> Any:
    from jax.experimental import io_callback

    traced = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=ordered))()
    return set(traced.effects)


def _effects_by_name() -> Any:
    try:
        return {jax_private.effect("a collective with a name", ordered=False)}
    except AttributeError:
        return _effects_of_callback(ordered=False)  # JAX refuses these in `checkpoint`


primitive = Primitive("ring_collective")
primitive.multiple_results = True


def _bind(what: ForeignCall, operands: tuple[Any, ...], results: Results, way: str) -> Sequence[Any]:
    made: Sequence[Any] = primitive.bind(*operands, spec=what.spec(), results=results, way=way)
    return made


@lru_cache(maxsize=4096)
def _program(spec: str, results: Results, way: str) -> Callable[..., Any]:
    program: Callable[..., Any] = jax.jit(
        lambda *operands: primitive.bind(*operands, spec=spec, results=results, way=way)
    )
    return program


def _execute(*operands: Any, spec: str, results: Results, way: str) -> Any:
    if jax.config.jax_disable_jit:
        with jax.disable_jit(False):
            return _program(spec, results, way)(*operands)
    return _program(spec, results, way)(*operands)


def _evaluate(*operands: Any, spec: str, results: Results, way: str) -> Any:
    made = [jax.core.ShapedArray(shape, np.dtype(dtype)) for shape, dtype in results]
    if way == _BY_NAME and jax_private.varying_axes(operands[0]):
        made = [_like(operand, one) for operand, one in zip(operands[1:], made, strict=True)]
    return made, _ways().effects[way]


def _like(operand: Any, aval: Any) -> Any:
    """``aval`` as a result that varies over the same mapped axes as ``operand``."""
    spec = jax.sharding.PartitionSpec(*[None] * len(aval.shape))
    sharding = operand.sharding.update(spec=spec)
    return operand.update(shape=aval.shape, dtype=aval.dtype, weak_type=False, sharding=sharding)


def _lower(ctx: Any, *operands: Any, spec: str, results: Results, way: str) -> Any:
    if jax_private.is_export(ctx):
        raise ValueError(
            f"jax.export cannot save a program with {parse(spec).kind}, which needs the ranks of this job; export the "
            "functions between collectives, or a step without them"
        )
    if way == _DIRECT and (lower := _ways().lower) is not None:
        return lower(ctx, *operands, spec=spec)

    def called_back(*values: Any) -> Any:
        return _called_back(spec, values, results, ordered=way != _BY_NAME)

    return mlir.lower_fun(called_back, multiple_results=True)(ctx, *operands)


primitive.def_impl(_execute)
primitive.def_effectful_abstract_eval(_evaluate)
mlir.register_lowering(primitive, _lower)


# One operation of each name at a time: programs of several devices may overlap.
_turns: dict[str, Lock] = defaultdict(Lock)


def _called_back(spec: str, values: tuple[Any, ...], results: Results, *, ordered: bool) -> Sequence[Any]:
    from jax.experimental import io_callback

    def carry(*values: Any) -> list[Any]:
        inputs = [np.require(value, requirements=["C"]) for value in values]
        outputs = [np.empty(shape, dtype) for shape, dtype in results]
        text = spec
        if not ordered:
            part, *inputs = inputs
            if part >= 0:
                what = parse(spec)
                text = replace(what, name=f"{what.name} on device {part}").spec()
        tensors = [(value.ctypes.data, value.shape, _NUMBERS[str(value.dtype)]) for value in inputs]

        def memory(index: int, shape: tuple[int, ...]) -> int:
            return int(outputs[index].ctypes.data) if outputs[index].shape == tuple(shape) else 0

        if ordered:
            error = carry_out("xla", text, tensors, memory)
        else:
            with _turns[text]:
                error = carry_out("xla", text, tensors, memory)
        if error:
            if error.startswith(KeyboardInterrupt.__name__):
                interrupt_main()  # JAX makes an ordinary error of it
            raise RuntimeError(error)
        return outputs

    shapes = [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in results]
    made: Sequence[Any] = io_callback(carry, shapes, *values, ordered=ordered)
    # With several devices the callback runs on the first one; the results go to all.
    return made if ordered else jax.lax.optimization_barrier(tuple(made))


# --- gradients, forward and backward ---


def _has_gradient(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _split(operands: Sequence[Any], way: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The index of a part of a mapped function, if any, and the arrays."""
    first = 1 if way == _BY_NAME else 0
    return tuple(operands[:first]), tuple(operands[first:])


def _check_linear(what: ForeignCall) -> None:
    if what.kind in ("allreduce", "reducescatter") and what.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        what.backward()  # raises


def _forward(primals: Sequence[Any], tangents: Sequence[Any], *, spec: str, results: Results, way: str) -> Any:
    """Collectives are linear: the tangents of the results are those of the arrays, by the same collective."""
    what = parse(spec)
    made = _bind(what, tuple(primals), results, way)
    part, arrays = _split(primals, way)
    _, given = _split(tangents, way)
    derived: list[Any] = [ad.Zero(one.aval.to_tangent_aval()) for one in made]
    at = [index for index, array in enumerate(arrays) if _has_gradient(array)]
    if at and any(not isinstance(given[index], ad.Zero) for index in at):
        _check_linear(what)
        name = f"{what.name} tangent" if what.name else ""
        linear = replace(what, name=name, commits=False)
        moved = tuple(ad.instantiate_zeros(given[index]) for index in at)
        for index, one in zip(at, _bind(linear, (*part, *moved), tuple(results[i] for i in at), way), strict=True):
            derived[index] = one
    return made, derived


def _backward(gradients: Sequence[Any], *operands: Any, spec: str, results: Results, way: str) -> list[Any]:
    """The gradients by Horovod's rules, see `ForeignCall.backward`."""
    what = parse(spec)
    what = replace(what, name=what.name.removesuffix(" tangent"))
    part, arrays = _split(operands, way)
    shapes = [one.aval.shape if ad.is_undefined_primal(one) else one.shape for one in arrays]
    process_set = process_set_of(what.process_set)
    scale, rank = what.gradient_scale(process_set.size()), process_set.rank()
    given = [ad.instantiate_zeros(gradient) for gradient in gradients]
    if scale != 1:
        given = [gradient * jnp.asarray(scale, gradient.dtype) for gradient in given]
    back = what.backward()
    wanted = [one.shape for one in given] if back.kind == "allreduce" else shapes
    made = tuple((tuple(shape), str(one.dtype)) for shape, one in zip(wanted, given, strict=True))
    reduced = list(_bind(back, (*part, *given), made, way))
    if what.kind == "allgather":
        rows = [shape[0] if shape else 1 for shape in shapes]
        own = [whole[rank * count : (rank + 1) * count] for whole, count in zip(reduced, rows, strict=True)]
        reduced = [one.reshape(shape) for one, shape in zip(own, shapes, strict=True)]
    elif what.kind == "broadcast" and process_set.group_rank(what.root) != rank:
        reduced = [jnp.zeros_like(whole) for whole in reduced]
    found = [one if ad.is_undefined_primal(array) else None for one, array in zip(reduced, arrays, strict=True)]
    return [None] * len(part) + found


def _batched(operands: Sequence[Any], dims: Sequence[Any], *, spec: str, results: Results, way: str) -> Any:
    """One collective of the whole batch."""
    what = parse(spec)
    if what.op == ReduceOp.ADASUM and what.kind == "allreduce":
        raise NotImplementedError(
            "vmap over an allreduce with op=Adasum: it combines whole arrays, not each of a batch"
        )
    part, arrays = _split(operands, way)
    index_dims, array_dims = _split(dims, way)
    part = tuple(one if dim is None else one[0] for one, dim in zip(part, index_dims, strict=True))
    moved: list[Any] = []
    made: list[tuple[tuple[int, ...], str]] = []
    at: list[int | None] = []
    for array, dim, (shape, dtype) in zip(arrays, array_dims, results, strict=True):
        if dim is None:
            moved.append(array)
            made.append((shape, dtype))
            at.append(None)
            continue
        # After the rows, which are divided among ranks.
        place = 0 if what.kind in ("allreduce", "broadcast") else 1
        array = jnp.moveaxis(array, dim, 0)
        if place and array.ndim == 1:
            array = array[None]
        elif place:
            array = jnp.moveaxis(array, 0, 1)
        moved.append(array)
        made.append(((*shape[:place], array.shape[place], *shape[place:]), dtype))
        at.append(place)
    return _bind(what, (*part, *moved), tuple(made), way), at


ad.primitive_jvps[primitive] = _forward
ad.primitive_transposes[primitive] = _backward
batching.primitive_batchers[primitive] = _batched
