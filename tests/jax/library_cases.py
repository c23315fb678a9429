"""What ranks do with libraries over JAX; see harness/case_jobs.py. True for any number of ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import equinox
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import jax
import ring_notebook.jax as hvd

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 5)).astype(np.float32)
Y = np.sin(X.sum(axis=1, keepdims=True))


def own_rows():
    """Those of this rank."""
    return X[hvd.rank() :: hvd.size()], Y[hvd.rank() :: hvd.size()]


def equal_on_all_ranks(tree) -> None:
    """Arrays that differ by nothing."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")]
    leaves = [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in leaves
    ]
    for other in hvd.allgather_object(leaves):
        for mine, theirs in zip(leaves, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def case_equinox() -> None:
    def loss(model, x, y):
        return ((jax.vmap(model)(x) - y) ** 2).mean()

    model = equinox.nn.MLP(5, 1, 8, 2, key=jax.random.key(hvd.rank()))
    model, optimizer = hvd.prepare(model, optax.adam(0.01))
    equal_on_all_ranks(equinox.filter(model, equinox.is_array))
    assert model.activation is not None
    state = optimizer.init(equinox.filter(model, equinox.is_array))

    @equinox.filter_jit
    def step(model, state, x, y):
        gradients = equinox.filter_grad(loss)(model, x, y)
        updates, state = optimizer.update(gradients, state, model)
        return equinox.apply_updates(model, updates), state

    whole = model
    for _ in range(3):
        model, state = step(model, state, *own_rows())
    equal_on_all_ranks(equinox.filter(model, equinox.is_array))
    plain = optax.adam(0.01)
    state = plain.init(equinox.filter(whole, equinox.is_array))
    for _ in range(3):
        updates, state = plain.update(equinox.filter_grad(loss)(whole, X, Y), state, whole)
        whole = equinox.apply_updates(whole, updates)
    for mine, joined in zip(jax.tree.leaves(model), jax.tree.leaves(whole), strict=True):
        if hasattr(mine, "shape"):
            np.testing.assert_allclose(mine, joined, rtol=1e-3, atol=1e-5)
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    saved = hvd.checkpoint(model, every="1 steps", folder=folder)
    saved.step(model)
    hvd.barrier()
    [again] = hvd.checkpoint(whole, folder=folder, resume=True).trees
    np.testing.assert_array_equal(again.layers[0].weight, model.layers[0].weight)
    assert again.activation is not None


class _WithState(equinox.Module):
    linear: equinox.nn.Linear
    norm: equinox.nn.BatchNorm
    dropout: equinox.nn.Dropout

    def __init__(self, key):
        self.linear = equinox.nn.Linear(5, 3, key=key)
        self.norm = equinox.nn.BatchNorm(3, "batch", mode="batch")
        self.dropout = equinox.nn.Dropout(0.1)

    def __call__(self, x, state, key):
        x, state = self.norm(self.linear(x), state)
        return self.dropout(x, key=key).sum(), state


def case_equinox_with_states_and_numbers() -> None:
    """Numbers that Equinox asks for while it traces."""
    key = jax.random.key(hvd.rank())
    model, state = hvd.prepare(*equinox.nn.make_with_state(_WithState)(key))
    assert (model.dropout.p, model.dropout.inference) == (0.1, False)

    @equinox.filter_jit
    def step(model, state, x):
        def loss(model, state):
            mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
            found, state = mapped(x, state, key)
            return (found**2).mean(), state

        gradients, state = equinox.filter_grad(loss, has_aux=True)(model, state)
        gradients = hvd.average_gradients(gradients)
        return equinox.apply_updates(model, jax.tree.map(lambda one: -0.1 * one, gradients)), state

    for _ in range(2):
        model, state = step(model, state, own_rows()[0])
    equal_on_all_ranks(equinox.filter(model, equinox.is_array))


class _Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.relu(linen.Dense(8)(x)))


def case_flax_linen() -> None:
    module = _Linen()
    assert hvd.prepare(module) is module
    parameters = module.init(jax.random.key(hvd.rank()), X)["params"]
    state = TrainState.create(apply_fn=module.apply, params=parameters, tx=optax.sgd(0.1))
    state = hvd.prepare(state)
    equal_on_all_ranks(state.params)

    @jax.jit
    def step(state, x, y):
        def loss(parameters):
            return ((state.apply_fn({"params": parameters}, x) - y) ** 2).mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(3):
        state = step(state, *own_rows())
    equal_on_all_ranks(state.params)


class _Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(5, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))


