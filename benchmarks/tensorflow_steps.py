"""The time of a TensorFlow training step: ours, tf.distribute.MultiWorkerMirroredStrategy, and ranks on their own.

    PYTHONPATH=$(echo .tensorflow/venv/lib/*/site-packages) \\
        ringrun -np 2 python benchmarks/tensorflow_steps.py [--models conv] [--seconds 40]

Every rank is also a worker of the strategy, over loopback. All variants train a model of their own that begins alike,
in one run, and take turns of five steps, with one thread for kernels of a rank. "ours" is DistributedGradientTape and
tf_keras' SGD in a tf.function; "ours, fit" is DistributedOptimizer within ``fit``, beside the strategy's. The figures
are those of the slowest rank: the median of a step's time, its quartiles, and the processor time of a step, which
another program on the machine changes less. In parentheses the part that ranks on their own do not need.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from time import perf_counter

os.environ.update(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="3")  # Keras 3 does not train under the strategy

from in_turns import measure, print_head, print_rows

import ring_notebook.tensorflow as ring
import tensorflow as tf


def strategy_of_the_ranks() -> tf.distribute.Strategy:
    """The strategy whose workers are the ranks; before TensorFlow does anything else."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    workers = ring.allgather_object(own)
    task = {"type": "worker", "index": ring.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


def dense() -> tuple[tf.keras.Model, tf.Tensor, tf.Tensor]:
    """21 million parameters in three layers: the most to communicate for the least to compute."""
    layers = [tf.keras.layers.Dense(n, activation="relu") for n in (3072, 4096)]
    model = tf.keras.Sequential([tf.keras.Input((1024,)), *layers, tf.keras.layers.Dense(1024)])
    return model, tf.random.normal((64, 1024), seed=1), tf.random.normal((64, 1024), seed=2)


def conv() -> tuple[tf.keras.Model, tf.Tensor, tf.Tensor]:
    """0.1 million parameters in three convolutions: much to compute, little to communicate."""
    layers = []
    for filters in (32, 64, 128):
        layers += [
            tf.keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            tf.keras.layers.MaxPooling2D(),
        ]
    model = tf.keras.Sequential(
        [tf.keras.Input((32, 32, 3)), *layers, tf.keras.layers.GlobalAveragePooling2D(), tf.keras.layers.Dense(10)]
    )
    return model, tf.random.normal((16, 32, 32, 3), seed=1), tf.random.normal((16, 10), seed=2)


MODELS = {"dense": dense, "conv": conv}


TURN = 5
"""Steps of a variant before the next one's turn."""


def steps_of(name: str, strategy: tf.distribute.Strategy) -> dict[str, Callable[[], list[float]]]:
    """For each variant a function that makes `TURN` steps and returns their seconds."""

    def build() -> tuple[tf.keras.Model, tf.Tensor, tf.Tensor, tf.keras.optimizers.Optimizer]:
        tf.keras.utils.set_random_seed(0)
        return *MODELS[name](), tf.keras.optimizers.SGD(1e-3, momentum=0.9)

    def timed(step: Callable[[], None]) -> Callable[[], list[float]]:
        def turn() -> list[float]:
            at = [perf_counter()]
            for _ in range(TURN):
                step()
                at.append(perf_counter())
            return [end - begin for begin, end in pairwise(at)]

        return turn

    def own_loop(distribute: bool) -> Callable[[], list[float]]:
        model, x, y, optimizer = build()

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            if distribute:
                tape = ring.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        return timed(step)

    def of_the_strategy() -> Callable[[], list[float]]:
        with strategy.scope():
            model, x, y, optimizer = build()

        def replica() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / strategy.num_replicas_in_sync
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        @tf.function
        def step() -> None:
            strategy.run(replica)

        return timed(step)

    def fitting(distribute: bool = False, strategy: tf.distribute.Strategy | None = None) -> Callable[[], list[float]]:
        with strategy.scope() if strategy else nullcontext():
            model, x, y, optimizer = build()
            model.compile(optimizer=ring.DistributedOptimizer(optimizer) if distribute else optimizer, loss="mse")
        workers = strategy.num_replicas_in_sync if strategy else 1  # the strategy divides a batch among them
        whole = (tf.concat([x] * workers, 0), tf.concat([y] * workers, 0))
        data = tf.data.Dataset.from_tensor_slices(whole).batch(len(x) * workers, drop_remainder=True).cache().repeat()
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = data.with_options(options)
        times: list[float] = []

        class Clock(tf.keras.callbacks.Callback):
            def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
                self.began = perf_counter()

            def on_train_batch_end(self, batch: int, logs: object = None) -> None:
                times.append(perf_counter() - self.began)

        def turn() -> list[float]:
            times.clear()
            model.fit(data, steps_per_epoch=TURN, verbose=0, callbacks=[Clock()])
            return list(times)

        return turn

    return {
        "alone": own_loop(False),
        "ours": own_loop(True),
        "MultiWorkerMirrored": of_the_strategy(),
        "alone, fit": fitting(),
        "ours, fit": fitting(distribute=True),
        "MultiWorkerMirrored, fit": fitting(strategy=strategy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dense,conv")
    parser.add_argument("--seconds", type=float, default=40.0, help="time for each model")
    arguments = parser.parse_args()
    ring.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = strategy_of_the_ranks()
    for number, name in enumerate(arguments.models.split(",")):
        result = measure(ring, steps_of(name, strategy), TURN, arguments.seconds)
        if ring.rank() == 0:
            if number == 0:
                print_head(ring, f"TensorFlow {tf.__version__}")
            print_rows(name, result)
    ring.barrier()
    os._exit(0)  # the strategy's server has no end of its own


if __name__ == "__main__":
    main()
