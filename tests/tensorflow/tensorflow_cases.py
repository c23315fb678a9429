"""What ranks do with TensorFlow; see harness/case_jobs.py. True for any number of ranks."""

from __future__ import annotations

import importlib
import inspect
import pickle
import random
import sys
import warnings

import numpy as np
import pytest

import ring_notebook.tensorflow as hvd
import tensorflow as tf
from ring_notebook.api.foreign_calls import original
from ring_notebook.horovod.as_horovod import as_horovod
from ring_notebook.tensorflow import graph_call

tf1 = tf.compat.v1
RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 5)).astype(np.float32)
Y = np.sin(X.sum(axis=1, keepdims=True))


def own() -> tf.Tensor:
    return tf.range(4.0) + hvd.rank()


def every() -> list[np.ndarray]:
    return [np.arange(4.0) + rank for rank in range(hvd.size())]


def both(function):
    """The function as it is and as a graph."""
    return function, tf.function(function, autograph=False)


def case_torch_is_not_loaded() -> None:
    assert "torch" not in sys.modules


def case_reductions() -> None:
    expected = {
        hvd.Average: np.mean(every(), axis=0),
        hvd.Sum: np.sum(every(), axis=0),
        hvd.Min: every()[0],
        hvd.Max: every()[-1],
        hvd.Product: np.prod(every(), axis=0),
    }
    for op, result in expected.items():
        for call in both(lambda x, op=op: hvd.allreduce(x, op=op)):
            np.testing.assert_allclose(call(own()), result, rtol=1e-6)
    np.testing.assert_allclose(
        hvd.allreduce(own(), op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), 6 * np.sum(every(), axis=0)
    )
    np.testing.assert_allclose(hvd.allreduce(own(), average=False), np.sum(every(), axis=0))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        assert hvd.allreduce(own(), compression=compression).dtype == tf.float32
        np.testing.assert_allclose(hvd.allreduce(own(), compression=compression), np.mean(every(), axis=0))
    for call in both(lambda: hvd.grouped_allreduce([own(), tf.cast(own(), tf.int64)], op=hvd.Sum)):
        dense, whole = call()
        np.testing.assert_allclose(dense, whole)
        assert whole.dtype == tf.int64


def case_dtypes() -> None:
    unsigned = (tf.uint8, tf.uint16, tf.uint32, tf.uint64)
    for dtype in (*unsigned, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64):
        result = hvd.allreduce(tf.ones(3, dtype) * 2)
        assert result.dtype == dtype
        assert (tf.cast(result, tf.float32).numpy() == 2).all()
    for move in (lambda x: hvd.broadcast(x, 0), hvd.allgather):
        assert move(tf.ones(3, tf.uint16)).numpy()[:3].tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="complex64"):
        hvd.allreduce(tf.ones(2, tf.complex64))


def case_helpers_of_horovods_tests() -> None:
    """Those of ``horovod.tensorflow.util``, with Horovod's names."""
    with as_horovod():
        util = importlib.import_module("horovod.tensorflow.util")
        horovod = importlib.import_module("horovod.tensorflow")
    assert horovod.util is util
    assert horovod._executing_eagerly is util._executing_eagerly
    assert util._executing_eagerly()
    with tf.Graph().as_default():
        assert not util._executing_eagerly()
    assert int(util._make_subgraph(lambda x: x + 1)(1)) == 2
    calls = []
    remember = util._cache(lambda x: calls.append(x) or len(calls))
    assert [remember(3), remember(3), remember(4)] == [1, 1, 2]
    variables = [tf.Variable(1.0), [tf.Variable(2.0)]]
    assert {util.vars_to_refs(variables): "a key"}
    again = util.refs_to_vars(util.vars_to_refs(variables))
    assert again[0] is variables[0]
    assert again[1][0] is variables[1][0]


def case_indexed_slices() -> None:
    def row(op=hvd.Average):
        return hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), tf.constant([hvd.rank()]), tf.constant([4, 2])), op=op)

    for call in both(row):
        expected = np.zeros((4, 2))
        expected[: hvd.size()] = 1 / hvd.size()
        np.testing.assert_allclose(tf.convert_to_tensor(call()), expected)
    with pytest.raises(NotImplementedError, match="Average or Sum"):
        row(hvd.Max)


