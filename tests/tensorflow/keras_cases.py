"""What ranks do with Keras, on each framework beneath it and as tf_keras; see harness/case_jobs.py."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest

import ring_notebook.keras as hvd
from harness.kept_again import kept_again
from ring_notebook.core import metrics
from ring_notebook.core.run_options import ask_for_checkpoint, of_run
from ring_notebook.errors import RingError
from ring_notebook.keras.chosen_keras import IS_LEGACY, backend, face, keras
from ring_notebook.keras.keras_state import optimizers_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 8)).astype(np.float32)
Y = np.sin(X.sum(axis=1, keepdims=True))
BATCH = 4


def own(data: np.ndarray) -> np.ndarray:
    """This rank's part of each joined batch."""
    batches = data.reshape(-1, hvd.size(), BATCH, data.shape[1])
    return batches[:, hvd.rank()].reshape(-1, data.shape[1])


def model(seed: int, optimizer, **compile_options):
    keras.utils.set_random_seed(seed)
    made = keras.Sequential(
        [keras.layers.InputLayer((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )
    made.compile(optimizer=optimizer, loss="mse", **compile_options)
    return made


class OfClasses(keras.metrics.Metric):
    """A number for each of two classes, as of `F1Score(average=None)`."""

    def update_state(self, y_true, y_pred, sample_weight=None) -> None:
        pass

    def result(self):
        return constant([1.0, 3.0])


def constant(values):
    return keras.backend.constant(values) if IS_LEGACY else keras.ops.convert_to_tensor(values)


def fit(made, data=None, epochs=2, callbacks=(), **options):
    x, y = (own(X), own(Y)) if data is None else data
    batch = options.pop("batch_size", BATCH)
    return made.fit(
        x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **options
    )


def weights(made) -> list[np.ndarray]:
    return [np.asarray(weight) for weight in made.get_weights()]


def rate_of(made) -> float:
    rate = made.optimizer.learning_rate
    return float(rate.numpy() if IS_LEGACY else keras.ops.convert_to_numpy(rate))


def check_equal(made) -> list[np.ndarray]:
    ours = weights(made)
    for other in hvd.allgather_object(ours):
        assert all((a == b).all() for a, b in zip(other, ours, strict=True))
    return ours


def check_joined(trained, make, **options) -> None:
    """The weights equal those of one process with the joined batch, up to rounding."""
    alone = make()
    fit(alone, (X, Y), batch_size=BATCH * hvd.size(), **options)
    for ours, theirs in zip(check_equal(trained), weights(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=5e-4, atol=5e-6)


def start():
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


def case_training_equals_that_of_the_joined_batch() -> None:
    trained = model(10 + hvd.rank(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.02, clipnorm=0.5)))
    fit(trained, callbacks=[start()])
    check_joined(trained, lambda: model(10, keras.optimizers.Adam(0.02, clipnorm=0.5)))


def case_legacy_optimizers() -> None:
    if not IS_LEGACY:
        return
    trained = model(3 + hvd.rank(), hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.05, momentum=0.9)))
    fit(trained, callbacks=[start(), hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1)])
    check_equal(trained)


def case_gradients_that_are_computed_apart_are_reduced() -> None:
    """As in Horovod: a step may follow that is told not to aggregate."""
    if not IS_LEGACY:
        return
    import tensorflow as tf

    size, rank = hvd.size(), hvd.rank()
    for passes in (1, 2):
        shared, mine = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.legacy.SGD(1.0), backward_passes_per_step=passes, average_aggregated_gradients=True
        )
        optimizer.register_local_var(mine)

        @tf.function
        def step(optimizer=optimizer, shared=shared, mine=mine):
            pairs = optimizer._compute_gradients(lambda: (rank + 1.0) * (shared + mine), var_list=[shared, mine])
            optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)

        for _ in range(3 * passes):
            step()
        np.testing.assert_allclose(shared.numpy(), -3 * (size + 1) / 2)
        np.testing.assert_allclose(mine.numpy(), -3 * (rank + 1) / size, rtol=1e-6)
        assert int(optimizer.iterations) == 3 * passes
    step()
    assert optimizer._agg_helper.counter.numpy() == 1
    optimizer = hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(1.0), op=hvd.Sum)
    for apart in (True, False):  # with `minimize`, and with gradients that nobody has reduced
        variable = tf.Variable(0.0)
        if apart:
            optimizer.minimize(lambda variable=variable: (rank + 1.0) * variable, [variable])
        else:
            optimizer.apply_gradients([(tf.constant(rank + 1.0), variable)])
        np.testing.assert_allclose(variable.numpy(), -size * (size + 1) / 2)


def case_a_configuration_makes_another_distributed_optimizer() -> None:
    for module in (keras.optimizers, *([keras.optimizers.legacy] if IS_LEGACY else [])):
        optimizer = hvd.DistributedOptimizer(module.SGD(0.05), op=hvd.Sum)
        for again in (
            optimizer.from_config(optimizer.get_config()),
            type(optimizer).from_config(optimizer.get_config()),
        ):
            assert again.get_config() == optimizer.get_config()
            with pytest.raises(ValueError, match="already"):
                hvd.DistributedOptimizer(again)
            assert again._ring.op == hvd.Sum


