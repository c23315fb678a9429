"""A second optimizer object over the first one's parameters, options and state, of a subclass of its class."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

__all__ = ["Wrapper", "once", "wrap"]


class Wrapper(torch.optim.Optimizer):
    """Base of the classes that are mixed into a wrapped optimizer's class."""

    _wrapped: torch.optim.Optimizer

    def __reduce__(self) -> Any:
        """Copied and pickled as the wrapped class: another process, or the notebook, has no part in the reduction."""
        return object.__new__, (type(self._wrapped),), self.__getstate__()

    def _tell_scheduler(self) -> None:
        # A scheduler that was made before wrapping watches the wrapped optimizer for steps.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]


W = TypeVar("W", bound=Wrapper)


def wrap(mixin: type[W], optimizer: torch.optim.Optimizer) -> W:
    """``optimizer`` as an instance of a class that is both ``mixin`` and its own class.

    Parameter groups, options and state are shared, not copied. An optimizer that is wrapped already is wrapped anew.
    """
    original = optimizer._wrapped if isinstance(optimizer, Wrapper) else optimizer
    base = type(original)
    both = type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped: W = object.__new__(both)
    # A step in the instance is the one that an LR scheduler has patched for the original.
    wrapped.__dict__.update(
        {key: value for key, value in optimizer.__dict__.items() if key in original.__dict__ and key != "step"}
    )
    wrapped._wrapped = original
    return wrapped


def once(step: Any) -> Any:
    """Keep torch from adding its step hooks to ``step``: the step of the wrapped class, which it calls, has them."""
    step.hooked = True
    return step
