"""What ranks do that have two devices each; see harness/case_jobs.py. True for any number of ranks."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax
import ring_notebook.jax as hvd
from harness.kept_again import kept_again

try:
    from jax import shard_map
except ImportError:
    from jax.experimental.shard_map import shard_map

MESH = Mesh(np.array(jax.devices()), ("d",))
HALVES = PartitionSpec("d")
FOLLOWS = hasattr(jax.lax, "pcast") or hasattr(jax.lax, "pvary")
"""Whether this JAX knows which values differ between devices, which the gradient of a replicated one needs."""


def own() -> jax.Array:
    """Four rows on two devices."""
    return jax.device_put(jnp.arange(8.0).reshape(4, 2) * (hvd.rank() + 1), NamedSharding(MESH, HALVES))


def mean() -> np.ndarray:
    """That of all ranks."""
    return np.arange(8.0).reshape(4, 2) * (hvd.size() + 1) / 2


# JAX before 0.6 knows no rule of whether the results of a foreign primitive are equal on all devices.
UNCHECKED = {} if FOLLOWS else {"check_rep": False}


def mapped(function):
    """The function of each device's half."""
    return shard_map(function, mesh=MESH, in_specs=HALVES, out_specs=HALVES, **UNCHECKED)


def case_there_are_two_devices() -> None:
    assert jax.local_device_count() == 2


def case_sharded_arrays_outside_of_compiled_functions() -> None:
    size, array = hvd.size(), own()
    for found, expected in (
        (hvd.allreduce(array), mean()),
        (hvd.broadcast(array, 0), np.arange(8.0).reshape(4, 2)),
        (hvd.average_gradients({"a": array})["a"], mean()),
    ):
        np.testing.assert_allclose(found, expected)
        assert found.sharding == array.sharding
    gathered = hvd.allgather(array)
    np.testing.assert_allclose(gathered, np.concatenate([np.arange(8.0).reshape(4, 2) * (r + 1) for r in range(size)]))
    assert gathered.sharding.device_set == array.sharding.device_set
    replicated = jax.device_put(jnp.ones(3) * hvd.rank(), NamedSharding(MESH, PartitionSpec()))
    np.testing.assert_allclose(hvd.allreduce(replicated), np.full(3, (size - 1) / 2))
    parts = hvd.reducescatter(jax.device_put(jnp.ones((2 * size, 2)), NamedSharding(MESH, HALVES)), op=hvd.Sum)
    np.testing.assert_allclose(parts, np.full((2, 2), size))
    swapped = hvd.alltoall(jax.device_put(jnp.arange(2.0 * size), NamedSharding(MESH, HALVES)))
    np.testing.assert_allclose(swapped, np.tile(np.arange(2) + 2 * hvd.rank(), size))


def case_sharded_arrays_where_a_mesh_is_set() -> None:
    if not hasattr(jax, "set_mesh"):
        return
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((2,), ("d",), axis_types=(kind,))):
            array = jax.device_put(jnp.arange(8.0) * (hvd.rank() + 1), HALVES)
            expected = np.arange(8.0) * (hvd.size() + 1) / 2
            reduced = hvd.allreduce(array)
            np.testing.assert_allclose(reduced, expected)
            assert reduced.sharding == array.sharding
            np.testing.assert_allclose(hvd.allreduce(np.ones(3) * hvd.rank()), np.full(3, (hvd.size() - 1) / 2))
            np.testing.assert_allclose(jax.jit(lambda x: hvd.allreduce(x, name="set"))(array), expected)


def case_programs_of_one_device_need_no_name() -> None:
    for call in (hvd.allreduce, jax.jit(hvd.allreduce), jax.jit(jax.vmap(hvd.allreduce))):
        np.testing.assert_allclose(call(jnp.ones((2, 3)) * hvd.rank()), np.full((2, 3), (hvd.size() - 1) / 2))


def case_sharded_arrays_in_compiled_functions() -> None:
    array = own()
    call = jax.jit(lambda x: hvd.allreduce(x * 2, name="a") * hvd.allreduce(x, name="b"))
    for _ in range(3):
        np.testing.assert_allclose(call(array), 2 * mean() ** 2, rtol=1e-6)
    reduced = jax.jit(lambda x: hvd.average_gradients({"a": x})["a"])(array)
    np.testing.assert_allclose(jax.jit(lambda a, x: a + x)(reduced, array), mean() + np.asarray(array))
    gradient = jax.jit(jax.grad(lambda x: (hvd.allreduce(x, name="c") ** 2).sum()))
    np.testing.assert_allclose(gradient(array), 2 * mean())


def case_what_has_no_order_says_so_before_it_compiles() -> None:
    for call in (jax.jit(hvd.allreduce), jax.jit(jax.grad(lambda x: hvd.allreduce(x).sum()))):
        with pytest.raises((ValueError, NotImplementedError), match="collectives without a name; pass name= to each"):
            call(own())
    for call in (jax.jit(mapped(hvd.allreduce)), mapped(hvd.allgather)):
        with pytest.raises(ValueError, match=r"needs a name in a function that runs on several devices.*pass name="):
            call(own())


