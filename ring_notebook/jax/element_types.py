"""Arrays of all of JAX's dtypes as arrays of those that the core has: keys, complex numbers, and what only moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax.numpy as jnp

import jax
from ring_notebook.api.foreign_calls import ForeignCall
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.jax.ordered_call import is_known, refuse

Array = Any
Restore: TypeAlias = Callable[[Array], Array]
_REDUCE = ("allreduce", "reducescatter")


def movable(array: Array, what: ForeignCall) -> tuple[Array, Restore]:
    """``array`` as ``what`` takes it, and the function that turns a result back into its dtype.

    Keys of random numbers and what has no arithmetic (float8, int4) only move; complex numbers have sums and averages.
    Raises TypeError for the others.
    """
    dtype = array.dtype
    if is_known(dtype):
        return array, _itself
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        kind = str(jax.random.key_impl(array))
        rows = _with_rows(jax.random.key_data(array), array.ndim, what)
        return _moved(rows, dtype, what), lambda made: jax.random.wrap_key_data(made, impl=kind)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        if what.kind in _REDUCE and what.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            refuse(dtype, f"{what.kind} with op={ReduceOp(what.op).name.capitalize()}")
        pairs = jnp.stack([array.real, array.imag], axis=-1)
        return _with_rows(pairs, array.ndim, what), lambda made: jax.lax.complex(made[..., 0], made[..., 1])
    if jnp.issubdtype(dtype, jnp.integer):  # of 2 or 4 bits
        wider = jnp.uint8 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int8
        return _moved(array, dtype, what).astype(wider), lambda made: made.astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1:
        if jnp.finfo(dtype).bits < 8:
            return _moved(array, dtype, what).astype(jnp.bfloat16), lambda made: made.astype(dtype)
        return _as_type(jnp.dtype(jnp.uint8), _moved(array, dtype, what)), partial(_as_type, jnp.dtype(dtype))
    refuse(dtype, what.kind)


def _itself(array: Array) -> Array:
    return array


def _moved(array: Array, dtype: Any, what: ForeignCall) -> Array:
    if what.kind in _REDUCE:
        refuse(dtype, what.kind)
    return array


def _with_rows(array: Array, dims: int, what: ForeignCall) -> Array:
    """``array`` in rows, where it has one dimension more than the ``dims`` of the original, maybe a single element."""
    return array[None] if dims == 0 and what.kind == "allgather" else array


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _as_type(dtype: Any, array: Array) -> Array:
    """The same bytes."""
    return jax.lax.bitcast_convert_type(array, dtype)


def _no_gradient(dtype: Any, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"collectives have no gradient for {primals[0].dtype}: they only move its bytes; convert it to bfloat16"
    )


_as_type.defjvp(_no_gradient)
