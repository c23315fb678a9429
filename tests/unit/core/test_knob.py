"""A knob is used as the number that it is."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest

from ring_notebook.core.steering import Knob
from ring_notebook.protocol.knobs import Range

FUNCTIONS: tuple[Callable[..., Any], ...] = (round, divmod, pow, math.floor, math.ceil, math.trunc, abs, operator.neg)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_functions_of_numbers(function: Callable[..., Any]) -> None:
    """With every number of arguments that they take, on both sides."""
    knob = Knob("a", Range(1.0, 0.0), 2.75)
    tried = 0
    for operands in ((knob,), (knob, 2), (7, knob), (knob, knob)):
        numbers = [2.75 if one is knob else one for one in operands]
        try:
            wanted = function(*numbers)
        except TypeError:
            continue
        assert function(*operands) == wanted
        tried += 1
    assert tried
