"""The gradient noise scale: how large a batch still pays (McCandlish et al. 2018)."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch

from ring_notebook.core.communicator import ReduceOp
from ring_notebook.torch.optimizer import ReducingOptimizer
from ring_notebook.torch.reducing import allreduce_

__all__ = ["noise_scale"]


def noise_scale(optimizer: torch.optim.Optimizer, batch_size: float = 1.0, smoothing: float = 0.9) -> float:
    """B_simple of the gradients that ``optimizer`` reduces, in samples when ``batch_size`` is that of one rank.

    B_simple = tr(S) / |G|² (McCandlish et al. 2018, appendix A.1): batches much smaller waste no sample, much larger
    ones waste most. Both parts are estimated from the squared norms of the ranks' gradients (small batch) and of their
    average (large batch), smoothed over the steps. Call it on all ranks after each step, for example as
    ``ring.log(noise_scale=ring.noise_scale(optimizer, 64))``. NaN in the first step, which turns the measuring on, at
    size 1, and while the estimates are not positive. Raises TypeError when ``optimizer`` is no DistributedOptimizer.
    """
    if not isinstance(optimizer, ReducingOptimizer):
        raise TypeError("noise_scale takes an optimizer that DistributedOptimizer or prepare made")
    reducer = optimizer._reducer
    process_set = reducer.how.process_set
    if not process_set.included() or process_set.size() == 1:
        return math.nan
    size = process_set.size()
    if reducer.squares is None:
        reducer.measuring = True
        return math.nan
    here, reduced = reducer.squares
    small = allreduce_(
        torch.tensor([here], dtype=torch.float64), op=ReduceOp.AVERAGE, name="noise scale", process_set=process_set
    ).item()
    large = reduced / (size**2 if reducer.how.op is ReduceOp.SUM else 1)
    # Equations A.2 and A.3, with batches of 1 and of `size` times `batch_size`.
    signal = (size * large - small) / (size - 1)
    noise = (small - large) / (1.0 - 1.0 / size) * batch_size
    before_signal, before_noise = _smoothed.get(optimizer, (signal, noise))
    signal = smoothing * before_signal + (1 - smoothing) * signal
    noise = smoothing * before_noise + (1 - smoothing) * noise
    _smoothed[optimizer] = (signal, noise)
    return noise / signal if signal > 0 and noise > 0 else math.nan


# (|G|², tr(S)) of each optimizer, smoothed apart: their ratio is not an average of ratios.
_smoothed: WeakKeyDictionary[torch.optim.Optimizer, tuple[float, float]] = WeakKeyDictionary()
