"""A JAX primitive that calls the native core, in the order of the program, inside and outside of jit.

Two calls of one program must not change places, or ranks would wait for different ones. JAX orders effects by tokens,
of which only private modules know; where this JAX lacks them, its ordered callback does the same, slower. So it does
on GPUs, whose memory the core is not called with.
"""

from __future__ import annotations

import warnings
from _thread import interrupt_main
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

import jax
from ring_notebook.api.foreign_calls import ForeignCall, carry_out, original, register_dtypes
from ring_notebook.core.buffers import DType
from ring_notebook.core.foreign_interrupts import watch_interrupts
from ring_notebook.core.native import core

_NUMBERS = {dtype.name.lower(): dtype.xla for dtype in DType if dtype.xla >= 0}  # by JAX's names
register_dtypes("xla", {dtype.xla: dtype for dtype in DType if dtype.xla >= 0})
_TARGET = "ring_notebook_collective"

Result: TypeAlias = Any
"""A ``jax.ShapeDtypeStruct``: shape and dtype of a result."""


def check_array(array: Any, operation: str) -> None:
    """Raise TypeError unless the core knows the dtype."""
    if str(array.dtype) not in _NUMBERS:
        raise TypeError(f"{operation} cannot handle {array.dtype}; convert the array to one of {', '.join(_NUMBERS)}")


def call(what: ForeignCall, arrays: Sequence[Any], results: Sequence[Result]) -> list[Any]:
    """The results of ``what``; JAX needs their shapes before."""
    return list(_caller()(what.spec(), tuple(arrays), tuple(results)))


@lru_cache(maxsize=1)
def _caller() -> Callable[[str, tuple[Any, ...], tuple[Result, ...]], Sequence[Any]]:
    watch_interrupts()
    if jax.default_backend() != "cpu":
        _drop_failed_tokens()
        return _called_back
    try:
        return _primitive()
    except (ImportError, AttributeError) as error:
        _drop_failed_tokens()
        warnings.warn(
            f"JAX {jax.__version__} has no effects that this package knows ({error}): collectives are called back from "
            "XLA through Python's arrays, which copies them",
            RuntimeWarning,
            stacklevel=4,
        )
        return _called_back


def _primitive() -> Callable[[str, tuple[Any, ...], tuple[Result, ...]], Sequence[Any]]:
    from jax._src import core as jax_core
    from jax._src import dispatch, effects
    from jax._src.interpreters import mlir

    class RingEffect(effects.Effect):  # type: ignore[misc]
        """Collectives are ordered."""

        __str__ = lambda self: "Ring"  # noqa: E731 - as JAX's own effects

    effect = RingEffect()
    for allowed in (
        effects.lowerable_effects,
        effects.ordered_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        allowed.add_type(RingEffect)
    primitive = jax_core.Primitive("ring_collective")
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays, **params: dispatch.apply_primitive(primitive, *arrays, **params))

    def evaluate(*arrays: Any, spec: str, results: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
        return [jax_core.ShapedArray(shape, np.dtype(dtype)) for shape, dtype in results], {effect}

    primitive.def_effectful_abstract_eval(evaluate)

    def lower(ctx: Any, *arrays: Any, spec: str, results: Any) -> Any:
        made = [
            mlir.ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(np.dtype(aval.dtype)))
            for aval in ctx.avals_out
        ]
        layouts = [[tuple(reversed(range(aval.ndim))) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)]
        operation = mlir.custom_call(
            _TARGET,
            result_types=[mlir.hlo.TokenType.get(), *made],
            operands=[ctx.tokens_in.get(effect), *arrays],
            backend_config={"spec": mlir.ir.StringAttr.get(spec)},
            has_side_effect=True,
            api_version=4,
            operand_layouts=[(), *layouts[0]],
            result_layouts=[(), *layouts[1]],
        )
        token, *values = operation.results
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
        return values

    _shorten_dispatch(effect)
    jax.ffi.register_ffi_target(_TARGET, core.xla_handler(), platform="cpu")
    mlir.register_lowering(primitive, lower, platform="cpu")

    def bind(spec: str, arrays: tuple[Any, ...], results: tuple[Result, ...]) -> Sequence[Any]:
        made: Sequence[Any] = primitive.bind(
            *arrays, spec=spec, results=tuple((tuple(one.shape), str(one.dtype)) for one in results)
        )
        return made

    return bind


