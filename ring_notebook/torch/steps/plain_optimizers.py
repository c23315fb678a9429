"""Steps on averaged gradients that are not made by the `step` of a prepared optimizer.

Examples are torch's own optimizers on models of DistributedDataParallel and FSDP2 on backend "ring", and methods of
another name, such as SAM's, that update the parameters of a prepared optimizer. A hook before every optimizer's step
makes the ranks commit to it, and a hook after the step raises a delayed interrupt.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core import world
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.step_guard import COMMIT, step_guard
from ring_notebook.torch.steps.optimizer_knobs import count_step
from ring_notebook.torch.steps.optimizer_notes import notes_of
from ring_notebook.torch.steps.repair import Shared, begin, may_have_parted, mend
from ring_notebook.torch.steps.step_commit import Undo
from ring_notebook.torch_private import uncompiled

_is_on = False
T = TypeVar("T")


class Owner(Protocol):
    """A prepared optimizer, as this module needs it."""

    is_stepping: bool
    """Whether its own step is under way, which commits itself."""
    process_set_of_steps: ProcessSet
    """The ranks that step together."""

    def begin_other_step(self) -> None:
        """Reduce what has not been reduced, before a step of another name."""

    def commit_other_step(self, by_name: Callable[[str], T]) -> T:
        """Commit to that step, by a call of ``by_name``."""

    def end_other_step(self) -> None:
        """Count that step."""


_owners_of: Callable[[Iterable[Tensor]], Sequence[Any]] = lambda _: ()  # noqa: E731


@dataclass(slots=True, eq=False)
class _Training:
    """The training by one optimizer in a generation."""

    generation: weakref.ref[Communicator]
    group: Any = None
    """The process group of backend "ring", or the process set, that reduces the gradients, or None."""
    owner: Owner | None = None
    models: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """The DistributedDataParallel models, even replaced ones before garbage collection; empty for FSDP2."""
    names: Mapping[Tensor, str] = field(default_factory=dict)
    has_begun: bool = False
    """Whether the ranks have agreed on the shares to compare."""
    is_compared: bool = False
    is_stepping: bool = False
    set_aside: BaseException | None = None


def guard_steps(owners_of: Callable[[Iterable[Tensor]], Sequence[Any]] | None = None) -> None:
    """From now on, all ranks or none make a step on gradients that a group of backend "ring" has reduced.

    With ``owners_of``, which returns the prepared optimizers of parameters, also on gradients that these reduce.
    """
    global _is_on, _owners_of
    _owners_of = owners_of or _owners_of
    if not _is_on:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_behind)
        _is_on = True


def note_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Note that another optimizer averages the gradients of ``optimizer`` from now on."""
    notes = notes_of(optimizer)
    notes.training, notes.was_wrapped = None, True


