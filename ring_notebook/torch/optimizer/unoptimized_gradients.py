"""Averages gradients of a prepared model that no optimizer has, because programs take norms over the whole model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ring_notebook.torch.optimizer.reducing_optimizer import ReducingOptimizer
from ring_notebook.torch.optimizer.wrapper import owners_of


class Rest:
    """The parameters of a model that no optimizer has, reduced like the parameters of ``beside``."""

    def __init__(self, model: nn.Module, beside: ReducingOptimizer) -> None:
        self._named = [(name, one) for name, one in model.named_parameters() if not owners_of([one])]
        self._beside = weakref.ref(beside)
        self._reducer = copy(beside._reducer)
        vars(self._reducer).update(meter=None, _residuals={}, _micro={})
        self._reducer.watch(self)
        beside.rest = [*beside.rest, self._reducer]

    def named_gradients(self) -> Sequence[tuple[str, Tensor]]:
        """The parameters that still no optimizer has, with their names."""
        return [pair for pair in self._named if not owners_of([pair[1]])]

    def is_between_steps(self) -> bool:
        """As the optimizer's."""
        beside = self._beside()
        return beside is not None and beside.is_between_steps()

    def close(self) -> None:
        """Stop reducing."""
        self._reducer.close()


_rests: WeakKeyDictionary[nn.Module, Rest] = WeakKeyDictionary()


def average_rest(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer | Any]) -> None:
    """Average also gradients of ``models`` that no optimizer has, in the way of the first of ``optimizers``."""
    beside = next((one for one in optimizers if isinstance(one, ReducingOptimizer)), None)
    for model in models:
        if (known := _rests.pop(model, None)) is not None:
            known.close()
        if beside is not None and any(not owners_of([one]) for one in model.parameters()):
            _rests[model] = Rest(model, beside)


def models_beside(optimizer: Any) -> list[nn.Module]:
    """The models whose rest `average_rest` averages beside ``optimizer``."""
    return [model for model, rest in _rests.items() if rest._beside() is optimizer]
