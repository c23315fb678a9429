"""The kinds of batches whose tensors a prepared loader moves."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ring_notebook.torch.training.loaders import to_device

Pair = namedtuple("Pair", "x y")


@dataclass
class Plain:
    x: Any
    name: str = "a"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    inner: Plain


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: [x, "text"],
        lambda x: Pair(x, 3),
        lambda x: {"x": (x, None)},
        lambda x: UserDict({"x": x}),
        lambda x: Plain(x),
        lambda x: Frozen([x], Plain(x)),
    ],
    ids=["tensor", "list", "named tuple", "dict", "mapping", "dataclass", "dataclasses in one another"],
)
def test_all_tensors_of_a_batch_are_moved_and_the_batch_stays_as_it_was(make: Any) -> None:
    given = make(torch.ones(2))
    moved = to_device(given, torch.device("meta"))
    assert type(moved) is type(given)
    assert "device='meta'" in repr(moved)
    assert repr(moved).count("device='meta'") == repr(given).count("tensor(")
    assert "meta" not in repr(given)
