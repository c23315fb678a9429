"""The optimizers whose update the native core has: supported options, fields, state; and equal options on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.objects import allreduce_numbers, gather_objects
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.torch.devices import address_of
from ring_notebook.torch.optimizer.wrapper import original_of

_SUPPORTED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def check_fusable(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError, with the reason, for an optimizer that a fused step cannot update."""
    kind = type(original_of(optimizer))
    if kind not in _SUPPORTED:
        names = ", ".join(supported.__name__ for supported in _SUPPORTED)
        raise ValueError(f"fused=True supports {names}, got {kind.__name__}; leave fused out")
    for group in optimizer.param_groups:
        check_options(group)
        check_parameters(group)
    spans = sorted(_span(p) for group in optimizer.param_groups for p in group["params"] if p.numel())
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise ValueError("fused=True gives each parameter memory of its own; these parameters share memory")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the byte after the last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = address_of(tensor)
    return begin, begin + (last + 1) * tensor.element_size()


def check_options(group: dict[str, Any]) -> None:
    """Raise ValueError for options of a group that the native update lacks."""
    if group.get("amsgrad") or group.get("differentiable") or isinstance(group["lr"], Tensor):
        raise ValueError("fused=True supports neither amsgrad, differentiable nor a tensor as learning rate")


def check_parameters(group: dict[str, Any]) -> None:
    """Raise ValueError for parameters of a group that the native update cannot write."""
    for parameter in group["params"]:
        if parameter.dtype != torch.float32 or not parameter.requires_grad:
            raise ValueError(
                f"fused=True supports trainable float32 parameters, got {parameter.dtype} with "
                f"requires_grad={parameter.requires_grad}"
            )


def state_keys(kind: type) -> list[str]:
    """The names under which torch keeps the state tensors of a parameter."""
    return ["momentum_buffer"] if kind is torch.optim.SGD else ["exp_avg", "exp_avg_sq"]


def states_needed(kind: type, group: dict[str, Any]) -> int:
    """The number of state tensors that a step with these options reads and writes."""
    return int(group["momentum"] != 0) if kind is torch.optim.SGD else 2


def update_fields(kind: type, group: dict[str, Any], steps: int, *, first: bool) -> dict[str, Any]:
    """The fields of the native Update for step ``steps`` (from 1); ``first``: the state starts with this step."""
    fields = {"lr": group["lr"], "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
    if kind is torch.optim.SGD:
        return fields | {
            "rule": 0,
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "nesterov": group["nesterov"],
            "first": first,
        }
    beta1, beta2 = group["betas"]
    return fields | {
        "rule": 1,
        "beta1": beta1,
        "beta2": beta2,
        "eps": group["eps"],
        "decoupled": kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")),
        "bias1": 1 - beta1**steps,
        "bias2_root": math.sqrt(1 - beta2**steps),
    }


Options = dict[str, Any]


def check_same_options(groups: Sequence[Options], process_set: ProcessSet) -> None:
    """Raise CollectiveMismatch on every rank, naming the first group that differs, unless all ranks have ``groups``."""
    digest = int.from_bytes(blake2b(repr(groups).encode(), digest_size=7).digest(), "big")
    extremes = [digest, -digest]  # the maxima are the greatest digest, and minus the smallest
    greatest, least = allreduce_numbers(extremes, ReduceOp.MAX, "fused options", process_set)
    if greatest != -least:
        raise CollectiveMismatch(_difference(groups, process_set))


def _difference(groups: Sequence[Options], process_set: ProcessSet) -> str:
    ranks = process_set.ranks or []
    lists: list[list[Options]] = gather_objects(list(groups), "fused options", process_set)
    here = f"rank {ranks[process_set.rank()]}: step: "
    for rank, other in zip(ranks[1:], lists[1:], strict=True):
        for number, (first, second) in enumerate(zip(lists[0], other, strict=False)):
            names = [name for name in first if first[name] != second.get(name)]
            if names:
                shown = (", ".join(f"{name}={one.get(name)}" for name in names) for one in (first, second))
                return (
                    f"{here}the ranks disagree on parameter group {number}: rank {ranks[0]} has {next(shown)}, rank "
                    f"{rank} has {next(shown)}. No parameter was updated; set the same options on every rank and call "
                    "step() again"
                )
    return (
        f"{here}the ranks have different numbers of parameter groups, by rank: {[len(other) for other in lists]}; "
        "build the same optimizer on every rank"
    )
