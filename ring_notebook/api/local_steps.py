"""Local steps: their settings, and which part of a model is synced after which step.

Each rank steps on its own gradients. Every ``every`` steps the ranks average how far they have moved from the weights
that they last had in common, and an outer optimizer, SGD with Nesterov momentum, moves these common weights by the
average: DiLoCo (Douillard et al. 2023, arXiv:2311.08105). Without momentum and with a rate of 1 the common weights
become the average of the ranks' weights: local SGD (Stich 2019). Several fragments, each reduced in its turn while the
ranks make more steps, are Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ring_notebook.api.arguments import check_integer, check_scale
from ring_notebook.core.run_options import of_run


@dataclass(frozen=True)
class LocalSteps:
    """How ranks step alone: ``sync_every=ring.LocalSteps(50, fragments=4, delay=5)``. Beyond Horovod.

    every: local steps between two syncs of the same weights, at least 1.
    lr, momentum: of the outer optimizer, which is SGD with Nesterov momentum. The DiLoCo paper uses a momentum of 0.9
        for hundreds of rounds; the default of 0.5 also suits short trainings, and inner optimizers that have momentum.
        With ``lr=1, momentum=0`` the weights are averaged.
    fragments: parts of the model, each synced ``every`` steps, one after another, so that the link is used evenly.
        A fragment has whole parameters, in their order; a model with few has fewer fragments.
    delay: steps that a rank makes while a fragment is being reduced. Less than the steps between two fragments.
    alpha: the share of a rank's own weights that it keeps when it takes the new common ones; by default 0, and 0.5 with
        a ``delay``, as in the streaming paper. With 0 all ranks have the common weights after a sync.
    by_layer: record the distance between the ranks for each parameter too.

    Raises TypeError or ValueError for values that are out of range or contradict each other.
    """

    every: int
    lr: float = 0.7
    momentum: float = 0.5
    fragments: int = 1
    delay: int = 0
    alpha: float | None = None
    by_layer: bool = False

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            if check_integer(getattr(self, name), f"LocalSteps: {name}") < least:
                raise ValueError(f"LocalSteps: {name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < check_scale(self.lr, "LocalSteps: lr") < float("inf"):
            raise ValueError(f"LocalSteps: lr must be positive and finite, got {self.lr}")
        if not 0 <= check_scale(self.momentum, "LocalSteps: momentum") < 1:
            raise ValueError(f"LocalSteps: momentum must be at least 0 and less than 1, got {self.momentum}")
        if self.alpha is not None and not 0 <= check_scale(self.alpha, "LocalSteps: alpha") < 1:
            raise ValueError(f"LocalSteps: alpha must be at least 0 and less than 1, got {self.alpha}")
        if self.fragments > self.every:
            raise ValueError(
                f"LocalSteps: {self.fragments} fragments need as many steps between syncs, got every={self.every}"
            )
        if self.delay >= (gap := self.every // self.fragments):
            raise ValueError(
                f"LocalSteps: delay must be less than the {gap} steps between two fragments, got {self.delay}"
            )

    @property
    def kept(self) -> float:
        """The share of its own weights that a rank keeps."""
        return self.alpha if self.alpha is not None else 0.5 if self.delay else 0.0

    @property
    def ends_equal(self) -> bool:
        """Whether all ranks have the same weights at the end of each round of ``every`` steps."""
        return self.fragments == 1 and self.delay == 0 and self.kept == 0

    def due(self, position: int, fragments: int) -> int | None:
        """The fragment whose sync begins after step ``position`` (from 1) of a round; None if none does."""
        for number in range(fragments):
            if position == (number + 1) * self.every // fragments:
                return number
        return None


def settings_of(sync_every: int | LocalSteps | None) -> LocalSteps | None:
    """The settings for ``sync_every``, or by default for the run's; None to reduce gradients at every step.

    Raises TypeError or ValueError for another value.
    """
    if sync_every is None:
        sync_every = of_run.take("sync_every")
    if isinstance(sync_every, LocalSteps):
        return sync_every
    return None if check_integer(sync_every, "sync_every") == 1 else LocalSteps(sync_every)


def plan_fragments(sizes: Sequence[int], fragments: int) -> tuple[tuple[int, ...], ...]:
    """Divide parameters of these ``sizes``, in order, into up to ``fragments`` groups of indices, about equally large.

    No group is empty.
    """
    total, before = sum(sizes), 0
    parts: list[list[int]] = [[] for _ in range(fragments)]
    for index, size in enumerate(sizes):
        middle = before + size / 2
        parts[min(fragments - 1, int(middle * fragments / total)) if total else 0].append(index)
        before += size
    return tuple(tuple(part) for part in parts if part)