def case_averages_of_integer_slices_are_floats() -> None:
    """As in Horovod, whose division is that of Python."""
    for dtype, wide in (
        (tf.uint8, tf.float32),
        (tf.uint16, tf.float32),
        (tf.int32, tf.float64),
        (tf.int64, tf.float64),
    ):
        slices = tf.IndexedSlices(tf.constant([[1]], dtype), tf.constant([hvd.rank()]))
        for call in both(lambda slices=slices: hvd.allreduce(slices, op=hvd.Average).values):
            assert call().dtype == wide
            np.testing.assert_allclose(call(), np.full((hvd.size(), 1), 1 / hvd.size()), rtol=1e-6)
        total = hvd.allreduce(slices, op=hvd.Sum)
        assert total.values.dtype == dtype
        assert total.values.numpy().tolist() == [[1]] * hvd.size()


def case_movements() -> None:
    size, rank = hvd.size(), hvd.rank()
    for gather in both(lambda: hvd.allgather(tf.fill((rank + 1, 2), float(rank)))):
        expected = np.concatenate([np.full((r + 1, 2), r) for r in range(size)])
        np.testing.assert_array_equal(gather(), expected)
    for gather in both(lambda: hvd.grouped_allgather([own(), tf.constant(rank)])):
        rows, numbers = gather()
        np.testing.assert_array_equal(rows, np.concatenate(every()))
        np.testing.assert_array_equal(numbers, np.arange(size))
    for send in both(lambda: hvd.broadcast(own(), size - 1)):
        np.testing.assert_array_equal(send(), every()[-1])
    for swap in both(lambda: hvd.alltoall(tf.range(2 * size) + 100 * rank)):
        expected = np.concatenate([np.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)])
        np.testing.assert_array_equal(swap(), expected)
    splits = [1] * (size - 1) + [3]
    for swap in both(lambda: hvd.alltoall(tf.range(size + 2) + 100 * rank, splits)):
        rows, received = swap()
        assert received.numpy().tolist() == [splits[rank]] * size
        assert rows.shape[0] == splits[rank] * size
    for part in both(lambda: hvd.reducescatter(tf.ones((size + 1, 2)), op=hvd.Sum)):
        assert part().numpy().tolist() == [[size, size]] * (2 if rank == 0 else 1)
    assert [len(rows) for rows in hvd.grouped_reducescatter([tf.ones(size), tf.ones(2 * size)])] == [1, 2]
    with pytest.raises(TypeError, match="must be a ProcessSet"):
        hvd.alltoall(tf.range(size), process_set=[0])
    if rank == 0:
        with pytest.raises(Exception, match="splits must be"):
            hvd.alltoall(tf.range(size), [1] * (size + 1))


def case_numbers_and_join() -> None:
    for call in both(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]):
        assert [int(one) for one in call()] == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    assert int(hvd.process_set_included_op()) == 1
    for _ in range(hvd.rank()):
        hvd.allreduce(own())
    assert hvd.join() == hvd.size() - 1


def case_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()
    mean = (size + 1) / 2  # of rank + 1
    cases = [
        (lambda x: hvd.allreduce(x) * (rank + 1), np.full(4, mean)),
        (lambda x: hvd.allreduce(x, op=hvd.Sum) * (rank + 1), np.full(4, mean * size)),
        (lambda x: hvd.allgather(x) * tf.range(4.0 * size), np.arange(4.0) + 4 * rank),
        (lambda x: hvd.broadcast(x, 0) * (rank + 1), np.full(4, mean if rank == 0 else 0.0)),
        (lambda x: hvd.alltoall(tf.ones(size) * x[0]) * (rank + 1), [mean * size, 0, 0, 0]),
        (lambda x: hvd.alltoall(tf.ones(size) * x[0], [1] * size)[0] * (rank + 1), [mean * size, 0, 0, 0]),
        (lambda x: hvd.reducescatter(tf.ones(size) * x[0], op=hvd.Sum), [size * size, 0, 0, 0]),
    ]
    for function, expected in cases:

        def gradient(x, function=function):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x))
            return tape.gradient(loss, x)

        for call in both(gradient):
            np.testing.assert_allclose(call(own()), expected, rtol=1e-6)


