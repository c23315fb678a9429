"""The optimizer for Adasum: every rank makes its own step, and the steps are combined instead of the gradients.

Adasum (Maleki et al. 2020) adds the orthogonal components of two ranks' updates and averages the parallel ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ring_notebook.api.arguments import Reduction
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.torch.collectives.allreduce import start
from ring_notebook.torch.compression import Compressor
from ring_notebook.torch.optimizer.wrapper import Wrapper, once
from ring_notebook.torch.steps.optimizer_knobs import count_step
from ring_notebook.torch.steps.repair import Shared
from ring_notebook.torch.steps.step_commit import Undo, all_or_none


class AdasumOptimizer(Wrapper):
    """Mixed into the class of the wrapped optimizer by `DistributedOptimizer` for ``op=Adasum``."""

    option = "op=Adasum"
    _compression: Compressor

    def synchronize(self) -> None:
        """Does nothing: ranks combine their steps in `step`, not their gradients."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raises RuntimeError: an Adasum step cannot be made without the other ranks."""
        raise RuntimeError("skip_synchronize() is not supported with op=Adasum; call step() alone")

    @torch.no_grad()
    @once
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the wrapped optimizer on this rank's gradients, and combine it with the other ranks' steps."""
        self._check_newest()
        if self._mend(self._process_set, self._shared):
            self._mark_stepped()
            return None
        with self._unscaled() as overflowed:
            if overflowed(self._process_set):
                self._mark_stepped()
                return None
            with (
                self._own_step(),
                all_or_none(self, self._process_set, self._end_step, self._combine, self._committed),
            ):
                return super().step(closure)

    def _end_step(self) -> None:
        count_step(self._wrapped)
        self._mark_stepped()

    def _shared(self) -> Shared:
        # Each rank's optimizer state differs, because it comes from the rank's own gradients.
        return Shared(self._wrapped, self._parameter_names, self._process_set, state=False)

    def _combine(self, before: Undo) -> None:
        """Replace this rank's step by the combination of all ranks' steps."""
        trained = [(p, begin) for p, begin in before.values if p.requires_grad]
        pairs = [self._compression.compress(p - begin) for p, begin in trained]
        how = Reduction(ReduceOp.ADASUM, 1.0, 1.0, self._process_set)
        deltas = start([wire for wire, _ in pairs], how, "Adasum steps", blocking=True).wait()
        for (p, begin), delta, (_, ctx) in zip(trained, deltas, pairs, strict=True):
            p.copy_(begin + self._compression.decompress(delta, ctx))