def case_flax_nnx_with_random_numbers() -> None:
    model = _Nnx(nnx.Rngs(hvd.rank()))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    assert hvd.prepare(model, optimizer) == (model, optimizer)
    state = nnx.state(model)
    keys = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    assert keys  # of the dropout
    equal_on_all_ranks(keys)
    equal_on_all_ranks(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer, x, y):
        gradients = nnx.grad(lambda model: ((model(x) - y) ** 2).mean())(model)
        optimizer.update(model, gradients)

    for _ in range(3):
        step(model, optimizer, *own_rows())
    equal_on_all_ranks(nnx.state(model, nnx.Param))
    rngs, metrics = nnx.Rngs(hvd.rank()), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    metrics.update(loss=jnp.float32(hvd.rank()))
    assert hvd.prepare(rngs, model, metrics) == (rngs, model, metrics)
    equal_on_all_ranks(nnx.state(rngs))
    equal_on_all_ranks(nnx.state(metrics))
    sent = hvd.broadcast_parameters(nnx.state(model))
    assert jax.tree.structure(sent) == jax.tree.structure(nnx.state(model))


def case_states_of_optax() -> None:
    parameters = {"w": jnp.ones((3, 2)) * hvd.rank(), "b": jnp.zeros(2)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2))
    state = hvd.prepare(optimizer.init(parameters))
    equal_on_all_ranks(state)
    masked = optax.masked(optax.sgd(0.1, momentum=0.9), {"w": True, "b": False})
    equal_on_all_ranks(hvd.prepare(masked.init(parameters)))
    many = optax.MultiSteps(optax.adam(0.1), 2)
    equal_on_all_ranks(hvd.prepare(many.init(parameters)))
    accumulating = hvd.DistributedOptimizer(optax.MultiSteps(optax.sgd(0.1), 2))
    state = accumulating.init(parameters)
    gradient = jax.tree.map(jnp.ones_like, parameters)
    for _ in range(2):
        updates, state = jax.jit(accumulating.update)(gradient, state, parameters)
    np.testing.assert_allclose(updates["b"], [-0.1, -0.1])


def case_a_distributed_optimizer_of_optax_is_of_its_type() -> None:
    """`optax.chain` asks for it, and passes values of the loss only to optimizers that take them."""
    for plain in (optax.contrib.reduce_on_plateau(patience=1), optax.lbfgs(), optax.sgd(0.1)):
        distributed = hvd.prepare(plain)
        assert hvd.prepare(distributed) is distributed
        for kind in (optax.GradientTransformation, optax.GradientTransformationExtraArgs):
            assert isinstance(distributed, kind) == isinstance(plain, kind)
    chained = optax.chain(hvd.DistributedOptimizer(optax.contrib.reduce_on_plateau()), optax.sgd(0.1))
    parameters = {"w": jnp.ones(3)}
    gradients = {"w": jnp.full(3, 1.0 + hvd.rank())}
    updates, _ = chained.update(gradients, chained.init(parameters), parameters, value=1.0)
    np.testing.assert_allclose(updates["w"], np.full(3, -0.1 * (hvd.size() + 1) / 2), rtol=1e-6)


def case_what_an_optimizer_decides_by_the_loss_is_the_same_on_all_ranks() -> None:
    """By its value, its gradient, or functions that compute them: as in one process with the whole batch."""

    def loss(parameters, x, y):
        return ((jnp.tanh(x @ parameters["w"]) + parameters["b"] - y) ** 2).mean()

    line_search = ("value", "grad", "value_fn")
    optimizers = {
        optax.chain(optax.sgd(0.3), optax.contrib.reduce_on_plateau(patience=1, rtol=0.2)): ("value",),
        optax.polyak_sgd(max_learning_rate=1.0): ("value",),
        optax.lbfgs(memory_size=3): line_search,
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)): line_search,
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True): ("grad_fn",),
    }

    def trained(optimizer, names, x, y):
        @jax.jit
        def step(parameters, state):
            value, gradient = jax.value_and_grad(loss)(parameters, x, y)
            beside = {
                "value": value,
                "grad": gradient,
                "value_fn": lambda parameters: loss(parameters, x, y),
                "grad_fn": lambda parameters, _: jax.grad(loss)(parameters, x, y),
            }
            beside = {name: beside[name] for name in names}
            updates, state = optimizer.update(gradient, state, parameters, **beside)
            return optax.apply_updates(parameters, updates), state

        parameters = {"w": jnp.ones((5, 1)) / 5, "b": jnp.zeros(1)}
        state = optimizer.init(parameters)
        for _ in range(5):
            parameters, state = step(parameters, state)
        return parameters

    for optimizer, names in optimizers.items():
        whole = trained(optimizer, names, X, Y)
        parts = trained(hvd.DistributedOptimizer(optimizer), names, *own_rows())
        equal_on_all_ranks(parts)
        for one, other in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4, err_msg=str(names))
        if names == line_search:  # what it keeps in its state is a sum already
            with pytest.raises(ValueError, match="takes op=Average"):
                trained(hvd.DistributedOptimizer(optimizer, op=hvd.Sum), names, *own_rows())
