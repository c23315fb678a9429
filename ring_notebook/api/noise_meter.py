"""Measures the gradient noise scale of the gradients that are reduced (McCandlish et al. 2018)."""

from __future__ import annotations

import math

from ring_notebook.api.arguments import Reduction
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core import metrics
from ring_notebook.core.communicator import ReduceOp


class NoiseMeter:
    """Measures every ``every``-th round of a reducer; with ``carry`` all logged rows get the result.

    ``batch_size`` is the number of samples of one rank in a backward pass, None while unknown.
    """

    def __init__(self, every: int, batch_size: float | None, *, carry: bool) -> None:
        self.batch_size = batch_size
        self.smoothing = 0.9
        self._every = every
        self._carry = carry
        self._rounds = 0
        # |G|² and tr(S) for batches of one backward pass of one rank, smoothed separately: the ratio of averages is
        # not the average of ratios.
        self._estimates: tuple[float, float] | None = None

    @property
    def wanted(self) -> bool:
        """Whether the present round is measured."""
        return (self._rounds + 1) % self._every == 0

    def end_round(self, here: float, reduced: float, passes: int, how: Reduction) -> None:
        """Add a round: ``here`` and ``reduced`` are the squared norms of this rank's and of the reduced gradient.

        All ranks call this; for a measured round they exchange 16 bytes. A round whose gradients overflowed, as they
        may under a GradScaler, does not count.
        """
        wanted = self.wanted
        self._rounds += 1
        if not wanted:
            return
        size = how.process_set.size()
        shared = [here, float(passes)]
        small, accumulated = allreduce_numbers(shared, ReduceOp.AVERAGE, "noise scale", how.process_set)
        # The reduction multiplies by the factors of `how`, such as that of a mean over micro-batches.
        large = reduced / (how.prescale * how.postscale * (size if how.op is ReduceOp.SUM else 1)) ** 2
        if not (math.isfinite(small) and math.isfinite(large) and accumulated > 0):
            return
        # Equations A.2 and A.3; the small batch is one rank's in a round, the big one is `size` times as large.
        # The gradients of a round are the sum over its backward passes; divided by their number they are a mean.
        signal = (size * large - small) / (size - 1) / accumulated**2
        noise = (small - large) / (1.0 - 1.0 / size) / accumulated
        before = self._estimates or (signal, noise)
        keep = self.smoothing
        self._estimates = (keep * before[0] + (1 - keep) * signal, keep * before[1] + (1 - keep) * noise)
        value = self.value()
        if self._carry and math.isfinite(value):
            metrics.carry(noise_scale=value)

    def value(self) -> float:
        """B_simple in samples; NaN before the first measurement, and while an estimate is not positive."""
        if self._estimates is None or self.batch_size is None:
            return math.nan
        signal, noise = self._estimates
        return noise / signal * self.batch_size if signal > 0 and noise > 0 else math.nan
