"""What ranks do with JAX; see harness/case_jobs.py. True for any number of ranks."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax
import ring_notebook.jax as hvd
from harness.kept_again import kept_again
from ring_notebook.api.foreign_calls import original
from ring_notebook.errors import RingError

jax.config.update("jax_default_matmul_precision", "highest")  # GPUs multiply float32 with fewer digits otherwise

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 5)).astype(np.float32)
Y = np.sin(X.sum(axis=1))


def own() -> jax.Array:
    return jnp.arange(4.0) + hvd.rank()


def both(function):
    """The function as it is and compiled."""
    return function, jax.jit(function)


def case_nothing_loads_torch_or_tensorflow() -> None:
    assert not {"torch", "tensorflow"} & set(sys.modules)


def case_reductions() -> None:
    every = [np.arange(4.0) + r for r in range(hvd.size())]
    expected = {
        hvd.Average: np.mean(every, axis=0),
        hvd.Sum: np.sum(every, axis=0),
        hvd.Min: every[0],
        hvd.Max: every[-1],
        hvd.Product: np.prod(every, axis=0),
    }
    for op, result in expected.items():
        for call in both(lambda x, op=op: hvd.allreduce(x, op=op)):
            np.testing.assert_allclose(call(own()), result, rtol=1e-6)
    scaled = hvd.allreduce(own(), op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    np.testing.assert_allclose(scaled, 6 * np.sum(every, axis=0))


def case_dtypes_of_one_tree_stay() -> None:
    names = ("float32", "bfloat16", "float16", "int32", "uint8", "int8", "uint16", "uint32")
    tree = {name: jnp.ones(3, name) * 2 for name in names}
    reduced = hvd.average_gradients(tree)
    assert {name: str(leaf.dtype) for name, leaf in reduced.items()} == {name: name for name in tree}
    assert all((np.asarray(leaf, np.float32) == 2).all() for leaf in reduced.values())
    with pytest.raises(TypeError, match="allreduce with op=Max cannot handle complex64"):
        hvd.allreduce(jnp.ones(2, jnp.complex64), op=hvd.Max)
    with pytest.raises(TypeError, match="allreduce cannot handle float8_e4m3fn"):
        hvd.allreduce(jnp.ones(2, jnp.float8_e4m3fn))


def case_numbers_of_python_stay_such() -> None:
    """Exact on the rank that sends them, and where they are equal."""
    sent = hvd.broadcast_parameters(
        {"step": hvd.rank(), "rate": 0.1, "factor": 0.3 + hvd.rank(), "off": hvd.rank() > 0}
    )
    assert {name: type(one) for name, one in sent.items()} == {"step": int, "rate": float, "factor": float, "off": bool}
    assert (sent["step"], sent["rate"], sent["off"]) == (0, 0.1, False)
    assert sent["factor"] == (0.3 if hvd.rank() == 0 else np.float32(0.3))


def case_gradients_of_integers_have_no_values() -> None:
    gradients = jax.grad(lambda tree: (tree["w"] * tree["n"]).sum(), allow_int=True)({"w": own(), "n": jnp.arange(4)})
    reduced = hvd.average_gradients(gradients)
    np.testing.assert_allclose(reduced["w"], np.arange(4.0))
    assert reduced["n"].dtype == jax.dtypes.float0
    assert hvd.broadcast_parameters(gradients)["n"].dtype == jax.dtypes.float0


def case_complex_numbers_are_added_up_and_have_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()
    own_values = jnp.array([1 + 2j, 3j], jnp.complex64) * (rank + 1)
    for call in both(lambda z: hvd.allreduce(z, op=hvd.Sum)):
        np.testing.assert_allclose(call(own_values), np.array([1 + 2j, 3j]) * size * (size + 1) / 2)
    for gradient in both(jax.grad(lambda z: (jnp.abs(hvd.allreduce(z)) ** 2).sum())):
        np.testing.assert_allclose(gradient(own_values), np.array([1 - 2j, -3j]) * (size + 1))
    assert hvd.allgather(jnp.complex64(rank * 1j)).tolist() == [r * 1j for r in range(size)]
    assert hvd.reducescatter(jnp.ones((size, 2), jnp.complex64), op=hvd.Sum).tolist() == [[size, size]]
    with pytest.raises(ValueError, match="reducescatter"):
        hvd.reducescatter(jnp.complex64(1))


UNREDUCED = ("float8_e4m3fn", "float8_e5m2", "int4", "uint4")


def case_every_dtype_moves() -> None:
    size, rank = hvd.size(), hvd.rank()
    jax.config.update("jax_enable_x64", True)
    try:
        for name in ("uint16", "uint32", "uint64", "complex64", "complex128", "int64", "float64", "bool", *UNREDUCED):
            values = jnp.arange(2 * size).astype(name)
            rows = values if rank == 0 else (values + values)
            for move in (lambda x: hvd.broadcast(x, 0), hvd.allgather, hvd.alltoall):
                for call in both(move):
                    found = call(rows)
                    assert found.dtype == values.dtype, (name, found.dtype)
            np.testing.assert_array_equal(np.asarray(hvd.broadcast(rows, 0)), np.asarray(values))
            gathered = np.asarray(hvd.allgather(rows))
            np.testing.assert_array_equal(gathered[: 2 * size], np.asarray(values))
            np.testing.assert_array_equal(gathered[-2 * size :], np.asarray(values + values if size > 1 else values))
    finally:
        jax.config.update("jax_enable_x64", False)
    for name in ("float4_e2m1fn", "int2", "uint2"):
        if hasattr(jnp, name):
            gathered = hvd.allgather(jnp.ones(1, name) if rank == 0 else jnp.zeros(1, name))
            assert gathered.dtype == jnp.dtype(name)
            assert np.asarray(gathered).astype(np.float32).tolist() == [1.0] + [0.0] * (size - 1)
    nan = jnp.asarray(np.array([0x7E, 0x7F], np.uint8)).view(jnp.float8_e5m2)  # two of several bit patterns
    assert np.asarray(hvd.broadcast(nan, 0)).view(np.uint8).tolist() == [0x7E, 0x7F]
    with pytest.raises(TypeError, match="no gradient for float8_e5m2"):
        jax.grad(lambda x: hvd.broadcast(x.astype(jnp.float8_e5m2), 0).astype(jnp.float32).sum())(own())


def case_keys_of_random_numbers() -> None:
    size, rank = hvd.size(), hvd.rank()
    for kind in ("threefry2x32", "rbg"):
        keys = [jax.random.key(r, impl=kind) for r in range(size)]
        for send in both(lambda x: hvd.broadcast(x, size - 1)):
            sent = send(keys[rank])
            assert sent.dtype == keys[0].dtype
            assert jax.random.normal(sent, (2,)).tolist() == jax.random.normal(keys[-1], (2,)).tolist()
        for gather in both(hvd.allgather):
            gathered = gather(keys[rank])
            assert gathered.shape == (size,)
            for mine, theirs in zip(keys, gathered, strict=True):
                np.testing.assert_array_equal(jax.random.key_data(mine), jax.random.key_data(theirs))
        split = hvd.alltoall(jax.random.split(keys[rank], size))
        np.testing.assert_array_equal(
            jax.random.key_data(split[0]), jax.random.key_data(jax.random.split(keys[0], size)[rank])
        )
        with pytest.raises(TypeError, match="allreduce cannot handle key<"):
            hvd.allreduce(keys[rank])
    raw = hvd.broadcast(jax.random.PRNGKey(rank), 0)
    np.testing.assert_array_equal(raw, jax.random.PRNGKey(0))
    tree = hvd.broadcast_parameters({"w": own(), "rng": jax.random.key(rank), "step": rank})
    assert jax.random.key_data(tree["rng"]).tolist() == jax.random.key_data(jax.random.key(0)).tolist()
    assert int(tree["step"]) == 0
    tree = hvd.prepare({"rng": jax.random.key(rank)})
    assert jax.random.key_data(tree["rng"]).tolist() == jax.random.key_data(jax.random.key(0)).tolist()


def case_a_batch_is_one_collective() -> None:
    size, rank = hvd.size(), hvd.rank()
    batch = jnp.arange(6.0).reshape(3, 2) + rank
    mean = np.arange(6.0).reshape(3, 2) + (size - 1) / 2
    for call in both(jax.vmap(hvd.allreduce)):
        np.testing.assert_allclose(call(batch), mean)
    for call in both(jax.vmap(hvd.allreduce, in_axes=1, out_axes=1)):
        np.testing.assert_allclose(call(batch), mean)
    grouped = jax.vmap(lambda x, y: hvd.grouped_allreduce([x, y]), in_axes=(0, None))(batch, jnp.ones(4))
    np.testing.assert_allclose(grouped[0], mean)
    assert grouped[1].shape == (3, 4)
    for gather in both(jax.vmap(hvd.allgather)):
        rows = gather(batch)
        assert rows.shape == (3, 2 * size)
        for r in range(size):
            np.testing.assert_allclose(rows[:, 2 * r : 2 * r + 2], np.arange(6.0).reshape(3, 2) + r)
    assert jax.vmap(hvd.allgather)(batch[:, 0]).shape == (3, size)
    np.testing.assert_allclose(jax.vmap(lambda x: hvd.broadcast(x, size - 1))(batch), batch - rank + size - 1)
    swapped = jax.vmap(hvd.alltoall)(jnp.arange(3.0 * size).reshape(3, size) + 100 * rank)
    np.testing.assert_allclose(swapped, [[i * size + rank + 100 * r for r in range(size)] for i in range(3)])
    parts = jax.vmap(lambda x: hvd.reducescatter(x, op=hvd.Sum))(jnp.ones((3, size, 2)))
    np.testing.assert_allclose(parts, np.full((3, 1, 2), size))
    for gradient in both(jax.vmap(jax.grad(lambda x: (hvd.allreduce(x) ** 2).sum()))):
        np.testing.assert_allclose(gradient(batch), 2 * mean)
    with pytest.raises(NotImplementedError, match="op=Adasum"):
        jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))(batch)


def case_forward_mode_and_second_derivatives() -> None:
    size, rank = hvd.size(), hvd.rank()
    mean = np.arange(4.0) + (size - 1) / 2
    direction = jnp.ones(4) * (rank + 1)
    for push in both(lambda x, t: jax.jvp(lambda x: hvd.allreduce(x) ** 2, (x,), (t,))):
        value, tangent = push(own(), direction)
        np.testing.assert_allclose(value, mean**2, rtol=1e-6)
        np.testing.assert_allclose(tangent, 2 * mean * (size + 1) / 2, rtol=1e-6)
    value, linear = jax.linearize(hvd.allreduce, own())
    np.testing.assert_allclose(value, mean)
    np.testing.assert_allclose(linear(direction), np.full(4, (size + 1) / 2))
    for hessian in both(jax.hessian(lambda x: (hvd.allreduce(x) ** 3).sum())):
        np.testing.assert_allclose(hessian(own()), np.diag(6 * mean), rtol=1e-5)
    for jacobian in (jax.jacfwd(hvd.allgather), jax.jacrev(hvd.allreduce)):
        jacobian(own())
    _, tangent = jax.jvp(lambda x: hvd.grouped_allreduce([x, jnp.arange(2)])[0], (own(),), (direction,))
    np.testing.assert_allclose(tangent, np.full(4, (size + 1) / 2))
    with pytest.raises(RuntimeError, match="op=Max has no gradient"):
        jax.jvp(lambda x: hvd.allreduce(x, op=hvd.Max), (own(),), (direction,))

    def step(x, _):
        return hvd.allreduce(x * 2), None

    for gradient in both(jax.grad(lambda x: jax.lax.scan(step, x, None, length=3)[0].sum())):
        np.testing.assert_allclose(gradient(own()), np.full(4, 8.0))
    for gradient in both(jax.grad(jax.checkpoint(lambda x: (jnp.sin(hvd.allreduce(x)) ** 2).sum()))):
        np.testing.assert_allclose(gradient(own()), np.sin(2 * mean), rtol=1e-4, atol=1e-6)


def case_movements() -> None:
    size, rank = hvd.size(), hvd.rank()
    for gather in both(hvd.allgather):
        np.testing.assert_array_equal(gather(own()), np.concatenate([np.arange(4.0) + r for r in range(size)]))
    for send in both(lambda x: hvd.broadcast(x, size - 1)):
        np.testing.assert_array_equal(send(own()), np.arange(4.0) + size - 1)
    for swap in both(hvd.alltoall):
        rows = jnp.arange(2.0 * size) + 100 * rank
        expected = np.concatenate([np.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)])
        np.testing.assert_array_equal(swap(rows), expected)
    for part in both(lambda x: hvd.reducescatter(x, op=hvd.Sum)):
        rows = part(jnp.ones((size + 1, 2)))
        assert rows.shape == (2 if rank == 0 else 1, 2)
        assert (np.asarray(rows) == size).all()
    np.testing.assert_array_equal(jax.jit(hvd.allgather)(jnp.float32(rank)), np.arange(size))


def case_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()
    mean = (size + 1) / 2  # of rank + 1
    cases = [
        (lambda x: hvd.allreduce(x).sum() * (rank + 1), np.full(4, mean)),
        (lambda x: hvd.allreduce(x, op=hvd.Sum).sum() * (rank + 1), np.full(4, mean * size)),
        (lambda x: (hvd.allgather(x) * jnp.arange(4.0 * size)).sum(), np.arange(4.0) + 4 * rank),
        (lambda x: hvd.broadcast(x, 0).sum() * (rank + 1), np.full(4, mean if rank == 0 else 0.0)),
        (lambda x: (hvd.alltoall(jnp.ones(size) * x[0])).sum() * (rank + 1), [mean * size, 0, 0, 0]),
        (lambda x: hvd.reducescatter(jnp.ones(size) * x[0], op=hvd.Sum).sum(), [size * size, 0, 0, 0]),
    ]
    for loss, expected in cases:
        for gradient in both(jax.grad(loss)):
            np.testing.assert_allclose(gradient(own()), expected, rtol=1e-6)


def case_a_gradient_of_floats_beside_integers() -> None:
    def loss(x):
        reduced, whole = hvd.grouped_allreduce([x, jnp.arange(3)], op=hvd.Sum)
        return (reduced * whole[2]).sum()

    for gradient in both(jax.grad(loss)):
        np.testing.assert_allclose(gradient(own()), np.full(4, 2.0 * hvd.size() ** 2))


def case_many_calls_of_one_program_keep_their_order() -> None:
    def many(x):
        return [hvd.allreduce(x * i, op=hvd.Sum) for i in range(30)]

    total = np.sum([np.arange(4.0) + r for r in range(hvd.size())], axis=0)
    compiled = jax.jit(many)
    for _ in range(20):
        for i, result in enumerate(compiled(own())):
            np.testing.assert_allclose(result, i * total, rtol=1e-6)

    def step(x, _):
        return hvd.allreduce(x), None

    result, _ = jax.jit(lambda x: jax.lax.scan(step, x, None, length=5))(own())
    np.testing.assert_allclose(result, total / hvd.size(), rtol=1e-6)


def case_programs_that_are_compiled_ahead_of_time() -> None:
    program = jax.jit(lambda x: hvd.allreduce(x) + 1).lower(own()).compile()
    mean = np.arange(4.0) + (hvd.size() - 1) / 2
    for _ in range(4):
        np.testing.assert_allclose(program(own()), mean + 1)
        np.testing.assert_allclose(jax.jit(hvd.allreduce)(own()), mean)
    plain = jax.jit(lambda x: x + 1).lower(own()).compile()
    for _ in range(3):
        np.testing.assert_allclose(plain(own()), own() + 1)


def case_an_export_is_refused() -> None:
    from jax import export

    with pytest.raises(ValueError, match="cannot save a program with allgather"):
        export.export(jax.jit(lambda x: hvd.allgather(x)))(own())
    np.testing.assert_allclose(export.export(jax.jit(lambda x: x + 1))(own()).call(own()), own() + 1)


def case_programs_end_in_the_order_in_which_they_begin() -> None:
    """A short one does not overtake a long one, though it needs nothing of it."""
    turns = 300 * (hvd.rank() == 0)

    @jax.jit
    def long(x):
        return hvd.allreduce(jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ y), x), name="long")

    short = jax.jit(lambda x: hvd.allreduce(x, name="short", op=hvd.Sum))
    whole = jnp.ones((100, 100))
    for _ in range(10):
        began, result = long(whole), short(own())
        np.testing.assert_allclose(result, np.sum([np.arange(4.0) + r for r in range(hvd.size())], axis=0))
    began.block_until_ready()
    long(whole)
    jax.effects_barrier()  # as at the end of a script


def case_calls_of_one_program_keep_their_order_where_inputs_are_late() -> None:
    def late(x, turns):
        return jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ y), x)

    @jax.jit
    def step(x, turns):
        # Many other kernels, so that XLA has a choice.
        others = [jnp.tanh(x * i) @ x for i in range(10)]
        return [hvd.allreduce(late(x, turns[i]), name=str(i)) for i in range(2)], others

    turns = jnp.array([200, 0] if hvd.rank() == 0 else [0, 200])
    for _ in range(5):
        jax.block_until_ready(step(jnp.full((200, 200), 0.01), turns))


def case_compiled_functions_take_what_others_take() -> None:
    total = np.sum([np.arange(4.0) + r for r in range(hvd.size())], axis=0)

    @partial(jax.jit, static_argnames="twice", donate_argnums=0)
    def step(state, unused, twice=False):
        return {"sum": hvd.allreduce(state["x"], op=hvd.Sum) * (1 + twice), "none": None, "two": (state["x"], 3)}

    for _ in range(3):
        for twice in (False, True):
            result = step({"x": own()}, own(), twice=twice)
            np.testing.assert_allclose(result["sum"], total * (1 + twice))
            np.testing.assert_array_equal(result["two"][0], own())
            assert result["none"] is None
            assert int(result["two"][1]) == 3


def case_process_sets() -> None:
    if hvd.size() < 2:
        return
    first = hvd.add_process_set([0, 1])
    if first.included():
        np.testing.assert_allclose(jax.jit(lambda x: hvd.allreduce(x, process_set=first))(own()), np.arange(4) + 0.5)
    else:
        with pytest.raises(ValueError, match="is not in process set"):
            hvd.allreduce(own(), process_set=first)
    step = jax.jit(lambda x: hvd.allreduce(x, process_set=first)) if first.included() else None
    for _ in range(3 if step else 0):
        np.testing.assert_allclose(step(own()), np.arange(4) + 0.5)
    hvd.remove_process_set(first)
    if step:
        with pytest.raises((RuntimeError, ValueError), match="process set"):
            step(own()).block_until_ready()
    with pytest.raises(TypeError, match="must be a ProcessSet"):
        hvd.allgather(own(), process_set=[0, 1])


def _train(x, y, average, prepare=False) -> dict[str, jax.Array]:
    def loss(weights, x, y):
        return jnp.mean((jnp.tanh(x @ weights["a"]) @ weights["b"] - y) ** 2)

    rng = np.random.default_rng(1)
    weights = {
        "a": jnp.asarray(rng.normal(size=(5, 8)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=8), jnp.float32),
    }
    optimizer = optax.adam(0.05)
    if prepare:
        weights, optimizer = hvd.prepare(jax.tree.map(lambda leaf: leaf + hvd.rank(), weights), optimizer)
        assert hvd.prepare(optimizer) is optimizer
        assert hvd.prepare(optimizer, op=hvd.Average) is optimizer
        with pytest.raises(ValueError, match="distributed with op=AVERAGE before, got SUM"):
            hvd.prepare(optimizer, op=hvd.Sum)
        empty = optax.sgd(0.1).init(weights)  # a state without arrays
        assert hvd.prepare(empty, optimizer) == (empty, optimizer)
    elif average:
        optimizer = hvd.DistributedOptimizer(optimizer)
        weights = hvd.broadcast_parameters(jax.tree.map(lambda leaf: leaf + hvd.rank(), weights), 0)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state):
        updates, state = optimizer.update(jax.grad(loss)(weights, x, y), state, weights)
        return optax.apply_updates(weights, updates), state

    for _ in range(10):
        weights, state = step(weights, state)
    return weights


def case_training_equals_that_of_the_joined_batch() -> None:
    rows = slice(hvd.rank(), None, hvd.size())
    joined = _train(X, Y, average=False)
    for prepare in (False, True):
        own_weights = _train(X[rows], Y[rows], average=True, prepare=prepare)
        every = hvd.allgather_object(jax.tree.map(np.asarray, own_weights))
        for name in joined:
            assert all((other[name] == every[0][name]).all() for other in every)
            np.testing.assert_allclose(own_weights[name], joined[name], rtol=2e-5, atol=2e-6)


def case_snapshots_keep_arrays_functions_and_states_of_optimizers() -> None:
    tree = {"a": own(), "b": jnp.ones((200, 40), jnp.bfloat16), "key": jax.random.key(3), "old": jax.random.PRNGKey(3)}
    tree["weak"] = jnp.asarray(2.0)  # a number's, whose type gives way to others
    optimizer = hvd.DistributedOptimizer(optax.adam(0.1))
    step = jax.jit(lambda tree: hvd.average_gradients(tree["a"] * factor))
    factor = 2.0
    unsorted = {1: own(), "b": "no pytree, as its keys cannot be sorted"}
    again = kept_again(
        {
            "tree": tree,
            "state": optimizer.init({"a": own()}),
            "optimizer": optimizer,
            "step": step,
            "unsorted": unsorted,
        }
    )
    np.testing.assert_array_equal(again["unsorted"][1], own())
    for name in ("a", "b", "old"):
        assert again["tree"][name].dtype == tree[name].dtype
        np.testing.assert_array_equal(np.asarray(again["tree"][name], np.float32), np.asarray(tree[name], np.float32))
    assert (tree["weak"] * tree["b"]).dtype == (again["tree"]["weak"] * tree["b"]).dtype == jnp.bfloat16
    same = [jax.random.normal(one["key"], (3,)) for one in (tree, again["tree"])]
    np.testing.assert_array_equal(*same)
    np.testing.assert_array_equal(again["step"](again["tree"]), step(tree))
    updates, _ = again["optimizer"].update({"a": own()}, again["state"])
    assert updates["a"].shape == (4,)


def trained(folder: Path, seed: int, stop: int = -1, resume: bool = False, **options):
    """Parameters and saved checkpoint after three epochs of four steps, or after ``stop`` steps; and the batches."""
    key = jax.random.key(seed)
    parameters = {"w": jax.random.normal(key, (5,)), "b": jnp.zeros((), jnp.bfloat16)}
    optimizer = hvd.DistributedOptimizer(optax.adam(0.1))

    @jax.jit
    def step(parameters, state, key, x, y):
        key, noise = jax.random.split(key)

        def loss(p):
            return ((x @ p["w"] + p["b"] - y + 0.01 * jax.random.normal(noise, y.shape)) ** 2).mean()

        updates, state = optimizer.update(jax.grad(loss)(parameters), state, parameters)
        return optax.apply_updates(parameters, updates), state, key

    saved = hvd.checkpoint(parameters, optimizer.init(parameters), key, folder=folder, resume=resume, **options)
    parameters, state, key = saved.trees
    used = []
    for epoch in saved.epochs(3):
        for batch in range(saved.batch, 4):
            if saved.steps == stop:
                return parameters, saved, used
            used.append((epoch, batch))
            at = slice(batch * 3, batch * 3 + 3)
            parameters, state, key = step(parameters, state, key, X[at], Y[at])
            saved.step(parameters, state, key)
    return parameters, saved, used


def case_a_training_continues_from_a_checkpoint_as_if_it_had_not_stopped() -> None:
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    whole, _, batches = trained(folder / "whole", 1)
    _, _, first = trained(folder / "cut", 1, stop=7, every="3 steps", keep=1)
    hvd.barrier()
    assert [path.name for path in (folder / "cut").iterdir()] == ["step-00000006.pickle"]
    again, saved, second = trained(folder / "cut", 2, resume=True)
    assert first[:6] + second == batches
    assert (saved.steps, saved.epoch) == (12, 3)
    for name, expected in whole.items():
        assert again[name].dtype == expected.dtype
        np.testing.assert_array_equal(again[name], expected)


def case_the_best_checkpoint_stays() -> None:
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    tree = {"a": jnp.arange(3.0), "count": 0, "host": np.ones(2)}
    saved = hvd.checkpoint(tree, every="2 steps", keep=1, best="val_loss", largest=True, folder=folder)
    for step, value in enumerate([1.0, 3.0, 2.0, 2.0], 1):
        hvd.log(val_loss=value)
        saved.step({"a": tree["a"] * step, "count": step, "host": tree["host"] * step})
    hvd.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002-best.pickle", "step-00000004.pickle"]
    [read] = hvd.checkpoint(tree, folder=folder, resume=True).trees
    assert isinstance(read["a"], jax.Array)
    assert read["count"] == 4
    np.testing.assert_array_equal(read["a"], 4 * np.arange(3.0))
    np.testing.assert_array_equal(read["host"], [4.0, 4.0])
    [again] = kept_again({"saved": saved})["saved"].trees
    np.testing.assert_array_equal(again["a"], read["a"])


def case_a_checkpoint_that_does_not_fit_says_why() -> None:
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    tree = {"a": jnp.arange(3.0)}
    saved = hvd.checkpoint(tree, optax.EmptyState(), every="1 steps", folder=folder)
    with pytest.raises(TypeError, match=r"step takes the 2 trees of checkpoint.* got 1"):
        saved.step(tree)
    saved.step(tree, optax.EmptyState())
    hvd.barrier()
    with pytest.raises(TypeError, match=r"argument 2 is an optimizer, whose state is what optimizer\.init"):
        hvd.checkpoint(tree, optax.adam(0.1))
    with pytest.raises(TypeError, match="takes pytrees of arrays; argument 1 is of class str"):
        hvd.checkpoint("parameters")
    for other, reason in (
        ({"a": jnp.arange(4.0)}, r"has float32 \[3\] where the tree has float32 \[4\]"),
        ({"a": jnp.arange(3)}, r"has float32 \[3\] where the tree has int32 \[3\]"),
        ({"a": jnp.arange(3.0), "b": jnp.ones(1)}, "has 1 arrays of a tree that has 2 now"),
    ):
        with pytest.raises(RingError, match=reason):
            hvd.checkpoint(other, optax.EmptyState(), folder=folder, resume=True)
    if hvd.rank() == 0:
        [file] = folder.iterdir()
        file.rename(file.with_suffix(".pt"))
    hvd.barrier()
    with pytest.raises(RingError, match="was written with another framework"):
        hvd.checkpoint(tree, optax.EmptyState(), folder=folder, resume=True)
    with pytest.raises(AttributeError, match=r"rank 0 alone writes arrays, by orbax or numpy\.savez"):
        _ = hvd.save


def case_prepare_refuses_what_it_cannot_take() -> None:
    with pytest.raises(
        TypeError, match="takes modules of flax, optimizers of optax and pytrees of arrays; argument 2 is str 'adam'"
    ):
        hvd.prepare({"a": own()}, "adam")
    with pytest.raises(TypeError, match="argument 1 is NoneType None"):
        hvd.prepare(None)
    with pytest.raises(TypeError, match="got no argument"):
        hvd.prepare()


def case_a_mismatch_names_both_sides_and_the_job_continues() -> None:
    if hvd.size() < 2:
        return
    with pytest.raises(RuntimeError, match=r"allreduce 'w': expected float32 \[\d\], rank \d sent") as caught:
        jax.jit(lambda x: hvd.allreduce(x, name="w"))(jnp.ones(3 + hvd.rank())).block_until_ready()
    assert isinstance(original(caught.value), hvd.CollectiveMismatch)
    np.testing.assert_array_equal(hvd.allreduce(jnp.ones(2)), np.ones(2))


def case_rows_that_differ_are_a_mismatch_also_where_a_rank_gets_as_many_as_it_expects() -> None:
    """The middle one of three, whose result would have the rows of the others in other places."""
    if hvd.size() < 2:
        return
    rows = jnp.ones(hvd.size() * (hvd.rank() + 1))
    for move in (hvd.allgather, hvd.alltoall):
        for call in both(lambda x, move=move: move(x, name="rows")):
            with pytest.raises(RuntimeError, match="'rows': the ranks have given different numbers of rows") as caught:
                call(rows).block_until_ready()
            assert isinstance(original(caught.value), hvd.CollectiveMismatch)
            assert call(jnp.ones(hvd.size())).shape


def slow(x):
    for _ in range(20):
        x = jnp.tanh(x @ x)  # JAX returns before programs that take long have ended
    return hvd.allreduce(x.sum())


def case_calls_of_the_script_come_after_programs_that_it_has_begun() -> None:
    """Rank 0 waits for each result, as to print it; the others go on at once."""
    compiled = jax.jit(slow)
    x = jnp.full((300, 300), 0.001)
    compiled(x).block_until_ready()

    def with_a_set() -> None:
        assert hvd.remove_process_set(hvd.add_process_set([0]))

    def of_rank_0() -> None:
        with hvd.only(0):
            hvd.barrier()

    def recorded() -> None:
        with tempfile.TemporaryDirectory() as folder:
            hvd.start_timeline(f"{folder}/timeline.json")
            result = compiled(x)
            if hvd.rank() == 0:
                result.block_until_ready()
            hvd.stop_timeline()

    def generation() -> None:
        hvd.shutdown()
        hvd.init()

    followed = (
        lambda: hvd.allgather_object(hvd.rank()),
        lambda: hvd.broadcast_object(hvd.rank()),
        hvd.barrier,
        hvd.join,
        hvd.step,
        recorded,
        with_a_set,
        of_rank_0,
        generation,
    )
    for call in followed:
        result = compiled(x)
        if hvd.rank() == 0:
            result.block_until_ready()
        call()
        assert np.isfinite(result)


def case_calls_of_the_script_within_a_program_do_not_wait_for_it() -> None:
    """In a function while JAX traces it, and in a callback."""
    gathered = []

    def watched(x):
        gathered.append(hvd.allgather_object("traced"))
        jax.debug.callback(lambda: gathered.append(hvd.allgather_object("called")))
        return slow(x)

    for _ in range(2):
        jax.jit(watched)(jnp.full((300, 300), 0.001)).block_until_ready()
        jax.effects_barrier()
    assert ["called"] * hvd.size() in gathered
    assert ["traced"] * hvd.size() in gathered


def case_after_a_program_that_failed_in_the_background_the_next_works() -> None:
    if hvd.size() < 2:
        return

    def large(x):
        for _ in range(8):
            x = jnp.tanh(x @ x)  # JAX returns before programs that take long have ended
        return hvd.allreduce(x[: 3 + hvd.rank()], name="w")

    failed = jax.jit(large)(jnp.ones((256, 256)))
    with pytest.raises(RuntimeError, match="allreduce 'w': expected"):
        failed.block_until_ready()
    for call in both(hvd.allreduce):
        np.testing.assert_array_equal(call(jnp.ones(2)), np.ones(2))


def case_a_rank_that_fails_ends_the_operations_of_the_others() -> None:
    if hvd.size() < 2:
        return
    from ring_notebook.core import world

    if hvd.rank() == 0:
        world.fail(OSError("no more data"))
        return
    # Where it has called the program before, JAX makes ValueError of it.
    with pytest.raises((RuntimeError, ValueError), match="rank 0 raised OSError: no more data"):
        jax.jit(hvd.allreduce)(jnp.ones(2)).block_until_ready()