def case_a_compiled_collective_says_what_to_do() -> None:
    @tf.function(jit_compile=True, autograph=False)
    def compiled(tensor):
        return 2 * hvd.allreduce(tensor)

    def in_a_session():
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(compiled(own()))

    for call in (*both(lambda: compiled(own())), in_a_session):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"such as 'allreduce.* Keras jit_compile"):
            call()
    doubled = tf.function(lambda tensor: 2 * tensor, jit_compile=True, autograph=False)
    np.testing.assert_allclose(hvd.allreduce(doubled(own()), op=hvd.Sum), 2 * np.sum(every(), axis=0))


def case_process_sets() -> None:
    if hvd.size() < 2:
        return
    first = hvd.add_process_set([0, 1])
    number = first.process_set_id
    assert int(hvd.process_set_included_op(number)) == int(first.included())
    if first.included():
        for call in both(lambda: hvd.allreduce(own(), process_set=first)):
            np.testing.assert_allclose(call(), np.arange(4) + 0.5)
        assert int(hvd.size_op(number)) == 2
    else:
        for kind in (ValueError, tf.errors.InvalidArgumentError):
            for call in both(lambda: hvd.allreduce(own(), process_set=first)):
                with pytest.raises(kind, match="is not in process set"):
                    call()
    for kind in (ValueError, tf.errors.InvalidArgumentError):
        with pytest.raises(kind, match="is not in process set") as caught:
            hvd.broadcast(own(), hvd.size(), process_set=first)
    assert type(pickle.loads(pickle.dumps(caught.value))) is ValueError


def case_variables_and_objects() -> None:
    variables = [tf.Variable(own()), tf.Variable(hvd.rank(), dtype=tf.int64)]
    hvd.broadcast_variables(variables, hvd.size() - 1)
    np.testing.assert_array_equal(variables[0], every()[-1])
    assert int(hvd.broadcast_([variables[1].assign_add(hvd.rank()) and variables[1]], 0)[0]) == hvd.size() - 1
    assert hvd.broadcast_object({"rank": hvd.rank()}, 0, session=None) == {"rank": 0}
    assert hvd.broadcast_object_fn(0)(hvd.rank()) == 0
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def _train(x, y, distribute, graph=True) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    weights = [
        tf.Variable(rng.normal(size=shape).astype(np.float32) + (hvd.rank() if distribute else 0))
        for shape in ((5, 8), (8, 1))
    ]
    if distribute:
        hvd.broadcast_variables(weights, 0)
    velocity = [tf.Variable(tf.zeros_like(weight)) for weight in weights]

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ weights[0]) @ weights[1] - y) ** 2)
        tape = hvd.DistributedGradientTape(tape) if distribute else tape
        for weight, speed, gradient in zip(weights, velocity, tape.gradient(loss, weights), strict=True):
            speed.assign(0.9 * speed - 0.05 * gradient)
            weight.assign_add(speed)

    run = tf.function(step, autograph=False) if graph else step
    for _ in range(10):
        run()
    return [weight.numpy() for weight in weights]


def case_a_tape_trains_as_one_process_with_the_joined_batch() -> None:
    rows = slice(hvd.rank(), None, hvd.size())
    joined = _train(X, Y, distribute=False)
    for graph in (True, False):
        weights = _train(X[rows], Y[rows], distribute=True, graph=graph)
        for other in hvd.allgather_object(weights):
            assert all((a == b).all() for a, b in zip(other, weights, strict=True))
        for ours, theirs in zip(weights, joined, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def case_tapes_with_options() -> None:
    a, b, layer = tf.Variable(2.0), tf.Variable([1.0, 2.0]), tf.keras.layers.Dense(1)
    layer.build((None, 2))
    table = tf.Variable(tf.ones((4, 2)))
    factor = float(hvd.rank() + 1)
    mean = (hvd.size() + 1) / 2

    def gradients(wrap):
        with tf.GradientTape() as tape:
            looked_up = tf.gather(table, [hvd.rank()])
            loss = factor * (a + tf.reduce_sum(b) + tf.reduce_sum(looked_up))
        return wrap(tape).gradient(loss, [a, {"b": b}, table])

    for options in (
        {},
        {"groups": 2},
        {"num_groups": 1},
        {"groups": [[a], [b]]},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"sparse_as_dense": True},
    ):
        first, second, sparse = gradients(lambda tape, options=options: hvd.DistributedGradientTape(tape, **options))
        np.testing.assert_allclose(first, mean)
        np.testing.assert_allclose(second["b"], [mean, mean])
        assert isinstance(sparse, tf.Tensor) == ("sparse_as_dense" in options) or hvd.size() == 1
        expected = np.zeros((4, 2))
        expected[: hvd.size()] = (np.arange(hvd.size()) + 1)[:, None] / hvd.size()
        np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected)

    for scaled in (True, False):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(layer(tf.ones((1, 2))) * b)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=scaled)
        local, shared = tape.gradient(loss, [layer.bias, b])
        np.testing.assert_allclose(local, [3 * factor / (hvd.size() if scaled else 1)], rtol=1e-6)
        assert len({tuple(other) for other in hvd.allgather_object(shared.numpy())}) == 1


