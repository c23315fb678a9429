"""How snapshots keep JAX's arrays: by their bytes, which equal arrays of ranks and snapshots share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from ring_notebook.core.kept_state import Memory


class JaxKeeper:
    """JAX's objects for `ring_notebook.core.kept_state`: see `Keeper` there."""

    name = "jax"

    def memory_of(self, value: Any) -> Memory | None:
        """None: arrays never share memory that changes."""
        return None

    def with_memory(self, size: int, fill: Callable[[memoryview], object], about: Any) -> Any:
        """Never called."""
        raise NotImplementedError

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

    def loses(self, value: Any) -> str:
        """Nothing."""
        return ""

    def random_state(self) -> Any:
        """None: JAX's random numbers have keys, which are arrays."""

    def set_random_state(self, state: Any) -> None:
        """Nothing to do."""

    def seed(self, number: int) -> None:
        """Nothing to do."""


def _key(data: Any, kind: str) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=kind)