def _shorten_dispatch(effect: Any) -> None:
    """Have JAX start programs with collectives as fast as those without effects.

    JAX passes the token of each program to the next one, in Python code that takes 100 µs. Programs that one thread
    starts on a CPU run one after another anyway. So all get one and the same token here, and a program that has failed
    does not make all later ones fail.
    """
    from jax._src import core as jax_core
    from jax._src import dispatch, pjit, tree_util

    tokens = dispatch.RuntimeTokenSet
    get, put, wait = tokens.get_token_input, tokens.set_token_result, tokens.block_until_ready
    device = jax.local_devices(backend="cpu")[0]
    with jax.ensure_compile_time_eval():  # also where the first collective is in a function that is being traced
        token = jax_core.Token(jax.device_put(np.zeros(0, np.bool_), device))

    def get_token_input(self: Any, of: Any, devices: Any) -> Any:
        return token if of is effect and list(devices) == [device] else get(self, of, devices)

    def set_token_result(self: Any, of: Any, given: Any) -> None:
        if of is not effect:
            put(self, of, given)

    def block_until_ready(self: Any) -> None:
        """Of `jax.effects_barrier`, and at the end of the process."""
        jax.block_until_ready(jax.jit(lambda: 0)())  # it runs when all earlier ones have ended
        try:
            wait(self)
        except Exception as error:
            if original(error) is None:
                raise
            self.clear()

    tokens.get_token_input, tokens.set_token_result = get_token_input, set_token_result
    tokens.block_until_ready = block_until_ready
    if "const_args" in pjit.pxla.MeshExecutableFastpathData._fields:  # JAX 0.7; others have no room for a token there
        tree_util.register_pytree_node(_Returned, _Returned.flatten, lambda _, parts: parts[1])
        _short_way.update(plain=pjit._get_fastpath_data, effect=effect, token=token._buf, device=device)
        pjit._get_fastpath_data = _fastpath_data


def _drop_failed_tokens() -> None:
    """Have a program that failed by an error of ours not make all later ones fail.

    JAX passes the token of each program to the next one, also that of one that has failed.
    """
    try:
        from jax._src.dispatch import RuntimeTokenSet

        get = RuntimeTokenSet.get_token_input
    except (ImportError, AttributeError):  # a JAX that is not known yet: ranks have to start again after an error
        return

    def get_token_input(self: Any, of: Any, devices: Any) -> Any:
        if token := self.current_tokens.get(of):
            try:
                token.block_until_ready()  # JAX does so too before it passes the token
            except Exception as error:
                if original(error) is None:
                    raise
                del self.current_tokens[of]
        return get(self, of, devices)

    RuntimeTokenSet.get_token_input = get_token_input


_short_way: dict[str, Any] = {}


def _fastpath_data(executable: Any, *arguments: Any, **more: Any) -> Any:
    """What JAX needs to call a program from C++: of one with collectives the token is a constant.

    A function of this module without values of its own: functions of JAX refer to it, and are pickled.
    """
    plain, effect, token, device = _short_way.values()
    call = getattr(executable, "unsafe_call", None)
    if getattr(call, "ordered_effects", None) != [effect] or executable.xla_executable.local_devices() != [device]:
        return plain(executable, *arguments, **more)
    try:
        without = copy(executable)
        without._unsafe_call = copy(call)
        without._unsafe_call.ordered_effects = []
        data = plain(without, *arguments, **more)
        return None if data is None else _with_token(data, token)
    except (AttributeError, TypeError):  # of a JAX that is not known yet: it starts the program from Python
        return plain(executable, *arguments, **more)


def _with_token(data: Any, token: Any) -> Any:
    from jax._src import tree_util

    results = data.out_pytree_def.unflatten(range(data.out_pytree_def.num_leaves))
    return data._replace(
        out_pytree_def=tree_util.dispatch_registry.flatten(_Returned(-1, results), None)[1],
        in_shardings=[token.sharding, *data.in_shardings],
        out_shardings=[token.sharding, *data.out_shardings],
        out_avals=[token.aval, *data.out_avals],
        out_committed=[False, *data.out_committed],
        kept_var_bitvec=[True, *data.kept_var_bitvec],
        in_device_local_layouts=[None, *data.in_device_local_layouts],
        const_args=[token, *data.const_args],
    )


class _Returned:
    """What a program returns: a token, which is dropped, and the results of its function."""

    def __init__(self, token: Any, results: Any) -> None:
        self.token, self.results = token, results

    def flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.token, self.results), None


def _called_back(spec: str, arrays: tuple[Any, ...], results: tuple[Result, ...]) -> Sequence[Any]:
    from jax.experimental import io_callback

    def carry(*values: Any) -> list[Any]:
        inputs = [np.require(value, requirements=["C"]) for value in values]
        outputs = [np.empty(one.shape, one.dtype) for one in results]
        tensors = [(value.ctypes.data, value.shape, _NUMBERS[str(value.dtype)]) for value in inputs]

        def memory(index: int, shape: tuple[int, ...]) -> int:
            return int(outputs[index].ctypes.data) if outputs[index].shape == tuple(shape) else 0

        if error := carry_out("xla", spec, tensors, memory):
            if error.startswith(KeyboardInterrupt.__name__):
                interrupt_main()  # JAX makes an ordinary error of it
            raise RuntimeError(error)
        return outputs

    made: Sequence[Any] = io_callback(carry, list(results), *arrays, ordered=True)
    return made
