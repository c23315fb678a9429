"""A second optimizer object that shares the first one's parameters, options and state, in a subclass of its class."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ring_notebook.api.arguments import check_passes
from ring_notebook.api.basics import joins
from ring_notebook.api.process_sets import ProcessSet
from ring_notebook.core import metrics, world
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.torch.collectives.allreduce import allreduce
from ring_notebook.torch.optimizer.gradient_reducer import GradientReducer
from ring_notebook.torch.optimizer.scalers_and_schedules import act_once
from ring_notebook.torch.steps.optimizer_notes import notes_of
from ring_notebook.torch.steps.plain_optimizers import guard_steps, note_wrapped
from ring_notebook.torch.steps.repair import Shared, begin, may_have_parted, mend, trust
from ring_notebook.torch.steps.same_step import SameStep
from ring_notebook.torch.steps.step_commit import committed
from ring_notebook.torch_private import uncompiled

_SHARED = ("param_groups", "state")
_OF_GENERATION = {
    *("_generation", "_disruptions", "_averaging", "_groups", "rest", "_newer", "_shares"),
    *("_wrapped", "_parameter_names", "step"),  # a schedule patches `step` to see that it is called
}
"""Attributes that a copy does not get."""

# The wrapper of each parameter.
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Wrapper(torch.optim.Optimizer):
    """Base of the classes that are mixed into a wrapped optimizer's class.

    They share groups and state with the wrapped optimizer, even after either of the two has loaded a state_dict: a
    schedule that was made before wrapping still sets the rates.
    """

    _step_supports_amp_scaling = True
    """Tells a GradScaler that `step` unscales the gradients, so that the scaler calls it even after an inf, which other
    ranks may not have. The scaler then sets ``grad_scale``, None when its user has unscaled, and ``found_inf``."""

    _parameter_names: dict[Tensor, str]
    """Horovod's attribute, which libraries read: the name of each parameter."""
    _wrapped: torch.optim.Optimizer
    _process_set: ProcessSet
    option = ""
    """The option of `DistributedOptimizer` that has `step` bring the ranks together, for errors."""
    is_stepping = False
    """Tells the hooks of `ring_notebook.torch.steps` that `step` is under way and commits itself."""
    same_step: SameStep
    _superseded = False
    _passes = 1
    _generation: weakref.ref[Communicator] | None = None  # in which the last step was made
    _joins = 0  # number of joins at that time
    _micro_batches = 1  # calls of `step` that make one step
    _seen = 0  # micro-batches since the last step
    _scale: float | None = None  # of the GradScaler that calls `step`

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An optimizer like this one for the copies of the parameters, whose gradients it averages too."""
        make, made_with, kept, *_, put = self.__reduce_ex__(4)
        twin = memo[id(self)] = make(*copy.deepcopy(made_with, memo))
        put(twin, copy.deepcopy(kept, memo))
        return twin

    def __copy__(self) -> Any:
        """An object with the same parameters and state."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Unpickles on ranks as a wrapper that averages, in the notebook, which is no rank, as what it wraps."""
        mixin = next(one for one in type(self).__mro__[1:] if issubclass(one, Wrapper))
        names = {p: self._parameter_names[p] for p in parameters_of(self) if p in self._parameter_names}
        others = {*self._wrapped.__dict__, "_superseded"}
        kept = {name: one for name, one in self._kept().items() if name not in others}
        made_with = mixin, self._wrapped, names, self.process_set_of_steps
        return wrap_on_ranks, made_with, (kept, notes_of(self._wrapped).outer), None, None, put_kept

    def _kept(self) -> dict[str, Any]:
        """The attributes to keep for another process, including those that the wrapped class has set."""
        # Attributes named ``_ring_...`` are kept with the wrapped optimizer.
        own = self.__dict__.items()
        return {name: one for name, one in own if name not in _OF_GENERATION and not name.startswith("_ring_")}

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are added up before a step."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are added up before a step. Raises ValueError below 1."""
        self._passes = check_passes(passes)

    def accumulate(self, micro_batches: int) -> None:
        """Make one step in every ``micro_batches`` calls of `step`, with the mean of their gradients.

        The other calls of `step` keep the present gradients for it; `zero_grad` then drops only later gradients.
        Micro-batches left at the end of an epoch count in the next one.
        """
        self._micro_batches = check_passes(micro_batches)
        self._seen = 0
        self._act_once()
        for one in self._own_reducers():
            one.average_over(micro_batches)

    def _own_reducers(self) -> Sequence[GradientReducer]:
        """The reducers that reduce its gradients, or add them up."""
        return ()

    def _only_counts(self, closure: object) -> bool:
        """Whether this call of `step` only counts a micro-batch, and keeps its gradients; if so, do that."""
        if closure is not None:
            self._refuse_in_micro_batches("step(closure)")
            return False
        if not self.is_between_steps():
            return False
        for one in self._own_reducers():
            one.end_micro_batch()
        self._seen += 1
        metrics.note_batches_per_step(self._micro_batches)
        self._mark_stepped()  # so that a scheduler that steps after every batch does not warn
        return True

    def _refuse_in_micro_batches(self, what: str) -> None:
        if self._micro_batches > 1:
            raise RuntimeError(
                f"rank {world.current().rank}: accumulate={self._micro_batches} counts calls of optimizer.step() "
                f"after backward(), so it does not allow {what}; leave accumulate out"
            )

    def _act_once(self) -> None:
        if self._micro_batches > 1:
            act_once()

    @property
    def has_begun_step(self) -> bool:
        """Whether micro-batches were counted for the next step."""
        return self._seen > 0

    def is_between_steps(self) -> bool:
        """Whether the next call of `step` will only count."""
        return (self._seen + 1) % self._micro_batches != 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; the gradients of these parameters are averaged too."""
        super().add_param_group(param_group)
        claim(self)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients of backward passes only add up; nothing is sent."""
        return nullcontext()

    def _claimed(self) -> None:
        """Called when it has become the owner of its parameters."""
        guard_steps(owners_of)
        self._act_once()  # also in a process that a snapshot was loaded into

    @property
    def process_set_of_steps(self) -> ProcessSet:
        """The ranks that make steps together."""
        return self._process_set

    def begin_other_step(self) -> None:
        """Raises RuntimeError unless overridden: only `step` brings the ranks together."""
        raise RuntimeError(
            f"rank {world.current().rank}: {self.option} brings the ranks together in optimizer.step(), and a step of "
            "another name, such as SAM's second_step(), would leave each rank with weights of its own; call step(), or "
            f"leave out {self.option}"
        )

    def named_gradients(self) -> Sequence[tuple[str, Tensor]]:
        """The parameters with their names."""
        return [
            (self._parameter_names.get(p) or f"group {g} parameter {i}", p)
            for g, group in enumerate(self.param_groups)
            for i, p in enumerate(group["params"])
        ]

    @contextmanager
    def _committed(self, process_set: ProcessSet, scale: float | None = None) -> Iterator[None]:
        """`committed`, whose name tells the number of the step, its weights, and the scale of gradients."""
        if not process_set.included() or process_set.size() == 1:
            with committed(process_set):
                yield
            return
        with ExitStack() as stack:
            self.same_step.commit(
                process_set,
                self.named_gradients,
                lambda name: stack.enter_context(committed(process_set, name=name)),
                scale,
            )
            yield

    @contextmanager
    def _own_step(self) -> Iterator[None]:
        """A context for the step of the wrapped optimizer, within `step`."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def _release(self, to: Wrapper) -> None:
        """Called when another wrapper owns the parameters."""
        self._superseded = True

    def _check_newest(self) -> None:
        if self._superseded:
            raise RuntimeError(
                "a newer DistributedOptimizer has taken over these parameters: two of them share parameters only where "
                "both average or both sum over the same ranks, without logical ranks, local steps or Adasum, and wrap "
                "optimizers of their own; use the newer one, or build separate models"
            )

    @contextmanager
    def _unscaled(self) -> Iterator[Callable[[ProcessSet | None], bool]]:
        """Unscale the gradients if a GradScaler calls; yields a function that says whether a rank found an inf or nan.

        All ranks of the process set that this function gets must call it; with None it looks at this rank alone, which
        is enough if the gradients are averages. It waits for the device, like torch's own scaler. The wrapped step,
        which may support scalers too, finds none.
        """
        given: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        scale, found_inf = given.get("grad_scale"), given.get("found_inf")
        self._scale = None
        if scale is not None:
            for parameter in parameters_of(self):
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))

        def overflowed(process_set: ProcessSet | None) -> bool:
            if found_inf is None:
                return False
            numbers = [
                torch.as_tensor(found_inf).detach().to(torch.float32).reshape(1)
            ]  # 0 where there are no gradients
            if process_set is not None and process_set.included():  # a sum, because joined ranks contribute zeros
                numbers = [allreduce(numbers[0], name="found inf", op=ReduceOp.SUM, process_set=process_set)]
            elif scale is not None:
                numbers.append(scale.detach().to(numbers[0]).reshape(1))
            found, *scales = torch.cat(numbers).tolist()
            self._scale = scales[0] if scales else None
            return bool(found > 0)

        yield overflowed
        self._scale = None
        # Not after an exception: the scaler removes them only after a step, and would multiply remaining ones by its
        # scale next time.
        self.__dict__.update(given)

    def _mend(self, process_set: ProcessSet, shared: Callable[[], Shared]) -> bool:
        """At the first steps of a generation, make the ranks equal again; returns whether their states had diverged.

        If so, drops the gradients, which are of the old states; the caller skips a step without new gradients.
        """
        if not process_set.included() or process_set.size() == 1:
            return False
        communicator = process_set.communicator
        if self._generation is None or self._generation() is not communicator or self._joins != joins():
            # Ranks that had joined may have missed the first step.
            self._generation, self._joins = weakref.ref(communicator), joins()
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

    An optimizer that is already wrapped is wrapped again, with its state. `claim` makes the result the owner of the
    parameters.
    """
    original = original_of(optimizer)
    base = type(original)
    _hook_steps(base)
    trust(original)
    both = type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped: W = object.__new__(both)
    wrapped._wrapped = original
    wrapped._parameter_names = names
    wrapped.same_step = SameStep()
    note_wrapped(original)
    # Leave out a `step` that an LR scheduler has patched into the original, and our notes, which stay there.
    left = {"step", *_SHARED}
    wrapped.__dict__.update(
        {key: value for key, value in original.__dict__.items() if key not in left and not key.startswith("_ring_")}
    )
    return wrapped


