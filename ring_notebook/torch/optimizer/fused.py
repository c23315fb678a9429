"""The fused step: gradients are summed, the optimizer's update made and the parameters sent, in one native pass.

Every rank updates the chunk of the parameters that it owns, with optimizer state that it alone holds (Rajbhandari et
al. 2020 call that ZeRO stage 1), and writes the result into the parameters of all ranks. What a step moves is two
thirds of what an allreduce and a separate step move, and Adam's state takes 1/p of the memory.

Parameters and gradients of a parameter group lie flat in ring memory, in the order of registration; `torch.save` of one
of them alone therefore writes its whole group (clone it first). With several hosts the gradients are summed between
them first, and the ranks of each host share the rest of the work among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.partition import chunk_range, update_options
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.torch.collectives.allreduce import allreduce
from ring_notebook.torch.collectives.ring_memory import empty_in
from ring_notebook.torch.optimizer.wrapper import Wrapper, average_loss, original_of
from ring_notebook.torch.process_sets import ProcessSet
from ring_notebook.torch.tensors import buffer_of, from_bytes

__all__ = ["FusedOptimizer", "check_fusable"]

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector

_SUPPORTED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose update the native core has."""


def check_fusable(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError, saying why, for what a fused step cannot do."""
    kind = type(original_of(optimizer))
    if kind not in _SUPPORTED:
        names = ", ".join(supported.__name__ for supported in _SUPPORTED)
        raise ValueError(f"fused=True knows {names}, not {kind.__name__}; leave fused out")
    for group in optimizer.param_groups:
        _check_options(group)
        _check_parameters(group)
    spans = sorted(_span(p) for group in optimizer.param_groups for p in group["params"] if p.numel())
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise ValueError("fused=True takes parameters that share no memory with one another; it gives each its own")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last one."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_options(group: dict[str, Any]) -> None:
    if group.get("amsgrad") or group.get("differentiable") or isinstance(group["lr"], Tensor):
        raise ValueError("fused=True takes neither amsgrad, differentiable nor a tensor as learning rate")


def _check_parameters(group: dict[str, Any]) -> None:
    for parameter in group["params"]:
        if parameter.dtype != torch.float32 or not parameter.is_cpu or not parameter.requires_grad:
            raise ValueError(
                f"fused=True takes trainable float32 parameters on the CPU, not {parameter.dtype} on "
                f"{parameter.device} with requires_grad={parameter.requires_grad}"
            )


@dataclass(slots=True)
class _Flat:
    """The parameters of one group: all of them and their gradients in ring memory, and this rank's shard of state."""

    parameters: list[Tensor]
    offsets: list[int]
    values: Tensor
    gradients: Tensor
    shard: slice
    state: list[Tensor]
    """None of it before it is needed: SGD's momentum may be turned on in the middle."""
    steps: int = 0
    whole: list[Tensor] | None = None
    """The state of all ranks, from when it was loaded until the next step: other ranks may be there by then."""

    def parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every parameter with its part of a flat tensor, in its shape."""
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            yield parameter, flat[offset : offset + parameter.numel()].view(parameter.shape)


class FusedOptimizer(Wrapper):
    """Mixed into the class of the wrapped optimizer by ``DistributedOptimizer(..., fused=True)``."""

    _process_set: ProcessSet
    _op: ReduceOp
    _flats: list[_Flat]
    _communicator: Communicator
    _mates: Communicator
    """The ranks of this host, which write into one another's parameters."""

    _torn = False
    """A step was given up in the middle, with parameters and state that are partly new."""

    def _prepare(self, process_set: ProcessSet, op: ReduceOp) -> None:
        self._patch_step_function()  # hooks: the wrapped class's step, which has them, is not called
        self._process_set, self._op = process_set, op
        self._communicator = process_set.communicator
        self._mates = self._communicator.mates()
        self._flats = []
        for group in self.param_groups:
            self._add_flat(group)
        self.state.clear()

    def _add_flat(self, group: dict[str, Any]) -> None:
        flat = self._flatten(group["params"])
        self._take_state(flat)
        self._flats.append(flat)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's own; all ranks must call this. Raises ValueError for what a fused step cannot update."""
        self._follow_ranks()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            _check_parameters(group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._add_flat(group)

    def synchronize(self) -> None:
        """Raises RuntimeError: gradients are summed and used in one pass."""
        raise RuntimeError(
            "with fused=True gradients are summed and used in one pass, with nothing between; to clip or unscale them "
            "leave fused out"
        )

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raises RuntimeError, as `synchronize`."""
        self.synchronize()
        raise AssertionError

    def _flatten(self, parameters: list[Tensor]) -> _Flat:
        align = _ALIGNMENT // 4
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.numel() // align) * align
        values = empty_in(self._mates, [end], torch.float32).zero_()
        gradients = empty_in(self._mates, [end], torch.float32).zero_()
        begin, stop = chunk_range(end, self._mates.size, self._mates.rank, 4)
        flat = _Flat(parameters, offsets, values, gradients, slice(begin, stop), [])
        with torch.no_grad():
            for parameter, part in flat.parts(values):
                part.copy_(parameter)
                parameter.data = part
        return flat

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients over all ranks and update the parameters of all; all ranks must call this.

        The loss that a ``closure`` returns is averaged over all ranks. When a GradScaler has found an inf or a nan on
        some rank, nothing is updated on any. Raises ValueError, before anything is updated, when a parameter has no
        gradient: every rank has to have all of them.
        """
        self._check_newest()
        self._follow_ranks()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            result = average_loss(result, self._process_set)
        for group, flat in zip(self.param_groups, self._flats, strict=True):
            _check_options(group)
            self._check_gradients(flat)
        with self._unscaled(self._process_set) as overflow:
            if not overflow:
                for group, flat in zip(self.param_groups, self._flats, strict=True):
                    self._update(group, flat)
        self._tell_scheduler()
        return result

    def _update(self, group: dict[str, Any], flat: _Flat) -> None:
        self._take_gradients(flat)
        state, kind = flat.state, type(self._wrapped)
        first = len(state) < _states_needed(kind, group)
        if first:
            shard = flat.values[flat.shard]
            state = [torch.zeros_like(shard) for _ in range(_states_needed(kind, group))]
        update, options = update_options(_options(kind, group, flat.steps + 1, first=first))
        gradients, op = buffer_of(flat.gradients), self._op
        if self._mates is not self._communicator:
            self._communicator.allreduce([gradients], [gradients], op=op, name="gradients")
            op = ReduceOp.MAX  # of equal numbers, which gives just that on hosts with any number of ranks
        try:
            self._mates.step(gradients, buffer_of(flat.values), update, options, state, op=op)
        except CollectiveMismatch:
            raise  # before anything was written
        except BaseException:
            self._torn = True
            raise
        flat.state, flat.whole = state, None
        flat.steps += 1

    def _follow_ranks(self) -> None:
        """Lay everything out anew when another epoch has begun, in which there may be fewer ranks."""
        if any(self.state.values()):
            self._take_loaded()  # which the wrapped optimizer itself has loaded
        if self._process_set.communicator is self._communicator:
            return
        before = self._seat()
        self._communicator = self._process_set.communicator
        self._mates = self._communicator.mates()
        keep = self._goes_on(before)
        if not keep and any(flat.whole is None and flat.state for flat in self._flats):
            raise RuntimeError(
                "each rank held a share of this optimizer's state, and since then the ranks have changed or a step was "
                "given up in the middle; load a state_dict (elastic.run does it from the last commit), or wrap a fresh "
                "optimizer"
            )
        for number, old in enumerate(self._flats):
            flat = self._flats[number] = self._flatten(old.parameters)
            flat.steps, flat.whole = old.steps, old.whole
            flat.state = old.state if keep or old.whole is None else [whole[flat.shard].clone() for whole in old.whole]

    def _seat(self) -> tuple[int, int, int, int]:
        """What decides which share of the state this rank holds."""
        return self._communicator.size, self._communicator.rank, self._mates.size, self._mates.rank

    def _goes_on(self, before: tuple[int, int, int, int]) -> bool:
        """Whether all ranks hold the shares that they need, of the same steps."""
        steps = torch.tensor([[flat.steps, -flat.steps] for flat in self._flats])
        changed = torch.tensor([[int(self._torn or before != self._seat())] * 2])
        most = allreduce(
            torch.cat([changed, steps]), name="fused state", op=ReduceOp.MAX, process_set=self._process_set
        )
        return bool(most[0, 0] == 0 and (most[1:, 0] == -most[1:, 1]).all())

    def _check_gradients(self, flat: _Flat) -> None:
        for position, parameter in enumerate(flat.parameters):
            if parameter.grad is None:
                raise ValueError(
                    f"rank {self._communicator.rank}: parameter {position} of shape {tuple(parameter.shape)} has no "
                    "gradient; a fused step needs all of them on every rank. Freeze it before wrapping, or leave "
                    "fused out"
                )
            moved = parameter.data_ptr() != flat.values.data_ptr() + flat.offsets[position] * 4
            if moved and parameter.numel():  # an empty one is nowhere
                raise RuntimeError("a parameter has been moved out of ring memory; wrap the optimizer again")

    def _take_gradients(self, flat: _Flat) -> None:
        for parameter, part in flat.parts(flat.gradients):
            grad = parameter.grad
            assert grad is not None
            part.copy_(grad.to_dense() if grad.is_sparse else grad)

    def _take_state(self, flat: _Flat) -> None:
        """Bring the wrapped optimizer's state of these parameters into this rank's shards."""
        known = [self.state[p] for p in flat.parameters if p in self.state]
        flat.whole = []
        for key in _state_keys(type(self._wrapped)):
            if all(state.get(key) is None for state in known):
                continue
            whole = torch.zeros_like(flat.values)
            for parameter, part in flat.parts(whole):
                value = self.state.get(parameter, {}).get(key)
                if value is not None:
                    part.copy_(value)
            flat.whole.append(whole)
        flat.state = [whole[flat.shard].clone() for whole in flat.whole]
        flat.steps = max((int(state["step"]) for state in known if "step" in state), default=0)

    def state_dict(self) -> dict[str, Any]:
        """As torch's own, with the state of all parameters: the shards are gathered, so all ranks must call this."""
        try:
            self._settle()
            return super().state_dict()
        finally:
            self.state.clear()

    def _settle(self) -> None:
        self._follow_ranks()
        for flat in self._flats:
            wholes = [self._gather(shard) for shard in flat.state]
            for key, whole in zip(_state_keys(type(self._wrapped)), wholes, strict=False):
                for parameter, part in flat.parts(whole):
                    self.state[parameter][key] = part.clone()
            if wholes and type(self._wrapped) is not torch.optim.SGD:
                for parameter in flat.parameters:
                    self.state[parameter]["step"] = torch.tensor(float(flat.steps))

    def __reduce__(self) -> Any:
        """As the other wrappers, before the first step. Raises RuntimeError after it: this rank holds a share."""
        if any(flat.state for flat in self._flats):
            raise RuntimeError(
                "each rank holds a share of this optimizer's state, so it can be neither copied nor pickled; take its "
                "state_dict(), on all ranks"
            )
        return super().__reduce__()

    def _gather(self, shard: Tensor) -> Tensor:
        work = self._mates.allgather(buffer_of(shard))
        return from_bytes(work.output(), shard.dtype, [sum(work.counts())])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's own; every rank keeps its shard of the state."""
        super().load_state_dict(state_dict)
        self._take_loaded()

    def _take_loaded(self) -> None:
        for flat in self._flats:
            self._take_state(flat)
        self._torn = False
        self.state.clear()


def _state_keys(kind: type) -> list[str]:
    return ["momentum_buffer"] if kind is torch.optim.SGD else ["exp_avg", "exp_avg_sq"]


def _states_needed(kind: type, group: dict[str, Any]) -> int:
    return int(group["momentum"] != 0) if kind is torch.optim.SGD else 2


def _options(kind: type, group: dict[str, Any], steps: int, *, first: bool) -> dict[str, Any]:
    """The fields of the native Update for one step; ``first``: the state begins with it."""
    options = {"lr": group["lr"], "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
    if kind is torch.optim.SGD:
        return options | {
            "rule": 0,
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "nesterov": group["nesterov"],
            "first": first,
        }
    beta1, beta2 = group["betas"]
    return options | {
        "rule": 1,
        "beta1": beta1,
        "beta2": beta2,
        "eps": group["eps"],
        "decoupled": kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")),
        "bias1": 1 - beta1**steps,
        "bias2_root": math.sqrt(1 - beta2**steps),
    }
