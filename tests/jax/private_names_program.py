"""What each of two ranks does while JAX lacks the private names that its arguments list."""

from __future__ import annotations

import sys
import warnings

import jax.numpy as jnp
import numpy as np

import jax
import ring_notebook.jax as hvd
from ring_notebook.jax.jax_private import PRIVATE_NAMES

for absent in sys.argv[1:]:
    PRIVATE_NAMES[absent] = "jax:this_name_is_absent"


def main() -> None:
    hvd.init()
    hvd.start_distributed()
    mean = np.arange(4.0) + (hvd.size() - 1) / 2
    own = jnp.arange(4.0) + hvd.rank()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        np.testing.assert_allclose(hvd.allreduce(own), mean)
    copies = [one for one in warned if "Python's arrays" in str(one.message)]
    assert len(copies) == bool({"effects", "lowering"} & set(sys.argv[1:])), warned
    step = jax.jit(jax.grad(lambda x: (hvd.allreduce(x) ** 2).sum()))
    for _ in range(3):
        np.testing.assert_allclose(step(own), 2 * mean)
    many = jax.jit(lambda x: [hvd.allreduce(x * i, op=hvd.Sum) for i in range(20)])
    for i, result in enumerate(many(own)):
        np.testing.assert_allclose(result, 2 * i * mean, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(hvd.allreduce)(own), mean)
    if "tokens_between_programs" not in sys.argv[1:]:  # all later ones would fail
        try:
            jax.jit(hvd.allreduce)(jnp.ones(3 + hvd.rank())).block_until_ready()
        except Exception as error:
            if "expected float32" not in str(error):
                raise
        else:
            raise AssertionError("ranks with different shapes must fail")
        np.testing.assert_allclose(jax.jit(hvd.allreduce)(own), mean)
    devices = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    rows, everywhere = (
        jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(*axis)) for axis in (("ranks",), ())
    )
    whole = jax.make_array_from_process_local_data(rows, np.asarray(own)[None])
    sums, others = (jax.jit(lambda x, f=f: f(x, axis=0), out_shardings=everywhere) for f in (jnp.sum, jnp.max))
    for _ in range(3):
        np.testing.assert_allclose(sums(whole).addressable_data(0), 2 * mean)
    if "executable" not in sys.argv[1:]:  # XLA would wait
        try:
            (others if hvd.rank() == 1 else sums)(whole)
        except hvd.CollectiveMismatch as error:
            if "all-reduce maximum" not in str(error):
                raise
        else:
            raise AssertionError("ranks that start other programs must fail")
    jax.effects_barrier()
    hvd.shutdown()
    sys.stdout.write("all is well\n")


if __name__ == "__main__":
    main()
