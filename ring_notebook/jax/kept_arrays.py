"""How snapshots keep JAX's arrays: by their bytes, stored once for equal arrays of ranks and snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from ring_notebook.core.kept_state import Keeper


class JaxKeeper(Keeper):
    """JAX's objects for `ring_notebook.core.kept_state`: see `Keeper` there."""

    name = "jax"

    def reduced(self, value: Any) -> Any:
        """Arrays as `reduced_array`."""
        return reduced_array(value) if isinstance(value, jax.Array) else NotImplemented

    def unkeepable(self, value: Any) -> str:
        """Values of a program that is being traced."""
        return "a value of a function while JAX traces it" if isinstance(value, jax.core.Tracer) else ""


def reduced_array(value: jax.Array) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """As ``__reduce__``, without private names of JAX: as numpy's array, or what a key of random numbers is made of."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _key, (np.asarray(jax.random.key_data(value)), str(jax.random.key_impl(value)))
    if value.weak_type and not value.shape:  # made of a number: other arrays' types prevail over it
        return jnp.asarray, (value.item(),)
    return jnp.asarray, (np.asarray(value),)


def _key(data: Any, kind: str) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=kind)