def case_local_and_global_gradients_apart() -> None:
    """As in Horovod: pairs of variable and gradient, the local ones divided by the number of ranks."""
    layer, b = tf.keras.layers.Dense(1, use_bias=False), tf.Variable(1.0)
    layer.build((None, 2))
    factor = float(hvd.rank() + 1)

    def apart():
        with tf.GradientTape() as tape:
            loss = factor * (tf.reduce_sum(layer.kernel) + b)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=[layer])
        local, shared = tape.get_local_and_global_gradients(loss, [b, layer.kernel])
        assert local[0][0] is layer.kernel
        assert shared[0][0] is b
        return [gradient for _, gradient in (*local, *shared)]

    for call in both(apart):
        local, shared = call()
        np.testing.assert_allclose(local, np.full((2, 1), factor / hvd.size()), rtol=1e-6)
        np.testing.assert_allclose(shared, (hvd.size() + 1) / 2)


def case_forty_ops_of_a_graph_run_in_any_order() -> None:
    with tf.Graph().as_default(), tf1.Session() as session:
        ops = [hvd.allreduce(tf.constant([float(i), hvd.rank()]), op=hvd.Sum, name="op") for i in range(40)]
        order = list(range(40))
        for turn in range(5):
            random.Random(hvd.rank() + 10 * turn).shuffle(order)
            results = session.run([ops[i] for i in order])
            for i, result in zip(order, results, strict=True):
                assert result.tolist() == [i * hvd.size(), sum(range(hvd.size()))]


def case_loops_and_functions_of_a_graph_run_in_any_order() -> None:
    size = hvd.size()

    def summed(x):
        return hvd.allreduce(x, op=hvd.Sum)

    def added(i, total):
        number = tf.cast(i, tf.float32)
        row = tf.while_loop(
            lambda j, _: j < 3, lambda j, row: (j + 1, row + summed(number + tf.cast(j, tf.float32))), [0, 0.0]
        )[1]
        return i + 1, total + summed(number) * (number + 1) + row * number

    expected = size * sum(i * (i + 1) + (3 * i + 3) * i for i in range(25))
    function = tf.function(lambda x: summed(x) + 2 * summed(3 * x), autograph=False)
    control_flow = (tf1.enable_control_flow_v2, tf1.disable_control_flow_v2)
    for choose in control_flow[::-1]:
        choose()
        with tf.Graph().as_default(), tf1.Session() as session:
            looped = tf.while_loop(lambda i, _: i < 25, added, [0, 0.0], parallel_iterations=25)[1]
            mapped = tf.map_fn(summed, tf.range(20.0), parallel_iterations=20)
            called = [function(tf.constant(float(i))) for i in range(10)]
            chosen = tf1.cond(tf.constant(True), lambda: summed(1.0), lambda: tf.constant(0.0))
            for _ in range(3):
                results = session.run([looped, mapped, *called, chosen])
                assert results[0] == expected
                assert results[1].tolist() == [size * i for i in range(20)]
                assert results[2:] == [*(7.0 * size * i for i in range(10)), size]
    assert function(tf.constant(1.0)) == 7 * size


