"""The private names of JAX that we use. Each may be absent; its comment says what happens without it.

No other file of the package uses one. XLA orders programs and calls by tokens, which no public module of JAX has;
`jax.experimental.io_callback` does the same through Python's arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import numpy as np

import jax
from ring_notebook.api.foreign_calls import original

PRIVATE_NAMES = {
    # These two let XLA call the core in order, by tokens. Without: JAX's ordered callback, which copies, and a warning;
    # and no `checkpoint` over calls by name in a program of several devices.
    "effects": "jax._src.effects",
    "lowering": "jax._src.interpreters.mlir",
    # Holds the tokens between programs. Without: programs start 100 µs later, and a program that has failed makes all
    # later ones with collectives fail, so that ranks have to start again.
    "tokens_between_programs": "jax._src.dispatch:RuntimeTokenSet",
    # Without: programs start 100 µs later.
    "token": "jax._src.core:Token",
    # These three have C++ start programs. Without, and before JAX 0.7: Python does, 100 µs later.
    "start_from_cpp": "jax._src.pjit:_get_fastpath_data",
    "start_data": "jax._src.pjit:pxla.MeshExecutableFastpathData",
    "pytrees": "jax._src.tree_util:dispatch_registry",
    # Starts programs. Without: one that `lower().compile()` made, with collectives, runs once; and one on devices of
    # several ranks waits in XLA for a rank that does not start it, which nothing ends.
    "executable": "jax._src.interpreters.pxla:MeshExecutable",
    # C++ calls this before it starts a program, where the layout of an argument is not the default one. Without: Python
    # starts programs on devices of several ranks, 100 to 400 µs later.
    "asked_layout": "jax._src.layout:Layout._to_xla_layout",
    # The names of mapped axes, in `pmap`. Without: only in `shard_map`, which names them publicly.
    "mapped_axes": "jax._src.core:get_axis_env",
}
"""Our name, and where JAX has it: a module and a path in it."""

TARGET = "ring_notebook_collective"


def private(name: str) -> Any:
    """The object with the name ``name`` in `PRIVATE_NAMES`. Raises AttributeError if this JAX lacks it."""
    try:
        return resolve_name(PRIVATE_NAMES[name])
    except (ImportError, AttributeError):
        raise AttributeError(f"{PRIVATE_NAMES[name]} is absent") from None


def has(name: str) -> bool:
    """Whether this JAX has `private` ``name``."""
    try:
        private(name)
    except AttributeError:
        return False
    return True


def effect(text: str, *, ordered: bool) -> Any:
    """An effect that is allowed wherever JAX allows effects; ``text`` is its name in JAX's errors.

    ``ordered``: it orders programs and the calls in them. Raises AttributeError where this JAX has no such effects.
    """
    effects = private("effects")
    allowed = [
        effects.lowerable_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
        *([effects.ordered_effects] if ordered else []),
    ]
    kind = type("RingEffect", (effects.Effect,), {"__str__": lambda self: text, "__repr__": lambda self: text})
    for one in allowed:
        one.add_type(kind)
    return kind()


def token_lowering(effect: Any) -> Callable[..., Any]:
    """A lowering to a call of `TARGET` in the order of ``effect``'s tokens.

    Raises AttributeError where this JAX has no such tokens.
    """
    mlir = private("lowering")
    custom_call, token_set, token_type = mlir.custom_call, mlir.TokenSet, mlir.hlo.TokenType

    def lower(ctx: Any, *arrays: Any, spec: str) -> Any:
        made = [
            mlir.ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(np.dtype(aval.dtype)))
            for aval in ctx.avals_out
        ]
        layouts = [[tuple(reversed(range(aval.ndim))) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)]
        operation = custom_call(
            TARGET,
            result_types=[token_type.get(), *made],
            operands=[ctx.tokens_in.get(effect), *arrays],
            backend_config={"spec": mlir.ir.StringAttr.get(spec)},
            has_side_effect=True,
            api_version=4,
            operand_layouts=[(), *layouts[0]],
            result_layouts=[(), *layouts[1]],
        )
        token, *values = operation.results
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(token_set({effect: token})))
        return values

    return lower


def shorten_dispatch(effect: Any) -> None:
    """Make JAX start programs with collectives as fast as programs without effects.

    JAX passes the token of each program to the next one, in Python code that takes 100 µs. Programs that one thread
    starts on a CPU run one after another anyway. So all get one and the same token here, and a program that has failed
    does not make all later ones fail.
    """
    if not has("tokens_between_programs"):
        return
    if not has("token"):
        drop_failed_tokens()
        return
    tokens: Any = private("tokens_between_programs")
    get, put, wait = tokens.get_token_input, tokens.set_token_result, tokens.block_until_ready
    device = jax.local_devices(backend="cpu")[0]
    with ThreadPoolExecutor(1) as outside:  # of the function that is being traced, where the first collective may be
        made = outside.submit(jax.device_put, np.zeros(0, np.bool_), device).result()
    token = private("token")(made)
    nothing = jax.jit(lambda: 0)

    def get_token_input(self: Any, of: Any, devices: Any) -> Any:
        return token if of is effect and list(devices) == [device] else get(self, of, devices)

    def set_token_result(self: Any, of: Any, given: Any) -> None:
        if of is not effect:
            put(self, of, given)

    def block_until_ready(self: Any) -> None:
        """Of `jax.effects_barrier`, and at the end of the process."""
        jax.block_until_ready(nothing())  # it runs when all earlier ones have ended
        try:
            wait(self)
        except Exception as error:
            if original(error) is None:
                raise
            self.clear()

    tokens.get_token_input, tokens.set_token_result = get_token_input, set_token_result
    tokens.block_until_ready = block_until_ready
    if has("pytrees") and _tell_cpp():
        jax.tree_util.register_pytree_node(_Returned, _Returned.flatten, lambda _, parts: parts[1])
        _short_way.update(effect=effect, token=token._buf, device=device)


def start_compiled_from_python(effect: Any) -> None:
    """Start programs with ``effect`` from `lower().compile()` in Python, which passes their tokens."""
    if not has("executable"):
        return
    kind = private("executable")
    make = kind.create_cpp_call

    def create_cpp_call(self: Any, *arguments: Any) -> Any:
        ordered = getattr(self.unsafe_call, "ordered_effects", ())
        return None if effect in ordered else make(self, *arguments)

    kind.create_cpp_call = create_cpp_call


def begin_programs_with(begin: Callable[[Any], Callable[[], object] | None]) -> None:
    """Ask ``begin``, for each program that JAX compiles from now on, what to call before each start.

    None leaves the program as it is. The others start from C++ if it asks us for the layout of an argument, as a
    program shows here; else from Python, 100 to 400 µs later.
    """
    if not has("executable"):
        return
    kind = private("executable")
    plain = kind.unsafe_call.fget
    begun: list[int] = []
    begins: list[Callable[[Any], Callable[[], object] | None]] = [lambda _: lambda: begun.append(1)]

    def unsafe_call(self: Any) -> Any:
        if self._unsafe_call is None:
            call = plain(self)
            before = begins[-1](call)
            self._unsafe_call = call if before is None else _Begun(before, call)
        return self._unsafe_call

    kind.unsafe_call = property(unsafe_call)
    if _tell_cpp():
        array, program = jax.device_put(np.zeros(1)), jax.jit(lambda x: -x)
        _short_way["array"] = type(array)
        for _ in range(3):
            program(array)
        if len(begun) != 3:
            del _short_way["array"]
    begins.append(begin)


def devices_of(program: Any) -> set[jax.Device]:
    """The devices of all processes that run a program, which has arguments or results."""
    shardings = (*program.in_handler.in_shardings, *program.out_handler.out_shardings)
    return {device for sharding in shardings for device in getattr(sharding, "device_set", ())}  # of one that is open


def text_of(program: Any) -> str:
    """The instructions of a program, as XLA has compiled it."""
    return "\n".join(module.to_string() for module in program.xla_executable.hlo_modules())


def is_export(ctx: Any) -> bool:
    """Whether a lowering with this context is for `jax.export`."""
    return bool(getattr(getattr(ctx.module_context, "lowering_parameters", None), "for_export", False))


def wait_for_programs() -> None:
    """Wait until all programs that this process has started have ended.

    Returns at once in a function that JAX traces, and in a callback, which is part of a program.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("jax."):
            return
        frame = frame.f_back
    jax.effects_barrier()


