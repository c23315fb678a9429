"""Checks that ranks make the same step from the same weights: the name of a commit has a hash of both."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from warnings import warn
from zlib import crc32

import torch
from torch import Tensor

from ring_notebook.api.basics import joins
from ring_notebook.api.objects import gather_objects
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core import world
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.step_guard import COMMIT
from ring_notebook.errors import CollectiveMismatch, DriftError
from ring_notebook.torch.tensors import in_memory_order, real_view

_BYTES = 64
"""Bytes of a tensor to read at a step, at a place that moves with every step."""
_TENSORS = 64
"""Most tensors to read at a step; larger models take turns."""
_DEVICE_EVERY = 16
"""Steps between two reads of weights on a device, for which the host waits."""
_ROUNDING = 1e-4
"""Largest relative difference that counts as rounding."""

Named = Sequence[tuple[str, Tensor]]
T = TypeVar("T")


class SameStep:
    """The steps of one optimizer in a generation, and a sample of its weights."""

    def __init__(self, compares: bool = False) -> None:
        self.compares = compares
        """Whether all ranks must have equal weights before each step, as after `prepare`."""
        self._generation: weakref.ref[Communicator] | None = None
        self._made = self._joins = 0
        self._bytes: dict[Tensor, tuple[int, memoryview]] = {}

    def __reduce__(self) -> Any:  # without what belongs to a generation
        return SameStep, (self.compares,)

    def commit(
        self,
        process_set: ProcessSet,
        named: Callable[[], Named],
        by_name: Callable[[str], T],
        scale: float | None = None,
    ) -> T:
        """Commit to the next step, by a call of ``by_name``. ``scale`` is a GradScaler's."""
        try:
            result = by_name(self._name(process_set, named, scale))
        except CollectiveMismatch as mismatch:
            self._judge(mismatch, process_set, named)
            result = by_name(self._name(process_set, named, scale))
        self._made += 1
        return result

    def _name(self, process_set: ProcessSet, named: Callable[[], Named], scale: float | None) -> str:
        communicator = process_set.communicator if process_set.included() else None
        is_known = self._generation is not None and self._generation() is communicator and self._joins == joins()
        if communicator is None or not is_known:  # ranks that had joined have made fewer steps
            self._generation = None if communicator is None else weakref.ref(communicator)
            self._made, self._joins = 0, joins()
            self._bytes.clear()
        text = f"{COMMIT} {self._made + 1}"
        if scale is not None:
            text += f" at scale {scale:g}"
        if self.compares:
            text += f", weights {self._sample(named()):08x}"
        return text

    def _judge(self, mismatch: CollectiveMismatch, process_set: ProcessSet, named: Callable[[], Named]) -> None:
        """Raise an error for a mismatch of commits; return if the weights differ only by rounding.

        Called on all ranks of the set. If all have committed, they compare their weights.
        """
        ranks = process_set.ranks or []
        callers = " ".join(re.findall(rf"^  ranks? ([\d, -]+): commit '{COMMIT} ", str(mismatch), re.MULTILINE))
        ranges = re.findall(r"(\d+)(?:-(\d+))?", callers)
        if not self.compares or sum(int(last or first) - int(first) + 1 for first, last in ranges) < len(ranks):
            raise mismatch
        own = [(name, _numbers(tensor)) for name, tensor in self._chosen(named())]
        rows: list[tuple[int, Any]] = gather_objects((self._made, own), "weights before a step", process_set)
        if len({made for made, _ in rows}) > 1 or len({len(row) for _, row in rows}) > 1:
            raise mismatch
        differing: dict[str, float] = {}
        for sampled in zip(*(row for _, row in rows), strict=True):
            values = torch.tensor([numbers for _, numbers in sampled], dtype=torch.float64, device="cpu")
            if values.numel() and (share := _apart(values)):
                differing[sampled[0][0]] = share
        if not differing:
            raise mismatch
        listed = ", ".join(list(differing)[:4]) + (" and others" if len(differing) > 4 else "")
        if max(differing.values()) <= _ROUNDING:
            self.compares = False
            if process_set.rank() == 0:
                warn(
                    f"the weights of the ranks differ by rounding ({listed}): something changes them beside the "
                    "optimizer's step, and computes a little differently on each rank; they are no longer compared",
                    stacklevel=2,
                )
            return
        raise DriftError(
            f"rank {world.current().rank}: before step {self._made + 1} of this run the ranks have different weights: "
            f"{listed} differ. Something has changed them outside of a step that all ranks make, or by gradients that "
            "are not averages: change weights on all ranks alike, from values that are equal on all. "
            "broadcast_parameters(model.state_dict(), root_rank=0), or prepare() again, makes them equal"
        ) from mismatch

    def _chosen(self, named: Named) -> Named:
        trained = [pair for pair in named if pair[1].requires_grad]
        turns = -(-len(trained) // _TENSORS)
        return trained[self._made % turns :: turns] if turns > 1 else trained

    def _sample(self, named: Named) -> int:
        found = 0
        on_device = self._made % _DEVICE_EVERY == 0
        for _, tensor in self._chosen(named):
            if tensor.is_cpu:
                memory = self._memory_of(tensor)
                at = self._made * 7919 % (len(memory) // _BYTES or 1) * _BYTES
                found = crc32(memory[at : at + _BYTES], crc32(memory[:_BYTES], found))
            elif on_device:
                found = crc32(repr(_numbers(tensor)).encode(), found)
        return found

    def _memory_of(self, tensor: Tensor) -> memoryview:
        known = self._bytes.get(tensor)
        if known is None or known[0] != tensor.data_ptr():
            flat = in_memory_order(real_view(tensor.detach()))
            # Tensors with gaps are not read, because copying them at every step costs too much.
            numbers: Any = flat.reshape(-1).view(torch.uint8).numpy() if flat.is_contiguous() else b""
            known = self._bytes[tensor] = tensor.data_ptr(), memoryview(numbers)
        return known[1]


def _apart(values: Tensor) -> float:
    """The largest difference between rows, relative to the largest value of its column."""
    least = torch.finfo(torch.float64).tiny
    return float(
        ((values.amax(0) - values.amin(0)) / values.abs().amax(0).clamp(min=least)).nan_to_num(torch.inf).max()
    )


def _numbers(tensor: Tensor) -> list[float]:
    """A sample of a tensor: its first numbers, and some at equal distances."""
    flat = real_view(tensor.detach()).reshape(-1)
    found: list[float] = torch.cat([flat[:16], flat[:: max(1, flat.numel() // 64)][:64]]).double().tolist()
    return found
