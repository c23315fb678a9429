"""The op that calls the native core: eagerly, in a ``tf.function`` and in the graphs of TensorFlow 1.

TensorFlow runs stateful ops of a function in the order of its source, so there they match other ranks' ops by order. In
a graph of TensorFlow 1, and in the functions and loops of one, it runs them in any order, so there they match by name,
by the place from which a function is called, and by the iteration.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np

import tensorflow as tf
from ring_notebook.api.foreign_calls import ForeignCall, carry_out, original, parse, register_dtypes
from ring_notebook.api.process_sets import process_set_of
from ring_notebook.core.buffers import DType
from ring_notebook.core.foreign_interrupts import watch_interrupts
from ring_notebook.core.native import core
from ring_notebook.errors import RingError

_DTYPES: dict[tf.DType, DType] = {getattr(tf, dtype.name.lower()): dtype for dtype in DType}
register_dtypes("tf", {known.as_datatype_enum: dtype for known, dtype in _DTYPES.items()})
_NUMBERS = {known.as_numpy_dtype: known.as_datatype_enum for known in _DTYPES}


def check_dtype(dtype: tf.DType, operation: str) -> None:
    """Raise TypeError unless the core knows the dtype."""
    if dtype not in _DTYPES:
        known = ", ".join(one.name for one in _DTYPES)
        raise TypeError(f"{operation} cannot handle {dtype.name}; cast the tensor to one of {known}")


def is_first_graph() -> bool:
    """Whether ops now become part of a graph of TensorFlow 1, which a session runs, or of a function in one."""
    with tf.init_scope():  # the innermost graph that is no function
        return not tf.executing_eagerly()


def executing_eagerly() -> bool:
    """Whether ops run at once (Horovod: ``horovod.tensorflow.util._executing_eagerly``)."""
    return bool(tf.executing_eagerly())


def make_subgraph(function: Any) -> Any:
    """``tf.function`` (Horovod: ``horovod.tensorflow.util._make_subgraph``)."""
    return tf.function(function)


def cached(function: Any) -> Any:
    """A function that remembers its results, eager ones and those of graphs apart (Horovod: ``_cache``)."""
    results: dict[Any, Any] = {}

    @wraps(function)
    def call(*arguments: Any) -> Any:
        key = (arguments, executing_eagerly())
        if key not in results:
            results[key] = function(*arguments)
        return results[key]

    return call


def variables_to_references(variables: Any) -> Any:
    """The reference of a variable, usable as a key; for a list a tuple of references (Horovod: ``vars_to_refs``)."""
    if isinstance(variables, list):
        return tuple(variables_to_references(variable) for variable in variables)
    return variables.ref()


def references_to_variables(references: Any) -> Any:
    """What `variables_to_references` was given (Horovod: ``refs_to_vars``)."""
    if isinstance(references, tuple):
        return [references_to_variables(reference) for reference in references]
    return references.deref()


def call(what: ForeignCall, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The results of ``what``, with gradients: those of ``tensors``, then with ``what.rows`` the rows for each."""
    name = what.name or what.kind
    if is_first_graph():
        with tf.init_scope():  # two functions may have the same names
            graph = tf.compat.v1.get_default_graph()
        name = graph.unique_name(f"ring_{''.join(c if c.isalnum() else '_' for c in name)}")
        what = replace(what, name=name, by_name=True)
    results: list[tf.Tensor] = _run(what, list(tensors))
    for result, shape in zip(results, _known_shapes(what, tensors), strict=False):
        result.set_shape(shape)
    return results


def _place(graph: Any) -> str:
    """Where in a graph of TensorFlow 1 a session may run an op several times: a "function", a "loop", or nowhere."""
    # Loops of control flow v1 are no graphs.
    context = getattr(graph, "_get_control_flow_context", lambda: None)()
    found = "loop" if context is not None and context.GetWhileContext() is not None else ""
    while graph.building_function:
        if "While" in type(graph).__name__:
            found = "loop"
        elif "Cond" not in type(graph).__name__:
            return "function"
        graph = graph.outer_graph
    return found