def _session_train(x, y, distribute) -> list[np.ndarray]:
    with tf.Graph().as_default():
        tf1.set_random_seed(3 + (hvd.rank() if distribute else 0))
        inputs, targets = tf.constant(x), tf.constant(y)
        weights = [
            tf1.get_variable(name, shape, initializer=tf1.random_normal_initializer(), use_resource=True)
            for name, shape in (("a", (5, 8)), ("b", (8, 1)))
        ]
        loss = tf.reduce_mean((tf.tanh(inputs @ weights[0]) @ weights[1] - targets) ** 2)
        steps = tf1.train.get_or_create_global_step()
        optimizer = tf1.train.AdamOptimizer(0.05)
        if distribute:
            optimizer = hvd.DistributedOptimizer(optimizer)
        train = optimizer.minimize(loss, global_step=steps)
        hooks = [tf1.train.StopAtStepHook(last_step=10)]
        if distribute:
            hooks.append(hvd.BroadcastGlobalVariablesHook(0))
        with tf1.train.MonitoredTrainingSession(hooks=hooks) as session:
            while not session.should_stop():
                values = session.run([train, *weights])[1:]
        return values


def case_a_monitored_session_trains_as_one_process_with_the_joined_batch() -> None:
    rows = slice(hvd.rank(), None, hvd.size())
    weights = _session_train(X[rows], Y[rows], distribute=True)
    for other in hvd.allgather_object(weights):
        assert all((a == b).all() for a, b in zip(other, weights, strict=True))
    for ours, theirs in zip(weights, _session_train(X, Y, distribute=False), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def case_global_variables_and_gradients_of_a_graph() -> None:
    with tf.Graph().as_default():
        variable = tf1.get_variable("v", initializer=float(hvd.rank()))
        op = hvd.broadcast_global_variables(hvd.size() - 1)
        [gradient] = tf.gradients(hvd.allreduce(variable * 2.0), [variable])
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(op)
            assert session.run([variable, gradient]) == [hvd.size() - 1, 2.0]
    with pytest.raises(ValueError, match="needs a graph"):
        hvd.DistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2)


# In Horovod's order, as far as a script passes them by position.
ARGUMENTS = {
    "allreduce": "tensor average device_dense device_sparse compression op prescale_factor postscale_factor name "
    "process_set ignore_name_scope",
    "grouped_allreduce": "tensors average device_dense device_sparse compression op prescale_factor postscale_factor "
    "process_set ignore_name_scope name",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    "grouped_reducescatter": "tensors device_dense compression op process_set prescale_factor postscale_factor",
    "size_op": "process_set_id name",
    "process_set_included_op": "process_set_id name",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_object": "obj root_rank session name process_set",
    "broadcast_object_fn": "root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "DistributedGradientTape": "gradtape device_dense device_sparse compression sparse_as_dense op "
    "gradient_predivide_factor num_groups groups process_set scale_local_gradients",
    "DistributedOptimizer": "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
    "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups groups process_set "
    "scale_local_gradients",
    "BroadcastGlobalVariablesHook": "root_rank device",
}


def case_arguments_come_in_the_order_of_horovod() -> None:
    for name, expected in ARGUMENTS.items():
        names = list(inspect.signature(getattr(hvd, name)).parameters)
        assert names[: len(expected.split())] == expected.split(), name


def case_arguments_that_no_reduction_can_have() -> None:
    make = [
        hvd.DistributedGradientTape,
        lambda _, **options: hvd.DistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1), **options),
        lambda _, **options: hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), **options),
    ]
    for wrap in make:
        tape = tf.GradientTape()
        with pytest.raises(ValueError, match="gradient_predivide_factor is part of an average"):
            wrap(tape, gradient_predivide_factor=2.0, op=hvd.Sum)
        with pytest.raises(ValueError, match="groups must be"):
            wrap(tape, groups=-1)
        with pytest.raises(TypeError, match="must be a ProcessSet"):
            wrap(tape, process_set=[0])
    with pytest.raises(ValueError, match="local_layers must be layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["dense"])
    with pytest.raises(TypeError, match="takes an optimizer of Keras"):
        hvd.DistributedOptimizer("adam")


def case_tapes_that_record_or_persist() -> None:
    x, mean = tf.Variable(3.0), (hvd.size() + 1) / 2
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:  # wrapped before it records
        loss = (hvd.rank() + 1) * x
    assert float(tape.gradient(loss, x)) == mean
    with tf.GradientTape(persistent=True) as tape:
        loss = (hvd.rank() + 1) * x
    wrapped = hvd.DistributedGradientTape(tape)
    unused = tf.Variable(1.0)
    for _ in range(2):
        gradient, nothing = wrapped.gradient(loss, [x, unused], use_generic_names=True)
        assert (float(gradient), nothing) == (mean, None)
    wrapped.register_local_source(x)
    np.testing.assert_allclose(wrapped.gradient(loss, [x])[0], (hvd.rank() + 1) / hvd.size())


def case_ranks_outside_of_a_process_set_step_alone() -> None:
    if hvd.size() < 2:
        return
    first = hvd.add_process_set([0])
    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        loss = (hvd.rank() + 1) * x
    assert float(hvd.DistributedGradientTape(tape, process_set=first).gradient(loss, x)) == hvd.rank() + 1
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.get_variable("x", initializer=0.0)
        optimizer = hvd.DistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0), process_set=first)
        step = optimizer.minimize(-(hvd.rank() + 1.0) * x)
        session.run(tf1.global_variables_initializer())
        session.run(step)
        assert session.run(x) == hvd.rank() + 1


