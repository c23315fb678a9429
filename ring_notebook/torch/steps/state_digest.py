"""The values that must be equal on all ranks of a training, by name, and their digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from ring_notebook.torch.tensors import is_sharded, parts_of

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of a batch norm, which differ by rank because each rank has its own batches."""
_WORD = 8  # bytes
SHARES = 16
"""Shares of the blocks of a large tensor, each compared at a step of its own."""
_BLOCK = 512  # words, 4 KiB


def marks(values: Mapping[str, Any], share: int | None = None) -> dict[str, Any]:
    """A mark of each of ``values``: shape, dtype and a sum of a tensor, the text of another value.

    With ``share`` it sums only that share of each tensor's blocks; tensors under 64 KiB belong to share 0.

    The sum adds a tensor's memory as words of 64 bits: it is as fast as reading memory, and the sums of two different
    tensors are equal by chance once in 2**64 times. It does not notice swapped words. Waits for a device once.
    """
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    found: dict[str, Any] = {name: repr(value) for name, value in values.items() if name not in tensors}
    sums = {name: word_sum(value, share) for name, value in tensors.items() if not share or _is_large(value)}
    for device in {one.device for one in sums.values()}:
        names = [name for name, one in sums.items() if one.device == device]
        totals: list[int] = torch.stack([sums[name] for name in names]).tolist()
        found.update((n, (tuple(values[n].shape), values[n].dtype, t)) for n, t in zip(names, totals, strict=True))
    return found


def has_shares(values: Mapping[str, Any]) -> bool:
    """Whether a tensor is compared in several shares; if none is, share 0 has everything."""
    return any(isinstance(value, Tensor) and _is_large(value) for value in values.values())


def digest(marks: Mapping[str, Any]) -> int:
    """A digest of all marks, of 63 bits."""
    text = repr(sorted(marks.items()))
    return int.from_bytes(blake2b(text.encode(), digest_size=_WORD).digest(), "big") >> 1


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= SHARES * _BLOCK * _WORD


def word_sum(tensor: Tensor, share: int | None = None) -> Tensor:
    """The sum of a tensor's memory as words of 64 bits, see `marks`, on its device."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    memory = tensor.contiguous().reshape(-1)
    if memory.storage_offset() * memory.element_size() % _WORD or memory.data_ptr() % _WORD:
        memory = memory.clone()
    size, rest = memory.numel() * memory.element_size(), None
    if size % _WORD:
        memory, rest = memory.view(torch.uint8)[: -(size % _WORD)], memory.view(torch.uint8)[-(size % _WORD) :]
    words = memory.view(torch.int64)
    if share is not None and _is_large(tensor):
        blocks = words[: len(words) // (SHARES * _BLOCK) * SHARES * _BLOCK].view(-1, SHARES, _BLOCK)
        if share:
            return blocks[:, share].sum()
        total = blocks[:, share].sum() + words[blocks.numel() :].sum()
    else:
        total = words.sum()
    return total if rest is None else total + rest.sum(dtype=torch.int64)


def state_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    """The state of every parameter, tensors and numbers."""
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            owner = names.get(parameter, f"group {g} parameter {i}")
            for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda entry: str(entry[0])):
                yield from _tensors(f"optimizer state {key} of {owner}", value)


def _tensors(label: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not is_sharded(value):
            yield from parts_of(label, value)
    elif isinstance(value, (int, float)):
        yield label, torch.tensor(value, device="cpu")
    elif isinstance(value, (list, tuple)):  # of LBFGS
        for number, one in enumerate(value):
            yield from _tensors(f"{label} {number}", one)


def options_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """The options of every group, such as the learning rate that a schedule has set."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):
            if isinstance(value, (bool, int, float, str, tuple, type(None))):
                yield f"option {key} of group {number}", value
            elif isinstance(value, list) and key != "params":
                yield f"option {key} of group {number}", tuple(value)
            elif isinstance(value, Tensor):
                yield f"option {key} of group {number}", float(value)


def shared_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that all ranks share."""
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_shared(name, module):
                yield f"buffer {place}.{name}" if place else f"buffer {name}", buffer


def is_shared(name: str, module: nn.Module | None = None) -> bool:
    """Whether a buffer is equal on all ranks: all but batch norm statistics, unless ``module`` syncs them."""
    own = name.rpartition(".")[2] in STATISTICS
    return not own or any(kind.__name__ == "SyncBatchNorm" for kind in type(module).__mro__)
