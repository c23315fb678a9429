"""The fused step: one native pass sums the gradients, makes the optimizer's update and sends the parameters.

Every rank updates the chunk of the parameters that it owns, with optimizer state that only it holds (ZeRO stage 1,
Rajbhandari et al. 2020), and writes the result into the parameters of all ranks. A step moves two thirds of the bytes
of an allreduce and a separate step, and Adam's state takes 1/p of the memory.

Parameters and gradients of a parameter group lie flat in ring memory, in the order of registration; so `torch.save` of
a single one writes its whole group (clone it first). With several hosts the gradients are first summed between hosts,
and the ranks of each host divide the rest of the work. Parameters on a device stay there: each step copies them and
their gradients to ring memory, and the new values back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.partition import update_options
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.torch.collectives.allreduce import allreduce
from ring_notebook.torch.optimizer.flat_group import FlatGroup
from ring_notebook.torch.optimizer.fused_rules import (
    check_options,
    check_parameters,
    check_same_options,
    state_keys,
    states_needed,
    update_fields,
)
from ring_notebook.torch.optimizer.wrapper import Wrapper, average_loss, once
from ring_notebook.torch.steps.committed import committed
from ring_notebook.torch.steps.optimizer_notes import count_step
from ring_notebook.torch.steps.repair import Shared
from ring_notebook.torch.tensors import buffer_of, from_bytes


class FusedOptimizer(Wrapper):
    """Mixed into the class of the wrapped optimizer by ``DistributedOptimizer(..., fused=True)``."""

    _process_set: ProcessSet
    _op: ReduceOp
    _flats: list[FlatGroup]
    _communicator: Communicator | None
    """None before the first epoch of an optimizer that was restored in this process."""
    _mates: Communicator
    """The ranks of this host, which write into each other's parameters."""

    _torn = False
    """A step failed after it had begun to write: parameters and state are partly new."""

    def _prepare(self, process_set: ProcessSet, op: ReduceOp) -> None:
        self._process_set, self._op = process_set, op
        self._communicator = process_set.communicator
        self._mates = self._communicator.mates()
        self._flats = []
        for group in self.param_groups:
            self._add_flat(group)
        self.state.clear()

    def flats(self) -> list[FlatGroup]:
        """The parameter groups, each with this rank's share of the state."""
        return self._flats

    def give_flats(self, flats: list[FlatGroup]) -> None:
        """Take parameter groups whose state is whole; the next step shares it among the ranks that there are then."""
        self._flats, self._communicator = flats, None

    @property
    def _state_keys(self) -> list[str]:
        return state_keys(type(self._wrapped))

    def _add_flat(self, group: dict[str, Any]) -> None:
        flat = FlatGroup.of(group["params"], self._mates)
        flat.take_state(self.state, self._state_keys)
        self._flats.append(flat)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's own; all ranks must call this. Raises ValueError where a fused step cannot update the group."""
        self._follow_ranks()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group)
            check_parameters(group)
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

    @once
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients over all ranks and update the parameters on all ranks; all ranks must call this.

        The loss that a ``closure`` returns is averaged over all ranks. When a GradScaler has found an inf or a nan on
        some rank, no rank updates anything. Raises, before any update, ValueError when a parameter has no gradient
        (every rank needs all of them), and CollectiveMismatch when the ranks disagree on options of a group.
        """
        self._check_newest()
        self._follow_ranks()
        if self._mend(self._process_set, self._shared):
            self._mark_stepped()
            return None
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            result = average_loss(result, self._process_set)
        for group, flat in zip(self.param_groups, self._flats, strict=True):
            check_options(group)
            flat.check(self._process_set.communicator.rank)
        with self._unscaled(self._process_set) as overflowed:
            if overflowed():
                self._mark_stepped()
            else:
                with ExitStack() as step:
                    self._update(step)
        return result

    # Runs the hooks of a step, because the wrapped class's own step, which would run them, is not called.
    @torch.optim.Optimizer.profile_hook_step
    def _update(self, step: ExitStack) -> None:
        """Take the gradients, compare the options of all groups, commit, then write group by group.

        ``step`` ends the commit, after the step's post hooks.
        """
        kind = type(self._wrapped)
        states, fields = [], []
        for group, flat in zip(self.param_groups, self._flats, strict=True):
            flat.take_gradients()
            state = flat.state_for_step(states_needed(kind, group))
            states.append(state)
            fields.append(update_fields(kind, group, flat.steps + 1, first=state is not flat.state))
        if len(self._flats) > 1 or self._mates is not self._communicator:
            sizes = [{"elements": flat.values.numel()} for flat in self._flats]
            check_same_options([one | size for one, size in zip(fields, sizes, strict=True)], self._process_set)
        op = self._op
        if self._mates is not self._communicator:
            for flat in self._flats:
                gradients = buffer_of(flat.gradients)
                self._process_set.communicator.allreduce([gradients], [gradients], op=op, name="gradients")
            op = ReduceOp.MAX  # the numbers are equal: exact for any number of ranks on each host
            # After the commit all ranks must take part: each writes its chunk of all ranks' parameters.
        step.enter_context(committed(self._process_set, self._mates))
        for written, flat in enumerate(self._flats):
            try:
                self._write(flat, states[written], fields[written], op)
            except BaseException as error:
                # The native step compares headers before it writes: a mismatch in the first group changes nothing.
                self._torn = written > 0 or not isinstance(error, CollectiveMismatch)
                raise
        count_step(self._wrapped)
        self._mark_stepped()

    def _shared(self) -> Shared:
        # Each rank has a share of the state; `_follow_ranks` has compared the numbers of steps.
        return Shared(self._wrapped, self._parameter_names, self._process_set, state=False)

    def _write(self, flat: FlatGroup, state: list[Tensor], fields: dict[str, Any], op: ReduceOp) -> None:
        update, options = update_options(fields)
        self._mates.step(buffer_of(flat.gradients), buffer_of(flat.values), update, options, state, op=op)
        flat.give_values()
        flat.state, flat.whole = state, None
        flat.steps += 1

    def _follow_ranks(self) -> None:
        """Set up everything again in a new epoch, which may have fewer ranks."""
        if any(self.state.values()):
            self._take_loaded()  # the wrapped optimizer has loaded a state_dict
        if self._process_set.communicator is self._communicator:
            return
        before = self._seat()
        self._communicator = self._process_set.communicator
        self._mates = self._communicator.mates()
        keep = self._shards_fit(before)
        if not keep and any(flat.whole is None and flat.state for flat in self._flats):
            raise RuntimeError(
                "each rank held a share of this optimizer's state, and since then the ranks have changed or a step "
                "failed in the middle; load a state_dict (elastic.run does it from the last commit), or wrap a fresh "
                "optimizer"
            )
        for number, old in enumerate(self._flats):
            flat = self._flats[number] = FlatGroup.of(old.parameters, self._mates)
            flat.steps, flat.whole = old.steps, old.whole
            flat.state = old.state if keep or old.whole is None else flat.shards_of(old.whole)

    def give_up_state(self) -> bool:
        """Forget the state without a call of other ranks, before this is wrapped anew; whether shares were lost."""
        lost = any(flat.state and flat.whole is None for flat in self._flats)
        self._communicator = self._process_set.communicator
        self._flats = []
        self.state.clear()
        return lost

    def _seat(self) -> tuple[int, int, int, int]:
        """The numbers that decide which share of the state this rank holds."""
        if self._communicator is None:
            return (0, 0, 0, 0)
        return self._communicator.size, self._communicator.rank, self._mates.size, self._mates.rank

    def _shards_fit(self, before: tuple[int, int, int, int]) -> bool:
        """Whether all ranks hold the shards that they need, after the same number of steps."""
        steps = torch.tensor([[flat.steps, -flat.steps] for flat in self._flats], device="cpu")
        changed = torch.tensor([[int(self._torn or before != self._seat())] * 2], device="cpu")
        most = allreduce(
            torch.cat([changed, steps]), name="fused state", op=ReduceOp.MAX, process_set=self._process_set
        )
        return bool(most[0, 0] == 0 and (most[1:, 0] == -most[1:, 1]).all())

    def state_dict(self) -> dict[str, Any]:
        """As torch's own, with the state of all parameters. Gathers the shards, so all ranks must call this."""
        try:
            self._gather_state()
            return super().state_dict()
        finally:
            self.state.clear()

    def _gather_state(self) -> None:
        self._follow_ranks()
        for flat in self._flats:
            for key, whole in zip(self._state_keys, self._gather(flat.state), strict=False):
                for parameter, part in flat.parts(whole):
                    self.state[parameter][key] = part.to(parameter.device, copy=True)
            if flat.state and type(self._wrapped) is not torch.optim.SGD:
                for parameter in flat.parameters:
                    self.state[parameter]["step"] = torch.tensor(float(flat.steps), device="cpu")

    def _gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        works = [self._mates.allgather(buffer_of(shard)) for shard in shards]
        return [from_bytes(work.output(), torch.float32, [sum(work.counts())]) for work in works]

    def __reduce__(self) -> Any:
        """As the other wrappers before the first step. Raises RuntimeError after it: this rank has only a share."""
        if any(flat.state for flat in self._flats):
            raise RuntimeError(
                "each rank holds a share of this optimizer's state, so it can be neither copied nor pickled; take its "
                "state_dict(), on all ranks"
            )
        return super().__reduce__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's own; every rank keeps its shard of the state."""
        super().load_state_dict(state_dict)
        self._take_loaded()

    def _take_loaded(self) -> None:
        for flat in self._flats:
            flat.take_state(self.state, self._state_keys)
        self._torn = False
        self.state.clear()