def case_gradients_of_groups_and_slices() -> None:
    size, rank = hvd.size(), hvd.rank()
    x = own()
    with tf.GradientTape() as tape:
        tape.watch(x)
        reduced = hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)
        gathered = hvd.grouped_allgather([x, x])
        scattered = hvd.grouped_reducescatter([tf.repeat(x[:1], size), tf.repeat(x[1:2], size)], op=hvd.Sum)
        loss = sum(tf.reduce_sum(one) for one in (*reduced, *gathered, *scattered))
    expected = np.array([size * size, size * size, 0, 0]) + 3.0 * size + 2.0
    np.testing.assert_allclose(tape.gradient(loss, x), expected)
    table = tf.Variable(tf.ones((4, 2)))
    with tf.GradientTape() as tape:
        rows = tf.IndexedSlices(tf.gather(table, [rank]), [rank], [4, 2])
        loss = tf.reduce_sum(hvd.allreduce(rows, op=hvd.Sum).values)
    found = tf.convert_to_tensor(tape.gradient(loss, table)).numpy()
    assert found[rank].tolist() == [1.0, 1.0]


def case_an_optimizer_of_a_session_adds_up_passes() -> None:
    size, rank = hvd.size(), hvd.rank()
    for average in (False, True):
        with tf.Graph().as_default():
            x = tf1.get_variable("x", initializer=[0.0, 0.0], use_resource=True)
            unused = tf1.get_variable("unused", initializer=1.0, use_resource=True)
            local = tf1.get_variable("local", initializer=0.0, use_resource=True)
            batch = tf1.placeholder(tf.float32, [])
            optimizer = hvd.DistributedOptimizer(
                tf1.train.MomentumOptimizer(1.0, 0.0),
                backward_passes_per_step=3,
                average_aggregated_gradients=average,
                compression=hvd.Compression.fp16,
            )
            optimizer.register_local_var(local)
            steps = tf1.train.get_or_create_global_step()
            pairs = optimizer.compute_gradients(-batch * (tf.reduce_sum(x) + local), [x, unused, local])
            assert pairs[1][0] is None
            train = optimizer.apply_gradients(pairs, global_step=steps)
            assert optimizer.get_slot_names() == ["momentum"]
            assert optimizer.get_slot(x, "momentum") is not None
            assert len(optimizer.variables()) == 2  # of this graph
            seen = []
            with tf1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
                for number in range(6):
                    session.run(train, {batch: number + 10.0 * rank})
                    values, alone, count = session.run([x, local, steps])
                    seen.append([float(values[0]), float(alone), float(count)])
        mean = 10 * (size - 1) / 2
        divisor = 3 if average else 1
        shared = [(3 + 3 * mean) / divisor, (15 + 6 * mean) / divisor]
        alone = [(3 + 30 * rank) / divisor / size, (15 + 60 * rank) / divisor / size]
        expected = [[0, 0, 1], [0, 0, 2], [shared[0], alone[0], 3]]
        expected += [[shared[0], alone[0], 4], [shared[0], alone[0], 5], [shared[1], alone[1], 6]]
        np.testing.assert_allclose(seen, expected, rtol=1e-6)