def case_local_variables_are_not_broadcast() -> None:
    trained = model(hvd.rank(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    first = trained.layers[0]
    before = [np.asarray(weight) for weight in first.get_weights()]
    root = hvd.size() - 1
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root, local_variables=first.variables)
    fit(trained, epochs=1, callbacks=[callback])
    for mine, old in zip(first.get_weights(), before, strict=True):
        np.testing.assert_allclose(mine, old)
    last = [np.asarray(weight) for weight in trained.layers[-1].get_weights()]
    for mine, theirs in zip(last, hvd.broadcast_object(last, root), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def case_the_optimizer_keeps_its_class_and_state() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert isinstance(optimizer, keras.optimizers.SGD)
    assert type(optimizer).__name__ == "SGD"
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="takes an optimizer of"):
        hvd.DistributedOptimizer("adam")


def case_options() -> None:
    for options in (
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
        {"groups": 2},
    ):
        trained = model(1, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), **options))
        fit(trained, epochs=1)
        check_equal(trained)


def case_optimizers_with_an_apply_of_their_own() -> None:
    """Whose parts, or what they do to gradients first, get those of all ranks."""
    if IS_LEGACY:
        return

    class Normed(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply([gradient / (keras.ops.norm(gradient) + 0.1) for gradient in grads], trainable_variables)

    def several():
        parts = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.05), {".*bias": keras.optimizers.Adam(0.02)})
        return keras.optimizers.MultiOptimizer(parts)

    trained = model(10, hvd.DistributedOptimizer(Normed(0.05)))
    fit(trained, epochs=1)
    check_joined(trained, lambda: model(10, Normed(0.05)), epochs=1)
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return
    trained = model(10 + hvd.rank(), several())
    _, data = hvd.prepare(trained, (X, Y))
    fit(trained, data, epochs=1, callbacks=[hvd.checkpoint(trained, folder=shared_folder())])
    check_joined(trained, lambda: model(10, several()), epochs=1)
    with pytest.raises(ValueError, match="one of several"):
        hvd.prepare(trained, scale_lr=True)
    passes = hvd.DistributedOptimizer(several(), backward_passes_per_step=2, average_aggregated_gradients=True)
    trained = model(10, passes)
    fit(trained, epochs=1, batch_size=BATCH // 2)
    check_joined(trained, lambda: model(10, several()), epochs=1)
    chosen_later = keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="made later"):
        hvd.DistributedOptimizer(chosen_later, backward_passes_per_step=2)


def case_accumulated_gradients() -> None:
    for module in (keras.optimizers, *([keras.optimizers.legacy] if IS_LEGACY else [])):
        for average in (True, False):
            rate = 0.05 if average else 0.025  # of sums
            optimizer = hvd.DistributedOptimizer(
                module.SGD(rate, momentum=0.9), backward_passes_per_step=2, average_aggregated_gradients=average
            )
            trained = model(5, optimizer)
            fit(trained, epochs=1, batch_size=BATCH // 2)
            updates = len(own(X)) // BATCH
            assert int(optimizer.iterations) == (2 * updates if IS_LEGACY else updates)  # tf_keras counts passes
            check_joined(trained, lambda: model(5, keras.optimizers.SGD(0.05, momentum=0.9)), epochs=1)


def case_local_layers() -> None:
    for in_float8 in (False, True)[: 1 if IS_LEGACY else 2]:
        trained = model(7, keras.optimizers.SGD(0.05))
        if in_float8:
            trained.quantize("float8")
        first, last = trained.layers[0], trained.layers[-1]
        trained.optimizer = hvd.PartialDistributedOptimizer(trained.optimizer, local_layers=[first])
        fit(trained, epochs=1)
        kept = [[np.asarray(w) for w in layer.get_weights()[:2]] for layer in (first, last)]
        every = hvd.allgather_object(kept)
        assert all((a == b).all() for _, other in every for a, b in zip(other, every[0][1], strict=True))
        assert (every[0][0][0] != every[1][0][0]).any()


def case_local_layers_of_another_scale_and_ranks_outside_of_a_set() -> None:
    start_weights = [np.asarray(w) for w in model(7, keras.optimizers.SGD(0.05)).get_weights()]
    moved = []
    for scale in (True, False):
        trained = model(7, keras.optimizers.SGD(0.05))
        trained.optimizer = hvd.PartialDistributedOptimizer(
            trained.optimizer, local_layers=trained.layers[0], scale_local_gradients=scale
        )
        trained.train_on_batch(own(X)[:BATCH], own(Y)[:BATCH])
        moved.append(weights(trained)[0] - start_weights[0])
    np.testing.assert_allclose(moved[0] * hvd.size(), moved[1], rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="local_layers must be layers"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=["dense"])
    first = hvd.add_process_set([0])
    outside = model(7, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=first))
    alone = model(7, keras.optimizers.SGD(0.05))
    for one in (outside, alone):
        fit(one, epochs=1)
    for ours, theirs in zip(weights(outside), weights(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def case_adasum_and_the_broadcast_of_a_graph() -> None:
    if hvd.size() == 2:
        trained = model(1, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=hvd.Adasum))
        fit(trained, epochs=1)
        check_equal(trained)
    with pytest.raises(RuntimeError, match="broadcast"):
        hvd.broadcast_global_variables(0)


def case_calls_of_the_script_come_after_programs_of_jax_that_it_has_begun() -> None:
    """Rank 0 waits for each result, as to print it; the others call the next function at once."""
    if backend() != "jax":
        return
    import jax

    def slow(x):
        for _ in range(20):
            x = jax.numpy.tanh(x @ x)
        return face().allreduce(x.sum())

    compiled, x, built = jax.jit(slow), jax.numpy.full((300, 300), 0.001), hvd.prepare(model(1, "sgd"))
    compiled(x).block_until_ready()
    for call in (lambda: hvd.allreduce(1.0), lambda: hvd.prepare(built)):
        result = compiled(x)
        if hvd.rank() == 0:
            result.block_until_ready()
        call()
        assert np.isfinite(result)


def case_fit_in_a_graph_of_tensorflow_1() -> None:
    if not IS_LEGACY:
        return  # Keras 3 has no graphs
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.Session().as_default():
        trained = model(hvd.rank(), hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.05, momentum=0.9)))
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=2, steps_per_epoch=2)
        history = fit(trained, callbacks=[start(), hvd.callbacks.MetricAverageCallback(), warmup]).history
        check_equal(trained)
    assert all(other == history["loss"] for other in hvd.allgather_object(history["loss"]))


