"""Variables as a snapshot brings them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ring_notebook.core import kept_state


def kept_again(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` through `kept_state.dump` and `load`; all of them are kept."""
    store: dict[str, bytes] = {}

    def put(memory: memoryview) -> str:
        store[name := str(len(store))] = bytes(memory)
        return name

    def get(name: str, into: memoryview) -> None:
        into[:] = store[name]

    kept = kept_state.dump(values, put)
    assert kept.left_out == {}
    return kept_state.load((0, 1), 1, lambda rank: kept.content, get).values
