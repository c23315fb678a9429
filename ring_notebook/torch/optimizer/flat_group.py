"""One parameter group of a fused optimizer in ring memory: values, gradients, and this rank's shard of the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ring_notebook.core.communicator import Communicator
from ring_notebook.core.partition import chunk_range
from ring_notebook.torch.tensors import empty_in

_ITEMSIZE = 4  # bytes of a float32
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(slots=True)
class FlatGroup:
    """All parameters of a group and their gradients, flat float32 in the order of registration."""

    parameters: list[Tensor]
    offsets: list[int]
    values: Tensor
    gradients: Tensor
    shard: slice
    """The elements that this rank updates."""
    state: list[Tensor]
    """This rank's shard of each state tensor; empty until a step needs it (SGD's momentum may start later)."""
    steps: int = 0
    whole: list[Tensor] | None = None
    """The whole state, between loading it and the next step: the ranks may change in between."""

    @classmethod
    def of(cls, parameters: list[Tensor], mates: Communicator) -> FlatGroup:
        """Move ``parameters`` into ring memory that the ranks of ``mates`` share, and divide the work among them.

        Parameters on a device stay there; each step copies them to ring memory.
        """
        align = _ALIGNMENT // _ITEMSIZE
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.numel() // align) * align
        values = empty_in(mates, [end], torch.float32).zero_()
        gradients = empty_in(mates, [end], torch.float32).zero_()
        begin, stop = chunk_range(end, mates.size, mates.rank, _ITEMSIZE)
        flat = cls(parameters, offsets, values, gradients, slice(begin, stop), [])
        with torch.no_grad():
            for parameter, part in flat.parts(values):
                part.copy_(parameter)
                if parameter.is_cpu:
                    parameter.data = part
        return flat

    def parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every parameter with its part of a flat tensor, in the parameter's shape."""
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            yield parameter, flat[offset : offset + parameter.numel()].view(parameter.shape)

    def check(self, rank: int) -> None:
        """Raise ValueError for a parameter without a gradient, RuntimeError for one that has left ring memory."""
        for position, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                raise ValueError(
                    f"rank {rank}: parameter {position} of shape {tuple(parameter.shape)} has no gradient; a fused "
                    "step needs a gradient of every parameter on every rank. Freeze the parameter before wrapping, or "
                    "leave fused out"
                )
            moved = (
                parameter.is_cpu and parameter.data_ptr() != self.values.data_ptr() + self.offsets[position] * _ITEMSIZE
            )
            if moved and parameter.numel():  # an empty one has no address
                raise RuntimeError(
                    f"rank {rank}: parameter {position} of shape {tuple(parameter.shape)} was moved out of ring "
                    "memory; wrap the optimizer again"
                )

    def take_gradients(self) -> None:
        """Copy the parameters' gradients into `gradients`, and the values of parameters on a device into `values`."""
        for parameter, part in self.parts(self.values):
            if not parameter.is_cpu:
                part.copy_(parameter.detach())
        for parameter, part in self.parts(self.gradients):
            grad = parameter.grad
            assert grad is not None
            part.copy_(grad.to_dense() if grad.is_sparse else grad)

    @torch.no_grad()
    def give_values(self) -> None:
        """Copy `values` into the parameters that are on a device."""
        for parameter, part in self.parts(self.values):
            if not parameter.is_cpu:
                parameter.copy_(part)

    def state_for_step(self, count: int) -> list[Tensor]:
        """``count`` state tensors of the shard; zeros before the first step that needs them."""
        if len(self.state) >= count:
            return self.state
        return [torch.zeros_like(self.values[self.shard]) for _ in range(count)]

    def take_state(self, state: Mapping[Tensor, Mapping[str, Any]], keys: Sequence[str]) -> None:
        """Take this rank's shard of torch's state by parameter, under ``keys``."""
        known = [state[parameter] for parameter in self.parameters if parameter in state]
        self.whole = []
        for key in keys:
            if all(entry.get(key) is None for entry in known):
                continue
            whole = torch.zeros_like(self.values)
            for parameter, part in self.parts(whole):
                value = state.get(parameter, {}).get(key)
                if value is not None:
                    part.copy_(value)
            self.whole.append(whole)
        self.state = self.shards_of(self.whole)
        self.steps = max((int(entry["step"]) for entry in known if "step" in entry), default=0)

    def shards_of(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shard of each tensor, as a copy."""
        return [tensor[self.shard].clone() for tensor in whole]