def case_synchronized_batch_normalization_within_fit() -> None:
    if backend() != "tensorflow":
        return
    import ring_notebook.tensorflow as hvd_tf

    def made(layer, optimizer):
        keras.utils.set_random_seed(3)
        one = keras.Sequential([keras.layers.InputLayer((8,)), layer, keras.layers.Dense(1)])
        one.compile(optimizer=optimizer, loss="mse")
        return one

    trained = made(hvd_tf.SyncBatchNormalization(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)))
    fit(trained)
    check_joined(trained, lambda: made(keras.layers.BatchNormalization(), keras.optimizers.SGD(0.05)))


def case_momentum_is_corrected_while_the_rate_changes() -> None:
    if not IS_LEGACY:
        return
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(float(self.model.optimizer.momentum.numpy()))

    optimizer = hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.1, momentum=0.5))
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)
    fit(model(1, optimizer), epochs=2, callbacks=[schedule, Watch()])
    steps = len(seen) // 2
    np.testing.assert_allclose(seen, [0.5] * steps + [0.25] + [0.5] * (steps - 1))


def case_loss_scaling() -> None:
    """The optimizer may be within ours, and ours within it: by hand, or by `compile`."""
    policies = keras.mixed_precision if IS_LEGACY else keras.config
    read, choose = (
        (policies.global_policy, policies.set_global_policy)
        if IS_LEGACY
        else (policies.dtype_policy, policies.set_dtype_policy)
    )
    scaled = (keras.mixed_precision if IS_LEGACY else keras.optimizers).LossScaleOptimizer
    mine = own(X).copy()
    if hvd.rank() == 1:
        mine[BATCH, 0] = 1e30  # it overflows on one rank, in the second step
    kinds = [keras.optimizers.SGD, *([keras.optimizers.legacy.SGD] if IS_LEGACY else [])]
    distributed = hvd.DistributedOptimizer
    ways = [
        distributed,
        lambda optimizer: distributed(scaled(optimizer)),
        lambda optimizer: scaled(distributed(optimizer)),
        lambda optimizer: distributed(optimizer, backward_passes_per_step=2),
    ]
    before = read()
    for make, kind in itertools.product(ways, kinds):
        optimizer = make(kind(0.01))
        choose("mixed_float16")
        try:
            trained = model(2, optimizer)
            assert isinstance(trained.optimizer, scaled)
            fit(trained, (mine, own(Y)), epochs=1, callbacks=[start()])
            assert all(np.isfinite(weight).all() for weight in check_equal(trained))
            assert np.any(weights(trained)[0] != weights(model(2, kind(0.01)))[0])
            if backend() != "jax" and not IS_LEGACY:  # where Keras has no such call outside of `fit`
                trained.optimizer.apply([keras.ops.zeros_like(v) for v in trained.trainable_variables])
            if not IS_LEGACY:  # where it is put into a LossScaleOptimizer once only
                trained.compile(optimizer, "mse")  # as when its cell is run again
                assert isinstance(trained.optimizer, scaled)
                fit(trained, (mine, own(Y)), epochs=1)
                check_equal(trained)
            if make is distributed:
                again = kept_again({"model": trained})["model"]
                for one in (again, trained):
                    assert hvd.prepare(one) is one
                    fit(one, epochs=1)
                for ours, theirs in zip(check_equal(trained), check_equal(again), strict=True):
                    np.testing.assert_array_equal(ours, theirs)
        finally:
            choose(before)


def case_several_steps_in_one_execution() -> None:
    if backend() == "torch":  # for which Keras refuses it
        return
    trained = model(4, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), steps_per_execution=2)
    fit(trained, callbacks=[start()])
    check_joined(trained, lambda: model(4, keras.optimizers.SGD(0.05)))