@uncompiled
def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    training = _training_of(optimizer)
    # Not inside the step of another optimizer, such as ZeroRedundancyOptimizer.
    if training is None or step_guard.is_within(sys._getframe()):
        return None
    training.is_stepping = True
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    communicator: Communicator = training.group.communicator
    owner = training.owner
    if owner is not None:
        owner.begin_other_step()
    elif not training.is_compared:
        _mend(optimizer, training)
    step = sys._getframe(1)

    def begin(name: str = COMMIT) -> BaseException | None:
        return step_guard.begin(communicator, step, name)

    def commit(_: Undo | None = None) -> None:
        training.set_aside = begin() if owner is None else owner.commit_other_step(begin)

    if closure is None:
        commit()
        return None
    undo = Undo(optimizer, commit)
    step_guard.hold(step)
    guarded = _guarded(closure, undo, step)
    return ((args[0], guarded, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": guarded})


@uncompiled
def _behind(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    training = _training_of(optimizer)
    if training is None:
        if notes_of(optimizer).knobs_of is not None and not hasattr(optimizer, "is_stepping") and world.is_alone():
            count_step(optimizer)
            step_guard.alone()
        return
    if not training.is_stepping:
        return
    training.is_stepping = False
    set_aside, training.set_aside = training.set_aside, None
    if training.owner is not None:
        training.owner.end_other_step()
    else:
        count_step(optimizer)
    step_guard.release(set_aside)


def _guarded(closure: Callable[[], Any], undo: Undo, step: FrameType) -> Callable[[], Any]:
    """``closure`` of a step; an interrupt is raised only inside it, between parts of the step, and undoes the step."""

    def guarded() -> Any:
        try:
            step_guard.release()
            result = closure()
            step_guard.hold(step)
        except BaseException:
            undo()
            raise
        return result

    return guarded


def _mend(optimizer: torch.optim.Optimizer, training: _Training) -> None:
    """Compare the ranks after an aborted generation. If they differ, drop the gradients, which may be older."""
    if world.disruptions() == 0 or training.group.size() != world.current().size:
        training.is_compared = True
        return
    # Other ranks may call another operation of their group now. This commit, unlike the comparison, is on the group's
    # communicator, so the error names that operation.
    if late := training.group.communicator.commit(name="comparison of ranks"):
        raise late
    if not training.has_begun:
        training.has_begun = True
        begin(optimizer, global_process_set)
    if not may_have_parted(optimizer):
        training.is_compared = True
        return
    replicated = bool(training.models)
    models = [one() for one in training.models]
    notes = notes_of(optimizer)
    notes.refer([model for model in models if model is not None], notes.schedulers)
    state = replicated and type(optimizer).__name__ != "ZeroRedundancyOptimizer"  # its ranks have shares of the state
    shared = Shared(optimizer, training.names, global_process_set, state=state, weights=replicated)
    if mend(shared, whole=not replicated):  # without tensors to compare, one step suffices
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _training_of(optimizer: torch.optim.Optimizer) -> _Training | None:
    """The training of ``optimizer`` whose steps are guarded, or None; searched for at a generation's first step."""
    if not world.is_initialized():
        return None
    generation = world.current().communicator
    notes = notes_of(optimizer)
    known: _Training | None = notes.training
    if known is None or known.generation() is not generation:
        known = notes.training = _find(optimizer, weakref.ref(generation))
    if known.owner is not None and known.owner.is_stepping:
        return None
    if known.group is None or known.group.size() == 1:
        return None
    # Ranks without batches take part in the others' sums, but not in their steps.
    joins = any(getattr(getattr(model(), "_join_config", None), "enable", False) for model in known.models)
    return None if joins else known


def _find(optimizer: torch.optim.Optimizer, generation: weakref.ref[Communicator]) -> _Training:
    parameters = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters.values():
        mesh = getattr(parameter, "device_mesh", None)  # FSDP2's
        if mesh is not None:
            return _Training(generation, _ring(mesh.get_group()) if mesh.ndim == 1 else _whole(mesh.size()))
    found, is_own = _Training(generation), hasattr(optimizer, "is_stepping")
    owners: Sequence[Any] = [optimizer] if is_own else _owners_of(parameters.values())
    for owner in owners:
        process_set = getattr(owner, "process_set_of_steps", None)  # the copy with which `memory` tries a step lacks it
        if process_set is not None and process_set.included():
            found.group, found.owner = process_set, owner
    if is_own or found.owner is not None:
        return found
    kind = nn.parallel.DistributedDataParallel
    for one in gc.get_objects():
        if issubclass(type(one), kind):
            names = {p: name.removeprefix("module.") for name, p in one.named_parameters() if id(p) in parameters}
            if names:
                found.models.append(weakref.ref(one))
                found.names = names
                # The same on all ranks, even if only some have garbage-collected an old model.
                found.group = _whole(one.process_group.size()) or _ring(one.process_group)
    if not (owners or found.models) and notes_of(optimizer).was_wrapped and world.current().size > 1:
        raise RuntimeError(
            f"rank {world.current().rank}: nothing averages the gradients of this {type(optimizer).__name__}, because "
            "the optimizer that took its place is gone: keep what prepare() returns (model, optimizer = "
            "ring.prepare(model, optimizer)); to average by hand, or train on one rank alone, make a new optimizer"
        )
    return found


def _whole(size: int) -> Any:
    """The default group, if it has backend "ring" and ``size`` ranks."""
    return _ring(dist.group.WORLD) if size == dist.get_world_size() else None


def _ring(group: Any) -> Any:
    """``group``, if it has backend "ring"."""
    return group if isinstance(getattr(group, "communicator", None), Communicator) else None