def drop_failed_tokens() -> None:
    """Keep a program that failed with our error from failing all later ones.

    JAX passes the token of each program to the next one, even after a failure.
    """
    if not has("tokens_between_programs"):
        return
    tokens = private("tokens_between_programs")
    get = tokens.get_token_input

    def get_token_input(self: Any, of: Any, devices: Any) -> Any:
        if token := self.current_tokens.get(of):
            try:
                token.block_until_ready()  # JAX does so too before it passes the token
            except Exception as error:
                if original(error) is None:
                    raise
                del self.current_tokens[of]
        return get(self, of, devices)

    tokens.get_token_input = get_token_input


def mapped_axes() -> Sequence[str]:
    """The mesh axes over whose devices the function that is being traced runs in parts: `shard_map` and `pmap`."""
    mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    if axes := tuple(getattr(mesh, "manual_axes", ()) or ()):
        return axes
    return tuple(private("mapped_axes")().axis_sizes) if has("mapped_axes") else ()


def varying_axes(aval: Any) -> frozenset[str] | None:
    """The mapped axes over which an array differs; None where this JAX does not follow that."""
    axes: Any = getattr(getattr(aval, "manual_axis_type", None), "varying", None)  # from JAX 0.10
    axes = getattr(aval, "vma", None) if axes is None else axes
    return None if axes is None else frozenset(axes)


