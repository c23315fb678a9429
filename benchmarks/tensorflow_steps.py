"""The time of a TensorFlow training step: ours, tf.distribute.MultiWorkerMirroredStrategy, and ranks on their own.

    PYTHONPATH=.tensorflow/packages ringrun -np 2 python benchmarks/tensorflow_steps.py [--models conv] [--seconds 40]

Every rank is also a worker of the strategy, over loopback. All variants train a model of their own that begins alike,
in one run, and take turns step by step, with one thread for kernels of a rank. The figure is the median of a step's
time on the slowest rank; in parentheses the part of it that is communication, against ranks that train on their own.
"ours" is DistributedGradientTape and tf_keras' SGD in a tf.function; "ours, fit" is DistributedOptimizer within
``train_on_batch``, beside the strategy's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable
from statistics import median
from time import perf_counter

os.environ.update(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="3")  # Keras 3 does not train under the strategy

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


def steps_of(name: str, strategy: tf.distribute.Strategy) -> dict[str, Callable[[], None]]:
    """One training step for each variant."""

    def build() -> tuple[tf.keras.Model, tf.Tensor, tf.Tensor, tf.keras.optimizers.Optimizer]:
        tf.keras.utils.set_random_seed(0)
        return *MODELS[name](), tf.keras.optimizers.SGD(1e-3, momentum=0.9)

    def own_loop(distribute: bool) -> Callable[[], None]:
        model, x, y, optimizer = build()

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            if distribute:
                tape = ring.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        return step

    def of_the_strategy() -> Callable[[], None]:
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

        return step

    def fitting() -> Callable[[], None]:
        model, x, y, optimizer = build()
        model.compile(optimizer=ring.DistributedOptimizer(optimizer), loss="mse")
        return lambda: model.train_on_batch(x, y)

    def fitting_alone() -> Callable[[], None]:
        model, x, y, optimizer = build()
        model.compile(optimizer=optimizer, loss="mse")
        return lambda: model.train_on_batch(x, y)

    return {
        "alone": own_loop(False),
        "ours": own_loop(True),
        "MultiWorkerMirrored": of_the_strategy(),
        "alone, fit": fitting_alone(),
        "ours, fit": fitting(),
    }


def measure(steps: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Median time of each step in seconds, on the slowest rank, interleaved."""
    for _ in range(3):
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    began = perf_counter()
    while True:
        for name, step in steps.items():
            ring.barrier()
            start = perf_counter()
            step()
            ring.barrier()  # a step is over when it is over on all ranks
            times[name].append(perf_counter() - start)
        if ring.broadcast_object(perf_counter() - began > seconds and len(times["alone"]) >= 10):
            return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dense,conv")
    parser.add_argument("--seconds", type=float, default=40.0, help="time for each model")
    arguments = parser.parse_args()
    ring.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = strategy_of_the_ranks()
    for number, name in enumerate(arguments.models.split(",")):
        result = measure(steps_of(name, strategy), arguments.seconds)
        if ring.rank() == 0:
            if number == 0:
                print(f"{ring.size()} ranks, TensorFlow {tf.__version__}\n")
                print("| model | " + " | ".join(result) + " | MultiWorkerMirrored / ours |")
                print("|---" * (len(result) + 2) + "|")
            cells = []
            for label, time in result.items():
                alone = result["alone, fit" if "fit" in label else "alone"]
                cells.append(f"{time * 1e3:.1f} ms" + ("" if time == alone else f" ({1 - alone / time:.0%})"))
            ratio = result["MultiWorkerMirrored"] / result["ours"]
            print(f"| {name} | " + " | ".join(cells) + f" | {ratio:.2f}x |", flush=True)
    ring.barrier()
    os._exit(0)  # the strategy's server has no end of its own


if __name__ == "__main__":
    main()