def case_mapped_functions_reduce_each_part_with_those_of_other_ranks() -> None:
    array = own()
    both_halves = np.asarray(array)[:2] + np.asarray(array)[2:]
    call = mapped(lambda x: hvd.allreduce(x, name="s") + jax.lax.psum(x, "d"))
    for function in (call, jax.jit(call)):
        for _ in range(5):
            np.testing.assert_allclose(function(array), mean() + np.concatenate([both_halves, both_halves]))
    rows = jax.jit(mapped(lambda x: hvd.allgather(x, name="g")))(array)
    assert rows.shape == (4 * hvd.size(), 2)
    gradient = jax.jit(jax.grad(lambda x: (mapped(lambda x: hvd.allreduce(x, name="m"))(x) ** 2).sum()))
    np.testing.assert_allclose(gradient(array), 2 * mean())
    batch = jax.jit(mapped(jax.vmap(lambda x: hvd.allreduce(x, name="v"))))
    np.testing.assert_allclose(batch(array), mean())


def case_a_replicated_weight_in_a_mapped_function_has_the_gradient_of_all_devices() -> None:
    if not FOLLOWS:
        return

    def loss(weight, x):
        return (
            shard_map(
                lambda w, x: hvd.allreduce(w, name="w") * x,
                mesh=MESH,
                in_specs=(PartitionSpec(), HALVES),
                out_specs=HALVES,
            )(weight, x)
        ).sum()

    total = np.arange(8.0).sum() * (hvd.size() + 1) / 2
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.ones(()), own()), total, rtol=1e-6)


def case_a_step_in_a_mapped_function_has_equal_weights_on_all_devices() -> None:
    """As JAX can tell, so that the function may give them as replicated."""
    if not FOLLOWS:
        return

    def loss(weight, x):
        return ((x @ weight) ** 2).mean()

    def step(weight, x):
        gradient = jax.grad(lambda weight: jax.lax.pmean(loss(weight, x), "d"))(weight)
        return weight - 0.01 * hvd.average_gradients(gradient)

    replicated = PartitionSpec()
    found = jax.jit(shard_map(step, mesh=MESH, in_specs=(replicated, HALVES), out_specs=replicated))(jnp.ones(2), own())
    every = [np.arange(8.0, dtype=np.float32).reshape(4, 2) * (r + 1) for r in range(hvd.size())]
    mean_gradient = np.mean([jax.grad(loss)(jnp.ones(2), rows) for rows in every], axis=0)
    np.testing.assert_allclose(found, 1 - 0.01 * mean_gradient, rtol=1e-4)


def case_what_is_computed_again_in_the_backward_pass() -> None:
    def loss(x):
        return (jnp.sin(hvd.allreduce(x, name="again")) ** 2).sum()

    for function in (loss, lambda x: mapped(lambda x: loss(x).reshape(1, 1))(x).sum()):
        gradient = jax.jit(jax.grad(jax.checkpoint(function)))(own())
        np.testing.assert_allclose(gradient, np.sin(2 * mean()), rtol=1e-4, atol=1e-5)


def case_pmap() -> None:
    halves = own().reshape(2, 2, 2)
    np.testing.assert_allclose(jax.pmap(lambda x: hvd.allreduce(x, name="p"))(halves).reshape(4, 2), mean())
    both_devices = jax.pmap(lambda x: jax.lax.pmean(hvd.allreduce(x, name="q"), "i"), axis_name="i")(halves)
    np.testing.assert_allclose(both_devices[0], (mean()[:2] + mean()[2:]) / 2)


def case_a_training_on_two_devices_of_each_rank() -> None:
    def loss(weights, x, y):
        return ((jnp.tanh(x @ weights["a"]) @ weights["b"] - y) ** 2).mean()

    rng = np.random.default_rng(0)
    weights = {
        "a": jnp.asarray(rng.normal(size=(5, 8)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=8), jnp.float32),
    }
    x = rng.normal(size=(12 * hvd.size(), 5)).astype(np.float32)
    y = np.sin(x.sum(1))
    joined = jax.tree.map(jnp.array, weights)
    for _ in range(5):
        joined = jax.tree.map(lambda w, g: w - 0.1 * g, joined, jax.grad(loss)(joined, x, y))

    @jax.jit
    def step(weights, x, y):
        gradients = hvd.average_gradients(jax.grad(loss)(weights, x, y))
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    mine = slice(hvd.rank(), None, hvd.size())
    half = NamedSharding(MESH, HALVES)
    weights = jax.device_put(weights, NamedSharding(MESH, PartitionSpec()))
    for _ in range(5):
        weights = step(weights, jax.device_put(x[mine], half), jax.device_put(y[mine], half))
    for name, expected in joined.items():
        np.testing.assert_allclose(weights[name], expected, rtol=1e-4, atol=1e-6)


def case_snapshots_keep_how_arrays_are_spread() -> None:
    whole = jax.device_put(jnp.arange(4.0), NamedSharding(MESH, PartitionSpec()))
    again = kept_again({"tree": {"own": own(), "whole": whole, "plain": jnp.ones(3)}})["tree"]
    for name, before in (("own", own()), ("whole", whole), ("plain", jnp.ones(3))):
        np.testing.assert_array_equal(again[name], before)
        assert again[name].sharding == before.sharding, name