def case_an_optimizer_of_a_session_takes_slices_and_adasum() -> None:
    for options in ({"sparse_as_dense": True}, {}, {"groups": 1}):
        with tf.Graph().as_default(), tf1.Session() as session:
            table = tf1.get_variable("table", initializer=np.zeros((4, 1), np.float32), use_resource=True)
            optimizer = hvd.DistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0), **options)
            step = optimizer.minimize(-tf.reduce_sum(tf.gather(table, [hvd.rank(), 3])))
            session.run(tf1.global_variables_initializer())
            session.run(step)
            expected = [float(row < hvd.size()) / hvd.size() for row in range(3)] + [1.0]
            np.testing.assert_allclose(session.run(table)[:, 0], expected)
    if hvd.size() == 2:
        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.get_variable("x", initializer=[0.0, 0.0], use_resource=True)
            step = hvd.DistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum).minimize(
                -x[hvd.rank()]
            )
            session.run(tf1.global_variables_initializer())
            session.run(step)
            assert session.run(x).tolist() == [1.0, 1.0]  # at right angles: they add up


def case_batch_normalization_over_ranks() -> None:
    tf.keras.utils.set_random_seed(1)
    rows = slice(hvd.rank(), None, hvd.size())

    def moments(layer, data):
        data = tf.constant(data)
        with tf.GradientTape() as tape:
            tape.watch(data)
            loss = tf.reduce_sum(layer(data, training=True) ** 3)
        return tape.gradient(loss, data).numpy(), layer.moving_mean.numpy(), layer.moving_variance.numpy()

    shared = moments(hvd.SyncBatchNormalization(), X[rows])
    whole = moments(tf.keras.layers.BatchNormalization(), X)
    np.testing.assert_allclose(shared[1], whole[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(shared[2], whole[2], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(shared[0], whole[0][rows], rtol=2e-2, atol=2e-3)


def case_elastic_state() -> None:
    variable = tf.Variable(float(hvd.rank()))
    state = hvd.elastic.TensorFlowState([variable], batch=hvd.rank())
    state.sync()
    assert (float(variable), state.batch) == (0.0, 0)
    tries = []

    @hvd.elastic.run
    def train(state):
        tries.append(state.batch)
        while state.batch < 4:
            variable.assign_add(hvd.allreduce(tf.constant(1.0)))
            state.batch += 1
            if state.batch == 3 and len(tries) == 1:
                # What a runtime makes of a collective that failed because a rank has gone.
                hvd.allreduce(tf.ones(2 + (hvd.rank() if hvd.size() > 1 else 0))) if hvd.size() > 1 else _gone()
            state.commit()
        return float(variable)

    assert train(state) == 4.0
    assert tries == [0, 2]


def case_elastic_state_of_a_session_and_of_a_model() -> None:
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("v", initializer=float(hvd.rank()), use_resource=True)
        session.run(tf1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, epoch=hvd.rank())
        state.sync()
        assert (session.run(variable), state.epoch) == (0.0, 0)
        variable.load(5.0, session)
        state.epoch = 7
        state.restore()
        assert (session.run(variable), state.epoch) == (0.0, 0)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="mse")
    with pytest.raises(ValueError, match="no weights yet"):
        hvd.elastic.TensorFlowKerasState(model)
    model.build((None, 2))
    state = hvd.elastic.TensorFlowKerasState(model, batch=hvd.rank())
    state.sync()
    first = hvd.broadcast_object([np.asarray(one) for one in model.get_weights()])
    assert all((a == b).all() for a, b in zip(model.get_weights(), first, strict=True))
    assert state.batch == 0


def _gone() -> None:
    raise hvd.HorovodInternalError("a rank has gone")


def case_a_mismatch_in_a_function() -> None:
    if hvd.size() < 2:
        return
    calls = (hvd.allreduce, tf.function(lambda x, name: hvd.allreduce(x, name=name), autograph=False))
    for call in calls:
        for kind in (tf.errors.FailedPreconditionError, hvd.CollectiveMismatch, hvd.HorovodInternalError):
            with pytest.raises(kind, match=r"allreduce 'w': expected float32 \[\d\], rank \d sent") as caught:
                call(tf.ones(3 + hvd.rank()), name="w")
            assert isinstance(original(caught.value), hvd.CollectiveMismatch)
    again = pickle.loads(pickle.dumps(caught.value))  # for processes without TensorFlow
    assert type(again) is hvd.CollectiveMismatch
    assert "expected float32" in str(again)
    with tf.Graph().as_default(), tf1.Session() as session:
        for kind in (tf.errors.FailedPreconditionError, hvd.CollectiveMismatch):
            with pytest.raises(kind, match="expected float32"):
                session.run(hvd.allreduce(tf.ones(3 + hvd.rank())))
    for wrong in (lambda: hvd.alltoall(tf.ones(2 * hvd.size() - 1)), lambda: hvd.reducescatter(tf.ones(()))):
        with pytest.raises(tf.errors.InvalidArgumentError):
            wrong()
    with pytest.raises(tf.errors.UnimplementedError, match="cannot use Adasum"):  # no AbortedError: sessions try again
        hvd.reducescatter(tf.ones(hvd.size()), op=hvd.Adasum)
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(2)), np.ones(2))


