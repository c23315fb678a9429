"""How snapshots keep JAX's arrays: by their bytes, stored once for equal arrays of ranks and snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import jax
from ring_notebook.core.kept_state import Keeper


class JaxKeeper(Keeper):
    """JAX's objects for `ring_notebook.core.kept_state`: see `Keeper` there."""

    name = "jax"

    def reduced(self, value: Any) -> Any:
        """Arrays as `reduced_array`."""
        return reduced_array(value) if isinstance(value, jax.Array) else NotImplemented

    def loses(self, value: Any) -> str:
        """How arrays are spread over this rank's devices, where that is no `NamedSharding`."""
        try:
            leaves = jax.tree_util.tree_leaves(value)
        except Exception:  # no pytree, such as a dict whose keys cannot be sorted: pickle keeps it
            return ""
        spread = (one for one in leaves if isinstance(one, jax.Array))
        return "how it is spread over devices" if any(map(_loses_devices, spread)) else ""

    def unkeepable(self, value: Any) -> str:
        """Values of a program that is being traced."""
        return "a value of a function while JAX traces it" if isinstance(value, jax.core.Tracer) else ""


def reduced_array(value: jax.Array) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """As ``__reduce__``, without private names of JAX: as numpy's array, or what a key of random numbers is made of."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _key, (np.asarray(jax.random.key_data(value)), str(jax.random.key_impl(value)))
    if value.weak_type and not value.shape:  # made of a number: other arrays' types prevail over it
        return jnp.asarray, (value.item(),)
    sharding = value.sharding
    if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1 and value.is_fully_addressable:
        own = jax.local_devices()
        places = np.vectorize(own.index, otypes=[int])(sharding.mesh.devices)
        return _spread, (np.asarray(value), places, sharding.mesh.axis_names, sharding.spec)
    return jnp.asarray, (np.asarray(value),)


def _loses_devices(value: jax.Array) -> bool:
    return len(value.sharding.device_set) > 1 and not isinstance(value.sharding, NamedSharding)


def _spread(data: Any, places: Any, axes: Any, spec: Any) -> Any:
    """The array over a mesh of these devices of the rank; on the first device where it has fewer now."""
    own = jax.local_devices()
    if places.max() >= len(own):
        return jnp.asarray(data)
    return jax.device_put(data, NamedSharding(Mesh(np.array(own)[places], axes), spec))


def _key(data: Any, kind: str) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=kind)
