"""Descriptions of the ranks' variables, also of those whose class does not want to be described."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.engine import namespace


class Raising:
    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)


class NoLength:
    def __len__(self) -> int:
        raise ValueError("no")


class NoRepr(int):
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.fixture
def variables() -> Iterator[dict[str, Any]]:
    shell = InteractiveShell.instance()
    yield shell.user_ns
    InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("make", "described"),
    [
        (lambda: dict, "class dict"),
        (lambda: Raising, "class Raising"),
        (Raising, "Raising"),
        (NoLength, "NoLength"),
        (NoRepr, "NoRepr"),
        (lambda: "\ud800", "str '\\ud800'"),
        (lambda: [1, 2], "list of 2"),
    ],
)
def test_any_object_is_described(variables: dict[str, Any], make: Callable[[], Any], described: str) -> None:
    variables["thing"] = make()
    assert namespace.describe("thing") == {"thing": described}