def in_session(make) -> None:
    with tf.Graph().as_default(), tf1.Session() as session:
        session.run(make())


def case_calls_that_wait_for_one_another_for_ever() -> None:
    """In a session they match by name, elsewhere by order: both are named, whichever way they are called."""
    if hvd.size() == 1:
        return

    def total(name=None):
        return hvd.allreduce(tf.ones(3), op=hvd.Sum, name=name)

    def again(i, x):
        return i + 1, hvd.allreduce(x, op=hvd.Sum)

    def looped():
        return tf.while_loop(lambda *_: True, again, [0, tf.ones(3)])

    function = tf.function(total, autograph=False)
    from_python = tf.function(lambda: tf.py_function(total, [], tf.float32), autograph=False)
    by_order, by_name = "allreduce sum float32 [3], by order", "allreduce sum '{}' float32 [3], by name"
    session = (lambda: in_session(total), by_name.format("ring_allreduce"))
    for pair in (
        (session, (total, by_order)),
        ((lambda: in_session(lambda: total("x")), by_name.format("ring_x")), session),
        ((lambda: in_session(function), "allreduce sum 'ring_allreduce at "), (function, by_order)),
        (
            (from_python, by_order),
            (lambda: in_session(looped), "allreduce sum 'while/ring_allreduce iteration 0 of loop "),
        ),
        (session, (hvd.barrier, "barrier, by order")),
    ):
        call = pair[min(hvd.rank(), 1)][0]
        with pytest.raises(hvd.CollectiveMismatch, match="no rank can continue") as caught:
            call()
        if call not in (hvd.barrier, from_python):
            assert isinstance(caught.value, tf.errors.FailedPreconditionError)
        for text in (f"rank 0: {pair[0][1]}", pair[1][1]):
            assert text in str(caught.value), text
        hvd.shutdown()  # it has ended the generation
        hvd.init()


def case_a_strategy_is_refused() -> None:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), pytest.raises(RuntimeError, match="outside of strategy"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))


def case_without_the_ops_numpy_functions_do_it() -> None:
    ops = graph_call._ops
    graph_call._ops = lambda: None
    try:
        for call in both(lambda x: hvd.allreduce(x)):
            np.testing.assert_allclose(call(own()), np.mean(every(), axis=0))
        x = own()
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.allgather(x) * tf.range(4.0 * hvd.size()))
        np.testing.assert_allclose(tape.gradient(loss, x), np.arange(4.0) + 4 * hvd.rank())
        threads = tf1.ConfigProto(inter_op_parallelism_threads=8)  # each waits in one
        for choose in (tf1.disable_control_flow_v2, tf1.enable_control_flow_v2):
            choose()
            with tf.Graph().as_default(), tf1.Session(config=threads) as session:
                sums = [hvd.allreduce(tf.constant(float(i)), op=hvd.Sum) for i in range(4)]
                sums.append(tf1.cond(tf.constant(True), lambda: hvd.allreduce(4.0, op=hvd.Sum), lambda: 0.0))
                order = random.Random(hvd.rank()).sample(range(5), 5)
                assert session.run([sums[i] for i in order]) == [float(i * hvd.size()) for i in order]
                with pytest.raises(NotImplementedError, match="allreduce in a loop of a session"):
                    tf.while_loop(lambda i: i < 3.0, lambda i: i + hvd.allreduce(i), [0.0])
                with pytest.raises(NotImplementedError, match="allreduce in a function of a session"):
                    tf.function(hvd.allreduce, autograph=False)(tf.ones(2))
    finally:
        graph_call._ops = ops
    ops.cache_clear()
    found, graph_call.find_spec = graph_call.find_spec, lambda name: None
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert ops() is None
        assert any("tf.numpy_function" in str(one.message) for one in said)
    finally:
        graph_call.find_spec = found
        ops.cache_clear()
