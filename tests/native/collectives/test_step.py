"""The fused optimizer step: its arithmetic is torch's, and what it needs is asked for before it begins."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from native.ranks import Seat, as_threads
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.partition import chunk_range, update_options

COUNT = 5003


class State:
    """A float32 tensor of the optimizer's state, as `Communicator.step` takes it."""

    def __init__(self, count: int) -> None:
        self.values = np.zeros(count, np.float32)

    def data_ptr(self) -> int:
        """As torch: 0 where there are no elements."""
        return self.values.ctypes.data if self.values.size else 0


def step(seat: Seat, options: dict[str, Any], states: int, count: int = COUNT) -> tuple[Any, list[State], slice]:
    """One step from zero with ``count`` gradients: the parameters, this rank's state, and where its chunk lies."""
    ring = seat.open()
    begin, end = chunk_range(count, ring.size, ring.rank, 4)
    gradients = Tensor.of(ring, gradient(count), DType.FLOAT32, ring=True)
    parameters = Tensor.of(ring, np.zeros(count), DType.FLOAT32, ring=True)
    state = [State(end - begin) for _ in range(states)]
    ring.step(gradients.buffer, parameters.buffer, *update_options(options), state, name="train")
    return parameters.values, state, slice(begin, end)


def gradient(count: int) -> Any:
    """Values of both signs and several magnitudes, float32."""
    return (np.sin(np.arange(count)) * 10.0 ** (np.arange(count) % 4)).astype(np.float32)


@pytest.mark.parametrize("beta2", [0.999, 0.9999, 0.99999])
def test_the_betas_are_rounded_once(beta2: float) -> None:
    """Moments of one step are (1 - beta) g and (1 - beta) g²: float32 of 1 - beta, not 1 - float32 of beta."""
    beta1 = 0.9
    options = {"rule": 1, "lr": 1e-3, "beta1": beta1, "beta2": beta2, "eps": 1e-8}
    options |= {"bias1": 1 - beta1, "bias2_root": math.sqrt(1 - beta2)}

    def body(seat: Seat) -> None:
        parameters, (mean, square), own = step(seat, options, 2)
        exact = gradient(COUNT).astype(np.float64)
        np.testing.assert_allclose(mean.values, ((1 - beta1) * exact)[own], rtol=3e-7)
        np.testing.assert_allclose(square.values, ((1 - beta2) * exact**2)[own], rtol=3e-7)
        np.testing.assert_allclose(parameters, -1e-3 * exact / (np.abs(exact) + 1e-8), rtol=1e-6)

    as_threads(2, body)


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ({"rule": 0, "lr": 0.1, "momentum": 0.9}, 0, "has 1 state tensors .* and 0 were given"),
        ({"rule": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.99}, 1, "has 2 state tensors .* and 1 were given"),
    ],
)
def test_state_that_is_missing_is_an_error(options: dict[str, Any], given: int, words: str) -> None:
    def body(seat: Seat) -> None:
        with pytest.raises(ValueError, match=words):
            step(seat, options, given)

    as_threads(2, body)


def test_who_owns_nothing_has_no_state() -> None:
    """Of 16 elements, a cache line, one of three ranks owns all."""

    def body(seat: Seat) -> None:
        parameters, _, _ = step(seat, {"rule": 0, "lr": 0.5, "momentum": 0.9, "first": True}, 1, count=16)
        np.testing.assert_allclose(parameters, -0.5 * gradient(16), rtol=1e-6)

    as_threads(3, body)