def number_op(kind: str, process_set_id: int = 0) -> tf.Tensor:
    """An int32 that is read when the op runs, such as the rank."""
    result = _run(ForeignCall(kind, process_set=process_set_id), [])[0]
    result.set_shape(())
    return result


def _result_types(what: ForeignCall, tensors: Sequence[tf.Tensor]) -> list[tf.DType]:
    if what.kind in ("rank", "size", "local_rank", "local_size", "included"):
        return [tf.int32]
    if what.kind == "alltoall":
        return [tensors[0].dtype, tf.int32]
    return [tensor.dtype for tensor in tensors] + [tf.int64] * len(tensors) * what.rows


def _known_shapes(what: ForeignCall, tensors: Sequence[tf.Tensor]) -> list[tf.TensorShape]:
    shapes = [tensor.shape for tensor in tensors]
    if what.kind in ("allgather", "reducescatter", "alltoall"):  # the rows may differ by rank
        shapes = [tf.TensorShape([None]).concatenate(s[1:]) if s.rank else tf.TensorShape(None) for s in shapes]
    return shapes[: 1 if what.kind == "alltoall" else None]


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it would warn that it cannot
def _run(what: ForeignCall, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    types, ops = _result_types(what, tensors), _ops()
    place = _place(tf.compat.v1.get_default_graph()) if what.by_name else ""
    if ops is None:
        if place:
            raise NotImplementedError(
                f"{what.kind} in a {place} of a session needs the ops of Ring Notebook, which TensorFlow cannot load: "
                "without them, calls of different ranks cannot be matched; call it outside, or in a "
                "tf.function without a session"
            )
        return _called_back(what, tensors, types)
    op, spec = ops.ring_call, what.spec()
    if what.by_name:
        op = ops.ring_call_by_name
        if place == "function":
            spec += "\n"  # the op adds the place from which the function is called
    return list(_raising_ours(op)(tensors=tensors, Tout=types, spec=spec, name=what.kind))


def gradients_of(
    what: ForeignCall, inputs: Sequence[tf.Tensor], results: Sequence[tf.Tensor], gradients: Sequence[Any]
) -> list[Any]:
    """The gradients of ``inputs``, by the rules of `ForeignCall.backward`.

    Rank and size are read when the ops run: an elastic training calls a function again with other ranks.
    """
    back, process_set = what.backward(), process_set_of(what.process_set)
    count = 1 if what.kind == "alltoall" else len(inputs)
    given = [
        tf.zeros_like(result) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, result in zip(gradients[:count], results[:count], strict=True)
    ]
    if what.kind == "reducescatter":
        scale = what.gradient_scale(tf.cast(number_op("size", what.process_set), tf.float64))
        given = [gradient * tf.cast(scale, gradient.dtype) for gradient in given]
    if what.kind == "alltoall":
        return [call(back, [given[0], results[1]])[0], *[None] * (len(inputs) - 1)]
    reduced = call(back, given)[:count]
    if what.kind == "allgather":
        all_rows, rank = results[count:], number_op("rank", what.process_set)
        firsts = [tf.reduce_sum(rows[:rank]) for rows in all_rows]
        reduced = [
            tf.reshape(whole[first : first + rows[rank]], tf.shape(tensor))
            for whole, first, rows, tensor in zip(reduced, firsts, all_rows, inputs, strict=True)
        ]
    if what.kind == "broadcast":
        is_root = tf.equal(number_op("rank", what.process_set), process_set.group_rank(what.root))
        reduced = [tf.where(is_root, whole, tf.zeros_like(whole)) for whole in reduced]
    return reduced


def _registered_gradient(op: Any, *gradients: Any) -> list[Any]:
    spec = op.get_attr("spec")
    what = parse(spec.decode() if isinstance(spec, bytes) else spec)
    return gradients_of(what, list(op.inputs), list(op.outputs), gradients)


def _raise_as_ours() -> None:
    """Make calls of functions and sessions raise errors of collectives that are also of our classes.

    TensorFlow turns our errors into its own. An interrupt in an op is a KeyboardInterrupt.
    """
    owners: list[tuple[Any, str]] = [(tf.compat.v1.Session, "run")]
    try:
        from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

        owners.append((Function, "__call__"))
    except ImportError:  # another TensorFlow: the error stays
        pass
    for owner, name in owners:
        setattr(owner, name, _raising_ours(getattr(owner, name)))


@lru_cache(maxsize=64)
def of_both(ours: Any, theirs: Any) -> Any:
    """A subclass of our error ``ours`` and TensorFlow's ``theirs``, with the arguments of ``theirs``."""
    return type(ours.__name__, (theirs, ours), {"__module__": ours.__module__, "__reduce__": _as_ours})


_NOT_COMPILED = re.compile(r"'RingCall\w*' OpKernel for XLA.*?\{\{node (.*?)\}\}", re.DOTALL)


def _as_ours(error: Any) -> Any:
    """Pickles as our error: another process may not have TensorFlow."""
    return type(error).__bases__[1], (str(error),)


def _raising_ours(function: Any) -> Any:
    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (tf.errors.OpError, RuntimeError) as error:
            # Python's own interrupt hits the code that makes the AbortedError; pybind11 then raises a RuntimeError.
            known = original(error)
            if isinstance(known, KeyboardInterrupt) or "REPLACED BY KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from error
            if (
                isinstance(known, RingError)
                and isinstance(error, tf.errors.OpError)
                and not isinstance(error, RingError)
            ):
                ours, theirs = cast(Any, type(known)), cast(Any, type(error))
                raise of_both(ours, theirs)(error.node_def, error.op, error.message) from error
            if isinstance(error, tf.errors.OpError) and (found := _NOT_COMPILED.search(str(error))):
                message = (
                    f"XLA compiles no collectives, such as {found[1]!r} in a function with jit_compile=True; compile "
                    "the functions between collectives instead, and give compile() of Keras jit_compile=False"
                )
                raise tf.errors.InvalidArgumentError(error.node_def, error.op, f"{message}\n{error.message}") from error
            raise

    return call


@lru_cache(maxsize=1)
def _ops() -> Any:
    """The ops; None, after one warning, if TensorFlow cannot load them."""
    watch_interrupts()
    spec = find_spec("ring_notebook._core")
    path = Path(spec.origin if spec and spec.origin else "").parent / "_tensorflow_ops.so"
    try:
        ops = tf.load_op_library(str(path))
        library = ctypes.CDLL(str(path))
        library.ring_tensorflow_trouble.restype = ctypes.c_char_p
        if trouble := library.ring_tensorflow_trouble().decode():
            raise RuntimeError(trouble)
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        warnings.warn(
            f"TensorFlow {tf.__version__} cannot load the ops in {path} ({error}): collectives are called through "
            "tf.numpy_function, which copies tensors",
            RuntimeWarning,
            stacklevel=5,
        )
        return None
    library.ring_tensorflow_connect(ctypes.c_void_p(core.carry_out_address()))
    for name in ("RingCall", "RingCallByName"):
        tf.RegisterGradient(name)(_registered_gradient)
    return ops


def _called_back(what: ForeignCall, tensors: list[tf.Tensor], types: list[tf.DType]) -> list[tf.Tensor]:
    def carry(*values: Any) -> list[Any]:
        outputs: dict[int, Any] = {}

        def memory(index: int, shape: tuple[int, ...]) -> int:
            outputs[index] = np.empty(shape, types[index].as_numpy_dtype)
            return int(outputs[index].ctypes.data)

        arrays = [np.require(value, requirements=["C"]) for value in values]
        given = [(array.ctypes.data, array.shape, _NUMBERS[array.dtype.type]) for array in arrays]
        if error := carry_out("tf", what.spec(), given, memory):
            raise RuntimeError(error)
        return [outputs[index] for index in range(len(types))]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*inputs: tf.Tensor) -> Any:
        results = tf.numpy_function(carry, inputs, types)
        return results, lambda *gradients: gradients_of(what, inputs, results, gradients)

    results = run(*tensors)
    return list(results) if isinstance(results, (list, tuple)) else [results]


_raise_as_ours()  # before the first session is asked to run