_short_way: dict[str, Any] = {}


def _tell_cpp() -> bool:
    """Whether JAX asks `_fastpath_data`, from now on, how C++ starts a program."""
    if not (has("start_from_cpp") and has("start_data") and "const_args" in private("start_data")._fields):
        return False  # older JAX has no room for a token there
    if "plain" not in _short_way:
        _short_way["plain"] = private("start_from_cpp")
        import_module(PRIVATE_NAMES["start_from_cpp"].partition(":")[0])._get_fastpath_data = _fastpath_data  # type: ignore[attr-defined]
    return True


def _fastpath_data(executable: Any, *arguments: Any, **more: Any) -> Any:
    """What JAX needs to call a program from C++; for a program with collectives, the token is a constant.

    Not a closure: functions of JAX refer to it, and are pickled.
    """
    plain: Any = _short_way["plain"]
    call: Any = getattr(executable, "unsafe_call", None)
    begun = isinstance(call, _Begun) and "array" in _short_way
    ours = "effect" in _short_way and getattr(call, "ordered_effects", None) == [_short_way["effect"]]
    if not begun and not (ours and executable.xla_executable.local_devices() == [_short_way["device"]]):
        return plain(executable, *arguments, **more)
    try:
        without = copy(executable)
        if begun:
            without._unsafe_call = call.call
            data = plain(without, *arguments, **more)
            return None if data is None else _with_begin(data, call.before, executable._xla_in_layouts, arguments[1])
        without._unsafe_call = copy(call)
        without._unsafe_call.ordered_effects = []
        data = plain(without, *arguments, **more)
        return None if data is None else _with_token(data, _short_way["token"])
    except (AttributeError, IndexError, TypeError, ValueError):  # of a JAX that is not known yet: Python starts it
        return plain(executable, *arguments, **more)


class _Begun:
    """A program before whose start we are called."""

    def __init__(self, before: Callable[[], object], call: Any) -> None:
        self.before, self.call = before, call

    def __call__(self, *arguments: Any) -> Any:
        self.before()
        return self.call(*arguments)


def _with_begin(data: Any, before: Callable[[], object], layouts: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """Make C++ call ``before`` when it compares the layout of the first array; None if no argument is an array."""
    given = [one for one, kept in zip([*data.const_args, *arguments], data.kept_var_bitvec, strict=True) if kept]
    first = next((i for i, one in enumerate(given) if type(one) is _short_way["array"]), None)
    if first is None:
        return None
    layout, name = copy(layouts[first]), PRIVATE_NAMES["asked_layout"].rpartition(".")[2]
    known = getattr(layout, name)(given[first].dtype)
    setattr(layout, name, lambda _: (before(), known)[1])
    asked = [*data.in_device_local_layouts]
    asked[first] = layout
    return data._replace(in_device_local_layouts=asked)


def _with_token(data: Any, token: Any) -> Any:
    results = data.out_pytree_def.unflatten(range(data.out_pytree_def.num_leaves))
    return data._replace(
        out_pytree_def=private("pytrees").flatten(_Returned(-1, results), None)[1],
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
