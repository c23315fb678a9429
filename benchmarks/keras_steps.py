"""The time of a step in `fit` of Keras 3: ours, and ranks on their own, on the backend of ``KERAS_BACKEND``.

    PYTHONPATH=$(echo .tensorflow/venv/lib/*/site-packages) KERAS_BACKEND=jax \\
        ringrun -np 2 python benchmarks/keras_steps.py

Both variants train a model of their own that begins alike, in one run, and take turns of ten steps. The figures are
those of the slowest rank: the median of a turn's time for a step, its quartiles, and the processor time of a step,
which another program on the machine changes less. In parentheses the part that ranks on their own do not need.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter, process_time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import ring_notebook.keras as ring

TURN = 10
"""Steps of a variant before the other one's turn."""


def dense() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """21 million parameters in three layers: the most to communicate for the least to compute."""
    layers = [keras.layers.Dense(n, activation="relu") for n in (3072, 4096)]
    model = keras.Sequential([keras.Input((1024,)), *layers, keras.layers.Dense(1024)])
    random = np.random.default_rng(0)
    return model, *(random.standard_normal((TURN * 64, 1024), np.float32) for _ in range(2))


def conv() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """0.1 million parameters in three convolutions: much to compute, little to communicate."""
    layers: list[keras.Layer] = []
    for filters in (32, 64, 128):
        layers += [keras.layers.Conv2D(filters, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()]
    last = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *layers, *last])
    random = np.random.default_rng(0)
    x = random.standard_normal((TURN * 64, 32, 32, 3), np.float32)
    return model, x, random.standard_normal((TURN * 64, 10), np.float32)


MODELS = {"dense": dense, "conv": conv}


def turns_of(name: str, distribute: bool) -> Callable[[], None]:
    """A function that makes `TURN` steps."""
    keras.utils.set_random_seed(0)
    model, x, y = MODELS[name]()
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    # XLA compiles no collectives of TensorFlow; both variants do without it there.
    compiled = {"jit_compile": False} if keras.backend.backend() == "tensorflow" else {}
    model.compile(optimizer=ring.DistributedOptimizer(optimizer) if distribute else optimizer, loss="mse", **compiled)
    return lambda: model.fit(x, y, batch_size=64, shuffle=False, verbose=0)


def measure(turns: dict[str, Callable[[], None]], seconds: float) -> dict[str, tuple[list[float], float]]:
    """For each variant the quartiles of a step's seconds, and its processor seconds, on the slowest rank."""
    for turn in turns.values():
        turn()
        turn()
    times: dict[str, list[float]] = {name: [] for name in turns}
    busy: dict[str, list[float]] = {name: [] for name in turns}
    began = perf_counter()
    while True:
        for name, turn in turns.items():
            ring.barrier()
            started, used = perf_counter(), process_time()
            turn()
            times[name].append((perf_counter() - started) / TURN)
            busy[name].append((process_time() - used) / TURN)
        if ring.broadcast_object(perf_counter() - began > seconds and len(times["alone"]) >= 5):
            break
    own = {name: (quantiles(times[name], n=4), median(busy[name])) for name in turns}
    ranks = ring.allgather_object(own)
    return {name: max((rank[name] for rank in ranks), key=lambda figures: figures[0][1]) for name in turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dense,conv")
    parser.add_argument("--seconds", type=float, default=30.0, help="time for each model")
    arguments = parser.parse_args()
    ring.init()
    for number, name in enumerate(arguments.models.split(",")):
        variants = {"alone": turns_of(name, False), "ours": turns_of(name, True)}
        result = measure(variants, arguments.seconds)
        if ring.rank() == 0:
            if number == 0:
                load = os.getloadavg()[0]
                print(f"{ring.size()} ranks, Keras {keras.__version__}, {keras.backend.backend()}, load {load:.0f}\n")
                print("| model | variant | step | quartiles | processor time |\n|---|---|---|---|---|")
            (_, own, _), own_busy = result["alone"]
            for label, ((low, middle, high), busy) in result.items():
                shares = [f" ({1 - least / figure:.0%})" for least, figure in ((own, middle), (own_busy, busy))]
                if label == "alone":
                    shares = ["", ""]
                print(
                    f"| {name} | {label} | {middle * 1e3:.1f} ms{shares[0]} | {low * 1e3:.1f} to {high * 1e3:.1f} | "
                    f"{busy * 1e3:.1f} ms{shares[1]} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
