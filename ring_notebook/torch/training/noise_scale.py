"""The gradient noise scale: the largest batch that still pays (McCandlish et al. 2018)."""

from __future__ import annotations

import math

import torch

from ring_notebook.api.noise_meter import NoiseMeter
from ring_notebook.torch.optimizer.reducing_optimizer import ReducingOptimizer

NOISE_EVERY = 10
"""Steps between measurements under `prepare`: each costs a pass over the gradients and one over their sum."""


def noise_scale(optimizer: torch.optim.Optimizer, batch_size: float | None = None, smoothing: float = 0.9) -> float:
    """B_simple of the gradients that ``optimizer`` reduces, in samples: larger batches than this gain little.

    B_simple = tr(S) / |G|² (McCandlish et al. 2018, appendix A.1): much smaller batches waste no sample, much larger
    ones waste most. Both parts are estimated from the squared norms of the ranks' gradients (small batch) and of their
    average (large batch), and smoothed exponentially: ``smoothing`` is the weight of the past.

    ``batch_size`` is the number of samples of one rank in a backward pass; `prepare` takes it from the loader.
    Accumulated passes are counted. ``prepare(..., noise_scale=True)`` measures in every 10th step and adds the value to
    the rows of `log`; otherwise the first call, on all ranks, begins to measure in every step. It waits for no rank.

    Returns NaN before the first measurement, at size 1, and while the estimates are not positive. Raises TypeError when
    ``optimizer`` is not a DistributedOptimizer, or has ``op=Adasum``, which reduces no gradients, and ValueError when
    the batch size is not known.
    """
    reducer = _reducing(optimizer)._reducer
    meter = reducer.meter
    if meter is None:
        meter = reducer.meter = NoiseMeter(1, reducer.batch_size, carry=False)
    if batch_size is not None:
        meter.batch_size = batch_size
    meter.smoothing = smoothing
    if meter.batch_size is None:
        raise ValueError(
            "noise_scale needs to know how many samples a rank has in a backward pass: pass batch_size, or give the "
            "loader to prepare()"
        )
    process_set = reducer.how.process_set
    return meter.value() if process_set.included() else math.nan


def measure_noise(optimizer: torch.optim.Optimizer, every: int) -> None:
    """Measure in every ``every``-th step of ``optimizer``, and add the value to the rows of `log`.

    Raises the errors of `noise_scale`, and ValueError for ``every`` below 1.
    """
    if every < 1:
        raise ValueError(f"noise_scale must be at least 1 (steps between two measurements), got {every}")
    noise_scale(optimizer)
    reducer = _reducing(optimizer)._reducer
    reducer.meter = NoiseMeter(every, reducer.batch_size, carry=True)


def _reducing(optimizer: torch.optim.Optimizer) -> ReducingOptimizer:
    if not isinstance(optimizer, ReducingOptimizer):
        raise TypeError(
            "noise_scale takes an optimizer from DistributedOptimizer or prepare, without op=Adasum and sync_every, "
            f"got another {type(optimizer).__name__}"
        )
    return optimizer