def case_steps_with_collectives_are_not_compiled_by_xla() -> None:
    if backend() != "tensorflow":
        return
    trained = model(4, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), jit_compile=True)
    trained.train_on_batch(own(X)[:BATCH], own(Y)[:BATCH])
    assert trained.jit_compile is False
    prepared = hvd.prepare(model(4, keras.optimizers.SGD(0.05), jit_compile=True))
    fit(prepared, epochs=1)
    check_equal(trained)
    check_equal(prepared)


@keras.utils.register_keras_serializable("tests")
class TwoParts(keras.Model):
    """Trains its two layers by optimizers of its own, as a GAN does."""

    def __init__(self, seed: int = 0, optimizers=None, **options) -> None:
        super().__init__(**options)
        keras.utils.set_random_seed(seed)
        self.parts = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        self(np.zeros((1, 8), np.float32))
        options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        first, second = optimizers or [keras.optimizers.Adam(0.02, **options) for _ in self.parts]
        self.first, self.more = first, {"second": second}
        self.compile()

    def get_config(self):
        return {}

    def call(self, x, training=False):
        return self.parts[1](self.parts[0](x))

    def train_step(self, data):
        x, y = data
        pairs = zip(self.parts, (self.first, self.more["second"]), strict=True)
        for trained, optimizer in [(part.trainable_variables, optimizer) for part, optimizer in pairs]:
            if backend() == "torch":
                self.zero_grad()
                loss = ((self(x) - y) ** 2).mean()
                loss.backward()
                optimizer.apply([variable.value.grad for variable in trained], trained)
            else:
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x) - y) ** 2)
                optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        return {"loss": loss}


def case_a_model_with_optimizers_of_its_own() -> None:
    """All of their state is kept, also averages of weights, and given to ranks whose optimizers have made no step."""
    if backend() == "jax":  # whose steps carry the variables of one optimizer
        return

    by_hand = TwoParts(10 + hvd.rank())
    for optimizer in optimizers_of(by_hand):
        hvd.DistributedOptimizer(optimizer)
    folder, trained = shared_folder(), hvd.prepare(TwoParts(10 + hvd.rank()))
    alone, again = TwoParts(10), hvd.prepare(TwoParts(20 + hvd.rank()))
    fit(by_hand, callbacks=[start()])
    fit(trained, epochs=1, callbacks=[hvd.checkpoint(trained, every="epoch", folder=folder)])
    state = hvd.elastic.KerasState(trained)
    hvd.checkpoint(again, folder=folder, resume=True)
    elastic, kept = hvd.prepare(TwoParts(30)), kept_again({"model": trained})["model"]
    hvd.elastic.KerasState(elastic).load_content("weights", state.weights)
    healed = hvd.prepare(TwoParts(40) if hvd.rank() > 0 else kept_again({"model": trained})["model"])
    fit(alone, (X, Y), batch_size=BATCH * hvd.size())
    for made in (trained, again, elastic, kept, healed):
        fit(made, epochs=1)
    for made in (by_hand, trained, again, elastic, kept, healed):
        for ours, theirs in zip(check_equal(made), weights(alone), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=5e-4, atol=5e-6)


def case_a_model_that_only_says_that_it_is_built() -> None:
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def call(self, x, training=False):
            return self.inner(x)

    for start_by in (lambda made: start(), hvd.prepare):
        keras.utils.set_random_seed(3 + hvd.rank())
        made = Own()
        made.built = True  # as Keras' own `build` does with a warning
        made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
        fit(made, callbacks=[one for one in [start_by(made)] if one is not made])
        assert len(check_equal(made)) == 2


def case_keras_own_distribution_is_refused() -> None:
    if backend() == "jax":
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
        try:
            with pytest.raises(RuntimeError, match="leave out keras"):
                hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        finally:
            keras.distribution.set_distribution(None)
    if backend() == "torch":  # on which Keras has none; when it has, it can work over our process group
        with pytest.raises(AttributeError):
            keras.distribution.DataParallel()


def case_metrics_are_averages() -> None:
    logs = {"loss": float(hvd.rank()), "accuracy": 2.0 * hvd.rank(), "of_classes": np.array([hvd.rank(), 1.0])}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    mean = (hvd.size() - 1) / 2
    np.testing.assert_array_equal(logs.pop("of_classes"), [mean, 1.0])
    assert logs == {"loss": mean, "accuracy": 2 * mean}


def case_learning_rates() -> None:
    seen: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(rate_of(self.model))

    size, steps = hvd.size(), len(own(X)) // BATCH
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    later = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.1 ** (epoch - 1), start_epoch=2)
    fit(model(1, hvd.DistributedOptimizer(keras.optimizers.SGD(0.4))), epochs=3, callbacks=[warmup, later, Watch()])
    expected = [0.4 / size * ((i + 1) / steps * (size - 1) / 2 + 1) for i in range(2 * steps)] + [0.04] * steps
    np.testing.assert_allclose(seen, expected, rtol=1e-5)


