"""A second optimizer object that shares the first one's parameters, options and state, in a subclass of its class."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ring_notebook.api.arguments import check_passes
from ring_notebook.api.basics import joins
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.torch.collectives.allreduce import allreduce
from ring_notebook.torch.steps.repair import Shared, begin, may_have_parted, mend, trust

_SHARED = ("param_groups", "state")

# The wrapper of each parameter.
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Wrapper(torch.optim.Optimizer):
    """Base of the classes that are mixed into a wrapped optimizer's class.

    Groups and state are those of the wrapped optimizer, not copies, also after either of the two has loaded a
    state_dict: a schedule that was made before wrapping still sets the rates.
    """

    _step_supports_amp_scaling = True
    """Tells a GradScaler that `step` unscales the gradients, and to call it also for an inf, which other ranks may not
    have. The scaler then sets ``grad_scale``, None when its user has unscaled, and ``found_inf``."""

    _parameter_names: dict[Tensor, str]
    """Horovod's attribute, which libraries read: the name of each parameter."""
    _wrapped: torch.optim.Optimizer
    guards_its_steps = True
    """Tells the hooks of `ring_notebook.torch.steps` that `step` itself commits."""
    _superseded = False
    _passes = 1
    _epoch: weakref.ref[Communicator] | None = None  # of the last step
    _joins = 0  # number of joins at that time
    _micro_batches = 1  # calls of `step` that make one step
    _seen = 0  # micro-batches since the last step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the wrapped optimizer."""
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = groups

    @property
    def state(self) -> Any:
        """State of the wrapped optimizer."""
        return self._wrapped.state

    @state.setter
    def state(self, state: Any) -> None:
        self._wrapped.state = state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's own; ``load_state_dict`` calls it last."""
        for name in _SHARED:
            if name in state:
                setattr(self, name, state[name])
        super().__setstate__({name: value for name, value in state.items() if name not in _SHARED})

    def __reduce__(self) -> Any:
        """Copy and pickle as the wrapped class: another process, or the notebook, takes no part in the reduction."""
        return object.__new__, (type(self._wrapped),), self.__getstate__()

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are added up before a step."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are added up before a step. Raises ValueError below 1."""
        self._passes = check_passes(passes)

    def accumulate(self, micro_batches: int) -> None:
        """Make one step in every ``micro_batches`` calls of `step`, with the mean of their gradients.

        The other calls of `step`, and of `zero_grad` between them, do nothing. Micro-batches left at the end of an
        epoch count in the next one.
        """
        self._micro_batches = check_passes(micro_batches)
        self._seen = 0

    def _is_between_steps(self) -> bool:
        """Whether the next call of `step` will only count."""
        return (self._seen + 1) % self._micro_batches != 0

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients of backward passes only add up; nothing is sent."""
        return nullcontext()

    def _gather_state(self) -> None:
        """Copy state that is kept elsewhere back into ``state``."""

    def _release(self) -> None:
        """Release the parameters: another wrapper has them."""
        self._superseded = True

    def _check_newest(self) -> None:
        if self._superseded:
            raise RuntimeError(
                "a newer DistributedOptimizer has taken over these parameters; use that one, or build separate models"
            )

    @contextmanager
    def _unscaled(self, process_set: ProcessSet | None) -> Iterator[Callable[[], bool]]:
        """Unscale the gradients if a GradScaler calls; yields a function that says whether a rank found an inf or nan.

        All ranks must call that function; without a ``process_set`` it looks at this rank alone. It waits for the
        device, like torch's own scaler. Ranks may have different scales. The wrapped step, which may look for a scaler
        too, finds none.
        """
        given: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        scale, found_inf = given.get("grad_scale"), given.get("found_inf")
        if scale is not None:
            for parameter in parameters_of(self):
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))
        yield lambda: found_inf is not None and _overflowed(found_inf, process_set)
        # Not after an exception: the scaler removes them only after a step, and would multiply those that it finds
        # next time by its own scale.
        self.__dict__.update(given)

    def _mend(self, process_set: ProcessSet, shared: Callable[[], Shared]) -> bool:
        """At the first steps of an epoch, make the ranks equal again; whether their states had diverged.

        If so, drops the gradients, which are older than that: the caller skips a step that does not make new ones.
        """
        if not process_set.included() or process_set.size() == 1:
            return False
        communicator = process_set.communicator
        if self._epoch is None or self._epoch() is not communicator or self._joins != joins():
            # Ranks that had joined may have missed the first step.
            self._epoch, self._joins = weakref.ref(communicator), joins()
            begin(self._wrapped, process_set)
        if not may_have_parted(self._wrapped) or not mend(shared()):
            return False
        for parameter in parameters_of(self):
            parameter.grad = None
        return True

    def _mark_stepped(self) -> None:
        # A scheduler that was made before wrapping checks that the wrapped optimizer makes steps.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]


W = TypeVar("W", bound=Wrapper)


def original_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that ``optimizer`` wraps; ``optimizer`` itself when it wraps none."""
    return optimizer._wrapped if isinstance(optimizer, Wrapper) else optimizer


def wrap(mixin: type[W], optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> W:
    """``optimizer`` as an instance of a class that is both ``mixin`` and its own class, with ``names`` of parameters.

    An optimizer that is already wrapped is wrapped again, with the state that its wrapper keeps: for a fused one all
    ranks must call this. `claim` makes the result the owner of the parameters.
    """
    original = original_of(optimizer)
    for owner in owners_of(parameters_of(original)):
        if owner._wrapped is original:
            owner._gather_state()
    base = type(original)
    trust(original)
    both = type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped: W = object.__new__(both)
    wrapped._wrapped = original
    wrapped._parameter_names = names
    # A `step` in the instance was patched by an LR scheduler for the original.
    wrapped.__dict__.update(
        {key: value for key, value in original.__dict__.items() if key != "step" and key not in _SHARED}
    )
    return wrapped


def claim(wrapper: W) -> W:
    """Make ``wrapper`` the owner of its parameters; an older one, left by a re-run cell, then raises in ``step()``."""
    for owner in owners_of(parameters_of(wrapper)):
        owner._release()
    for parameter in parameters_of(wrapper):
        _owners[parameter] = weakref.ref(wrapper)
    return wrapper


def owners_of(parameters: Iterable[Tensor]) -> list[Wrapper]:
    """The wrappers that have these parameters, each once."""
    found = {id(owner): owner for p in parameters if (owner := _owners.get(p, _nobody)()) is not None}  # type: ignore[no-untyped-call]
    return list(found.values())


def _nobody() -> None:
    return None


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All parameters of ``optimizer``, in its order."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def average_loss(loss: Any, process_set: ProcessSet) -> Any:
    """The loss of a closure, averaged over the ranks; unchanged if None, or on a rank outside the set."""
    if loss is None or not process_set.included():
        return loss
    shared = allreduce(torch.as_tensor(loss).detach(), op=ReduceOp.AVERAGE, process_set=process_set)
    return shared if isinstance(loss, Tensor) else shared.item()


def _overflowed(found_inf: Tensor, process_set: ProcessSet | None) -> bool:
    found = found_inf.detach().to(torch.float32).reshape(1)
    if process_set is not None and process_set.included():  # a sum, because joined ranks take part in it
        found = allreduce(found, name="found inf", op=ReduceOp.SUM, process_set=process_set)
    return bool(found > 0)


def once(step: Any) -> Any:
    """Keep torch from adding its step hooks to ``step``, which calls the wrapped class's step, which has them."""
    step.hooked = True
    return step
