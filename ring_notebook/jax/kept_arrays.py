"""How snapshots keep JAX's arrays: by their bytes, which equal arrays of ranks and snapshots share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from ring_notebook.core.kept_state import Keeper


class JaxKeeper(Keeper):
    """JAX's objects for `ring_notebook.core.kept_state`: see `Keeper` there."""

    name = "jax"

    def reduced(self, value: Any) -> Any:
        """Arrays as numpy's, keys of random numbers as what they are made of."""
        if not isinstance(value, jax.Array):
            return NotImplemented
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return _key, (np.asarray(jax.random.key_data(value)), str(jax.random.key_impl(value)))
        return jnp.asarray, (np.asarray(value),)

    def unkeepable(self, value: Any) -> str:
        """Values of a program that is being traced."""
        return "a value of a function while JAX traces it" if isinstance(value, jax.core.Tracer) else ""


def _key(data: Any, kind: str) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=kind)