def wrap_on_ranks(
    mixin: type[Wrapper], original: torch.optim.Optimizer, names: dict[Tensor, str], process_set: ProcessSet
) -> torch.optim.Optimizer:
    """As `wrap`; returns ``original`` in a process that is no rank, or lacks the process set."""
    return wrap(mixin, original, names) if world.is_initialized() and process_set.registered() else original


def put_kept(wrapper: torch.optim.Optimizer, kept: tuple[dict[str, Any], Any]) -> None:
    """Give the result of `wrap_on_ranks` the attributes of another wrapper, and its outer state."""
    if isinstance(wrapper, Wrapper):
        attributes, notes_of(wrapper._wrapped).outer = kept
        wrapper.__dict__.update(attributes)
        if not wrapper._superseded:
            claim(wrapper)


def _hook_steps(kind: type) -> None:
    """Give the steps of all base classes torch's hooks, which torch does only for classes that have an instance.

    A method of another name may call the step of a base class that has none.
    """
    for one in kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]:
        step = vars(one).get("step")
        if step is not None and not getattr(step, "hooked", False):
            hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
            hooked.hooked = True
            one.step = hooked  # type: ignore[attr-defined]


def claim(wrapper: W) -> W:
    """Make ``wrapper`` the owner of its parameters; an older one may raise in ``step()`` from now on."""
    older = [owner for owner in owners_of(parameters_of(wrapper)) if owner is not wrapper]
    for parameter in parameters_of(wrapper):
        _owners[parameter] = weakref.ref(wrapper)
    for owner in older:
        owner._release(wrapper)
    wrapper._claimed()
    return wrapper


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of `step`: the one of that name, or a function in the first place."""
    found = args[0] if args and callable(args[0]) else kwargs.get("closure")
    return found if callable(found) else None


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `step` with another closure in its place."""
    return ((closure, *args[1:]), kwargs) if args and callable(args[0]) else (args, {**kwargs, "closure": closure})


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


def once(step: Any) -> Any:
    """Keep torch from adding its step hooks to ``step``: the wrapped class's step, which it calls, has them.

    Also keeps torch.compile out, which would take the present generation for a constant.
    """
    step.hooked = True
    return uncompiled(step)
