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
from time import perf_counter

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
from in_turns import Turn, measure, print_head, print_rows

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


def turns_of(name: str, distribute: bool) -> Turn:
    """A turn of `TURN` steps in `fit`, which tells the mean of their seconds."""
    keras.utils.set_random_seed(0)
    model, x, y = MODELS[name]()
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    # XLA compiles no collectives of TensorFlow; both variants do without it there.
    compiled = {"jit_compile": False} if keras.backend.backend() == "tensorflow" else {}
    model.compile(optimizer=ring.DistributedOptimizer(optimizer) if distribute else optimizer, loss="mse", **compiled)

    def turn() -> list[float]:
        began = perf_counter()
        model.fit(x, y, batch_size=64, shuffle=False, verbose=0)
        return [(perf_counter() - began) / TURN]

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dense,conv")
    parser.add_argument("--seconds", type=float, default=30.0, help="time for each model")
    arguments = parser.parse_args()
    ring.init()
    for number, name in enumerate(arguments.models.split(",")):
        variants = {"alone": turns_of(name, False), "ours": turns_of(name, True)}
        result = measure(ring, variants, TURN, arguments.seconds)
        if ring.rank() == 0:
            if number == 0:
                print_head(ring, f"Keras {keras.__version__}, {keras.backend.backend()}")
            print_rows(name, result)


if __name__ == "__main__":
    main()