def case_models_are_saved_and_loaded() -> None:
    @keras.utils.register_keras_serializable("tests")
    class Registered(keras.optimizers.Adam):
        pass

    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    for kind in (keras.optimizers.Adam, Registered):
        file = folder / f"{kind.__name__}.keras"
        trained = model(1, hvd.DistributedOptimizer(kind(0.02)))
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(file))
        fit(trained, epochs=1, callbacks=[start(), hvd.callbacks.MetricAverageCallback(), best])
        hvd.barrier()
        plain = keras.models.load_model(file).optimizer
        assert isinstance(plain, kind)
        assert not hasattr(plain, "_ring")  # needs nothing of ours
        loaded = hvd.load_model(file)
        assert hasattr(loaded.optimizer, "_ring")
        for ours, theirs in zip(weights(loaded), weights(trained), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        fit(loaded, epochs=1)
        check_equal(loaded)


class Stop(keras.callbacks.Callback):
    """Notes the epochs, and raises at the end of a batch of one of them."""

    def __init__(self, epoch: int = -1, batch: int = 0) -> None:
        super().__init__()
        self.at = epoch, batch
        self.epochs: list[int] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        if (self.epochs[-1], batch) == self.at:
            raise OSError("the job has reached its time limit")


def adam(seed: int):
    return model(seed, hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)))


def shared_folder() -> Path:
    return Path(hvd.broadcast_object(tempfile.mkdtemp()), "made")


def kept_in(folder: Path) -> list[str]:
    hvd.barrier()
    return sorted(path.name for path in folder.glob("*"))


