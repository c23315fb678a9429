"""What has to be equal on all ranks of a training, by name, and numbers that stand for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["digest", "is_shared", "options_of", "shared_buffers", "state_of"]

_LOCAL = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of a batch norm whose ranks keep to their own batches."""
_WORD = 8  # bytes


def digest(name: str, value: Any) -> int:
    """63 bits that stand for a tensor, or another value, and its name.

    Of a tensor they hold the sum of its memory as words of 64 bits: that is as fast as memory is read, and tensors
    that differ by chance have equal sums once in 2**64 times. Elements that have changed places are not seen.
    """
    if not isinstance(value, Tensor):
        return _hash(f"{name} {value!r}")
    tensor = value.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    words = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = words.numel() // _WORD * _WORD
    sums = [words[whole:].sum(dtype=torch.int64)]
    if words.storage_offset() % _WORD == 0 and words.data_ptr() % _WORD == 0:
        sums.append(words[:whole].view(torch.int64).sum())
    else:
        sums.append(words[:whole].clone().view(torch.int64).sum())
    return _hash(f"{name} {tuple(tensor.shape)} {tensor.dtype} {[int(one) for one in sums]}")


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def state_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    """The state of every parameter, also where it is a number."""
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            owner = names.get(parameter, f"group {g} parameter {i}")
            for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda entry: str(entry[0])):
                yield from _tensors(f"optimizer state {key} of {owner}", value)


def _tensors(label: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, (Tensor, int, float)):
        yield label, value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    elif isinstance(value, (list, tuple)):  # of LBFGS
        for number, one in enumerate(value):
            yield from _tensors(f"{label} {number}", one)


def options_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """The options of every group, such as the learning rate that a schedule has set."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):
            if isinstance(value, (bool, int, float, str, tuple, type(None))):
                yield f"option {key} of group {number}", value
            elif isinstance(value, Tensor):
                yield f"option {key} of group {number}", float(value)


def shared_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that all ranks share."""
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_shared(name, module):
                yield f"buffer {place}.{name}" if place else f"buffer {name}", buffer


def is_shared(name: str, module: nn.Module | None = None) -> bool:
    """Whether ranks share a buffer of this name: no statistics of their own batches, unless ``module`` adds them up."""
    own = name.rpartition(".")[2] in _LOCAL
    return not own or any(kind.__name__ == "SyncBatchNorm" for kind in type(module).__mro__)