def case_fit_continues_from_a_checkpoint_as_if_it_had_not_stopped() -> None:
    folder, batches = shared_folder(), len(X) // BATCH // hvd.size()
    whole = adam(1)
    fit(whole, epochs=4)
    stopped, stop = adam(1), Stop(epoch=2, batch=1)
    with pytest.raises(OSError, match="time limit"):
        fit(stopped, epochs=4, callbacks=[stop, hvd.checkpoint(stopped, folder=folder, keep=1)])
    assert stop.epochs == [0, 1, 2]
    assert kept_in(folder) == [f"step-{2 * batches:08}.pickle"]
    assert (folder.stat().st_mode & 0o777) == 0o700
    again, seen = adam(2 + hvd.rank()), Stop()
    saved = hvd.checkpoint(again, folder=folder, resume=True)
    assert (saved.steps, saved.epoch) == (2 * batches, 2)
    fit(again, epochs=4, callbacks=[start(), seen, saved])
    assert seen.epochs == [2, 3]
    assert saved.steps == 4 * batches
    for ours, theirs in zip(check_equal(again), weights(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(again.optimizer.iterations) == int(whole.optimizer.iterations)
    # A training that has made all its epochs makes no more; a second `fit` begins anew.
    done, seen = adam(3), Stop()
    saved = hvd.checkpoint(done, folder=folder, resume=True)
    fit(done, epochs=4, callbacks=[seen, saved])
    assert seen.epochs == []
    several = keras.callbacks.CallbackList([saved, seen], add_history=True, model=done)
    done.fit(own(X), own(Y), batch_size=BATCH, epochs=1, verbose=0, callbacks=several)
    assert seen.epochs == [0]
    assert saved.steps == 5 * batches


def case_checkpoints_of_steps_and_of_the_best_epoch() -> None:
    folder = shared_folder()
    values = iter([3.0, 1.0, float("nan"), 2.0])

    class Validate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = next(values) if hvd.rank() == 0 else 0.0

    together = 1 if backend() == "torch" else 2  # batches between two calls of a callback
    trained = model(1, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), steps_per_execution=together)
    saved = hvd.checkpoint(trained, every="3 steps", keep=2, best="val_loss", folder=folder)
    data = own(X)[: 4 * BATCH], own(Y)[: 4 * BATCH]
    fit(trained, data, epochs=4, callbacks=[saved, Validate()])  # 16 steps
    assert kept_in(folder) == [
        "step-00000008-best.pickle",
        f"step-000000{12 if together == 2 else 15}.pickle",
        "step-00000016.pickle",
    ]
    ask_for_checkpoint()  # as some minutes before the time limit of a batch job
    fit(trained, data, epochs=1, callbacks=[hvd.checkpoint(trained, every="5 h", folder=folder / "asked")])
    of_run.is_checkpoint_due = False
    assert kept_in(folder / "asked") == [f"step-0000000{together}.pickle", "step-00000004.pickle"]
    saved = hvd.checkpoint(trained, every="5 h", best="val_loss", folder=folder, resume=True)
    values = iter([2.0])
    fit(trained, data, epochs=5, initial_epoch=4, callbacks=[Validate(), saved])
    assert not [name for name in kept_in(folder) if name.endswith("best.pickle") and "08" not in name]


def case_a_checkpoint_within_an_epoch_has_the_weights_of_its_step() -> None:
    folder, seen = shared_folder(), []

    class Note(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                seen.append(weights(self.model))

    trained, again = adam(1), adam(2)
    fit(trained, epochs=1, callbacks=[hvd.checkpoint(trained, every="1 steps", keep=20, folder=folder), Note()])
    hvd.barrier()
    for path in sorted(folder.iterdir())[2:] if hvd.rank() == 0 else ():
        path.unlink()
    hvd.barrier()
    saved = hvd.checkpoint(again, folder=folder, resume=True)
    assert (saved.steps, saved.epoch, saved.batch) == (2, 0, 2)
    for ours, theirs in zip(check_equal(again), seen[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def case_a_loop_of_ones_own_writes_checkpoints() -> None:
    folder = shared_folder()

    def train(trained, saved, epochs):
        for _ in saved.epochs(epochs):
            for at in range(saved.batch * BATCH, len(own(X)), BATCH):
                trained.train_on_batch(own(X)[at : at + BATCH], own(Y)[at : at + BATCH])
                saved.step()
        return weights(trained)

    whole, first, again = adam(1), adam(1), adam(2)
    expected = train(whole, hvd.checkpoint(whole, folder=folder / "whole"), 2)
    train(first, hvd.checkpoint(first, folder=folder), 1)
    saved = hvd.checkpoint(again, folder=folder, resume=True)
    assert saved.epoch == 1
    for ours, theirs in zip(train(again, saved, 2), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def case_rates_follow_the_number_of_ranks_and_optimizers_may_be_apart() -> None:
    folder = shared_folder()
    trained = model(1, keras.optimizers.SGD(0.01))
    hvd.prepare(trained, scale_lr=True)
    trained.optimizer.learning_rate = 0.3  # of three ranks
    trained.optimizer._ring.scaled = 3
    hvd.checkpoint(trained, folder=folder).step()
    hvd.checkpoint(trained, every="1 steps", folder=folder).step()
    hvd.barrier()
    again = model(2, keras.optimizers.SGD(0.01))
    hvd.prepare(again, scale_lr=True)
    hvd.checkpoint(again, folder=folder, resume=True)
    assert rate_of(again) == pytest.approx(0.1 * hvd.size())
    optimizers = [keras.optimizers.legacy.Adam, keras.optimizers.Adam] if IS_LEGACY else [keras.optimizers.Adam]
    for number, kind in enumerate(optimizers):
        apart = folder / str(number)
        first, second = kind(0.02), kind(0.5)
        plain = keras.Sequential([keras.layers.InputLayer((8,)), keras.layers.Dense(1)])
        hvd.checkpoint(plain, first, every="1 steps", folder=apart).step()
        hvd.barrier()
        hvd.checkpoint(plain, second, folder=apart, resume=True)
        rate = second.learning_rate
        assert float(rate.numpy() if IS_LEGACY else keras.ops.convert_to_numpy(rate)) == pytest.approx(0.02)


def case_cells_that_import_the_framework_beneath_only_write_checkpoints_too() -> None:
    folder, first, again = shared_folder(), adam(1), adam(2)
    face().checkpoint(first, every="1 steps", folder=folder).step()
    hvd.barrier()
    saved = face().checkpoint(again, folder=folder, resume=True)
    assert (type(saved).__name__, saved.steps) == ("KerasCheckpoint", 1)
    for ours, theirs in zip(check_equal(again), weights(first), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def case_a_checkpoint_that_does_not_fit_says_why() -> None:
    folder = shared_folder()
    unbuilt = keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(1)])
    with pytest.raises(TypeError, match="takes models and optimizers of Keras; argument 2 is of class int"):
        hvd.checkpoint(adam(1), 3)
    hvd.checkpoint(adam(1), every="1 steps", folder=folder).step()
    hvd.barrier()
    with pytest.raises(RingError, match="has 1 objects, got 2; pass to checkpoint"):
        hvd.checkpoint(adam(1), adam(1), folder=folder, resume=True)
    other = keras.Sequential([keras.layers.InputLayer((8,)), keras.layers.Dense(3)])
    other.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
    with pytest.raises(RingError, match=r"the first that differs has shape \(8, 3\) here, \(8, 16\) there"):
        hvd.checkpoint(other, folder=folder, resume=True)
    with pytest.raises(RingError, match=r"which has no weights yet; call model\.build"):
        hvd.checkpoint(unbuilt, folder=folder, resume=True)


def case_snapshots_keep_checkpoints() -> None:
    trained = adam(1)
    saved = hvd.checkpoint(trained, best="val_loss", folder=shared_folder())
    fit(trained, epochs=1, callbacks=[saved])
    again = kept_again({"model": trained, "saved": saved})
    assert again["saved"].steps == saved.steps
    fit(again["model"], epochs=1, callbacks=[again["saved"]])
    fit(trained, epochs=1)
    for ours, theirs in zip(check_equal(again["model"]), weights(trained), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def case_snapshots_keep_models_with_their_optimizers() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02), op=hvd.Sum)
    trained = model(3 + hvd.rank(), optimizer)
    fit(trained, callbacks=[start()])
    values = {"model": trained, "again": [trained], "optimizer": optimizer, "plain": keras.optimizers.SGD(0.3)}
    again = kept_again(values)
    restored = again["model"]
    assert restored is again["again"][0]
    assert restored.optimizer is again["optimizer"]
    assert not hasattr(again["plain"], "_ring")
    assert restored.optimizer._ring.op == hvd.Sum
    assert restored.optimizer._ring.process_set is hvd.global_process_set
    for one in (trained, restored):
        fit(one, epochs=1)
    for ours, theirs in zip(check_equal(restored), weights(trained), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(restored.optimizer.iterations) == int(trained.optimizer.iterations)
    partial = model(7, keras.optimizers.SGD(0.05))
    partial.optimizer = hvd.PartialDistributedOptimizer(partial.optimizer, local_layers=[partial.layers[0]])
    fit(partial, epochs=1)
    restored = kept_again({"partial": partial})["partial"]
    expected = [id(one) for one in restored.layers[0].trainable_variables]
    assert [id(one) for one in restored.optimizer._ring.local] == expected


def case_values() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert float(hvd.allreduce(float(rank))) == (size - 1) / 2
    assert hvd.allreduce(np.array([float(rank)])).numpy().tolist() == [(size - 1) / 2]  # as from Horovod's tensors
    assert hvd.allgather(np.array([rank])).tolist() == list(range(size))
    assert hvd.broadcast(np.array([rank]), 1).tolist() == [1]
    assert hvd.reducescatter(np.ones((size, 2)), op=hvd.Sum).tolist() == [[size, size]]
    if not IS_LEGACY and backend() != "torch":  # whose bfloat16 Keras makes no array of
        halves = keras.ops.full((2,), rank, dtype="bfloat16")
        assert hvd.allreduce(halves, op=hvd.Sum).tolist() == [size * (size - 1) / 2] * 2


def case_an_elastic_training() -> None:
    trained = model(20 + hvd.rank(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)))
    fit(trained, epochs=1)
    state = hvd.elastic.KerasState(trained, batch=0, epoch=0)
    starts = []

    class Break(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if len(starts) == 1 and epoch == 1:
                raise hvd.HorovodInternalError("a rank has gone")

    @hvd.elastic.run
    def train(state):
        starts.append(state.epoch)
        assert state.model.train_function is None  # there may be more ranks than when it was traced
        if len(starts) == 1:
            check_equal(state.model)  # of rank 0
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, 2),
            Break(),
        ]
        fit(state.model, epochs=3 - state.epoch, callbacks=callbacks)

    train(state)
    assert starts == [0, 2]
    assert state.epoch == 3
    check_equal(trained)


def case_a_state_takes_the_commit_of_another_process_before_its_first_step() -> None:
    trained, fresh = adam(1), adam(2)
    fit(trained, epochs=1)
    state, again = hvd.elastic.KerasState(trained), hvd.elastic.KerasState(fresh)
    again.load_content("weights", state.weights)
    for one in (trained, fresh):
        fit(one, epochs=1)
    for ours, theirs in zip(check_equal(fresh), weights(trained), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def case_fit_logs_rows_in_a_notebook() -> None:
    metrics.begin()
    try:
        noted = model(1, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), metrics=[OfClasses()])
        noted.fit(own(X), own(Y), BATCH, 2, 0, validation_data=(X, Y))
        rows = metrics.drain("run", hvd.rank())
        assert metrics.progress() == (2 * len(own(X)) // BATCH,) * 2
    finally:
        metrics.end()
    names = {name for batch in rows for name in batch.names}
    assert {"loss", "val_loss", "samples", "epoch"} <= names


def case_rows_of_a_dataset_have_its_batch_size() -> None:
    tf = pytest.importorskip("tensorflow")
    of_all = tf.data.Dataset.from_tensor_slices((X, Y))
    for data in (
        of_all.batch(BATCH),
        of_all.batch(BATCH, drop_remainder=True),
        of_all.batch(BATCH).cache().prefetch(1),
    ):
        metrics.begin()
        try:
            model(1, keras.optimizers.SGD(0.05)).fit(data, verbose=0)
            rows = metrics.drain("run", hvd.rank())
        finally:
            metrics.end()
        assert any("samples" in batch.names for batch in rows), data


def case_prepare_does_it_in_one_line() -> None:
    trained = model(10 + hvd.rank(), keras.optimizers.Adam(0.02))
    _, (x, y) = hvd.prepare(trained, (X, Y))
    assert len(x) == len(X) // hvd.size()
    assert hvd.prepare(x) is x
    fit(trained, (x, y))
    check_joined(trained, lambda: model(10, keras.optimizers.Adam(0.02)))
    with pytest.raises(ValueError, match="distributed with op=AVERAGE before, got SUM"):
        hvd.prepare(trained, op=hvd.Sum)


def case_a_callback_of_one_rank_stops_all_after_an_epoch_and_within_one_says_so() -> None:
    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None) -> None:
            self.model.stop_training = epoch == 1 and hvd.rank() == hvd.size() - 1

    prepared, data = hvd.prepare(model(hvd.rank(), keras.optimizers.SGD(0.05)), (X, Y))
    history = fit(prepared, data, epochs=5, callbacks=[Stops()]).history
    assert len(history["loss"]) == 2
    check_equal(prepared)
    if hvd.size() > 1:

        class StopsWithin(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None) -> None:
                self.model.stop_training = batch == 1 and hvd.rank() == 1

        with pytest.raises(Exception, match="'metrics, since a callback has set stop_training'"):
            fit(prepared, data, epochs=2, callbacks=[StopsWithin()])


def case_prepare_a_model_that_is_not_built_and_has_been_trained_alone() -> None:
    keras.utils.set_random_seed(hvd.rank())
    trained = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    trained.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    assert hvd.prepare(trained, scale_lr=True) is trained
    hvd.prepare(trained, scale_lr=True)  # a cell that is run again
    assert rate_of(trained) == pytest.approx(0.05 * hvd.size())
    seen: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(logs["loss"])

    fit(trained, callbacks=[Watch()])
    check_equal(trained)
    assert all(other == seen for other in hvd.allgather_object(seen))  # they are averages
    alone = model(hvd.rank(), keras.optimizers.SGD(0.05))
    fit(alone, epochs=1)
    hvd.prepare(alone)
    fit(alone, epochs=1)
    check_equal(alone)
    alone.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    for train in (fit, lambda made: made.train_on_batch(own(X), own(Y))):
        with pytest.raises(RuntimeError, match="call prepare again after compile"):
            train(alone)
    hvd.prepare(alone)
    fit(alone, epochs=1)
    check_equal(alone)


def case_prepare_shares_data_and_refuses_what_it_cannot() -> None:
    size, rank = hvd.size(), hvd.rank()
    rows = np.arange(4 * size + 1)
    shared = hvd.prepare({"a": rows, "b": [rows, rows]})
    assert shared["a"].tolist() == shared["b"][1].tolist() == list(range(rank, 4 * size, size))

    kind = keras.utils.Sequence if IS_LEGACY else keras.utils.PyDataset

    class Batches(kind):
        begun = 0

        def __len__(self):
            return 2 * size + 1

        def __getitem__(self, index):
            return index

        def on_epoch_begin(self):
            self.begun += 1

    whole = Batches() if IS_LEGACY else Batches(max_queue_size=64)
    batches = hvd.prepare(whole)
    batches.on_epoch_begin()
    assert whole.begun == 1
    assert getattr(batches, "max_queue_size", 64) == 64
    assert [batches[i] for i in range(len(batches))] == [rank, size + rank]
    assert hvd.prepare(batches) is batches
    if backend() == "tensorflow":
        import tensorflow as tf

        dataset = tf.data.Dataset.range(2 * size + 1)
        assert [int(one) for one in hvd.prepare(dataset)] == [rank, size + rank]
        with pytest.raises(ValueError, match="assert_cardinality"):
            hvd.prepare(dataset.filter(lambda x: True))
    if backend() == "torch":
        import torch

        import ring_notebook.torch

        loader = torch.utils.data.DataLoader(torch.arange(4 * size), batch_size=2)
        compiled = model(1, keras.optimizers.SGD(0.1))
        made, shard = ring_notebook.torch.prepare(compiled, loader)  # `ring` in a cell that imports torch too
        assert made is compiled
        assert hasattr(made.optimizer, "_ring")
        assert len(list(shard)) == 2
    with pytest.raises(ValueError, match="each needs at least one"):
        hvd.prepare(np.ones(size - 1))
    with pytest.raises(TypeError, match="models, optimizers and data; argument 2 is int 3"):
        hvd.prepare(rows, 3)
    with pytest.raises(ValueError, match="has no optimizer"):
        hvd.prepare(keras.Sequential([keras.layers.Dense(1)]))
    if not IS_LEGACY:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        with pytest.raises(ValueError, match="is a schedule"):
            hvd.prepare(keras.optimizers.SGD(schedule), scale_lr=True)


def case_an_exception_on_one_rank_within_fit() -> None:
    """The others end with it, and the ranks have made the same steps."""
    from ring_notebook.api.foreign_calls import original
    from ring_notebook.core import world

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hvd.rank() == 0 and batch == 1:
                raise OSError("no more data")

    trained = model(1, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)))
    try:
        fit(trained, callbacks=[start(), Break()])
    except OSError as error:
        world.fail(error)  # as the end of a script does
        assert hvd.rank() == 0
    except BaseException as error:
        found = original(error) or error
        assert isinstance(found, hvd.CollectiveAborted), found
        assert "rank 0 raised OSError: no more data" in str(found)
    else:
        raise AssertionError("no exception")
    hvd.shutdown()
    hvd.init()
    check_equal(trained)


def case_a_step_that_fails_leaves_the_weights_of_the_one_before() -> None:
    """Also where it is the first of a `fit`; training continues."""
    from ring_notebook.api.foreign_calls import original

    trained = model(1, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)))

    class Other(keras.callbacks.Callback):
        """On rank 0 calls another operation than that of the step after ``steps`` others."""

        def __init__(self, steps):
            super().__init__()
            self.left = steps

        def on_train_batch_begin(self, batch, logs=None):
            if hvd.rank() == 0 and self.left == 0:
                hvd.allreduce(np.ones(3), name="other")

        def on_train_batch_end(self, batch, logs=None):
            self.left -= 1
            before[:] = weights(self.model)

    for steps in (2, 0):
        fit(trained, callbacks=[start()], epochs=1)
        before = weights(trained)
        with pytest.raises(Exception, match="other") as caught:
            fit(trained, callbacks=[Other(steps)])
        assert isinstance(original(caught.value) or caught.value, hvd.CollectiveMismatch)
        for ours, theirs in zip(check_equal(trained), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    fit(trained, callbacks=[start()], epochs=1)
    check_equal(trained)
