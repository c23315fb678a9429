"""Closes widgets with all their parts: ipywidgets keeps every widget in memory until it is closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ipywidgets import Widget


def close(widget: Widget) -> None:
    """Close ``widget``, its children, and their layouts and styles."""
    parts = {id(part): part for part in _parts(widget, set())}
    for part in parts.values():
        part.close()


def _parts(widget: Widget, seen: set[int]) -> Iterator[Widget]:
    if id(widget) in seen:
        return
    seen.add(id(widget))
    for name in widget.keys:
        for value in _widgets(getattr(widget, name)):
            yield from _parts(value, seen)
    yield widget


def _widgets(value: Any) -> Iterator[Widget]:
    if isinstance(value, Widget):
        yield value
    elif isinstance(value, list | tuple):
        yield from (one for one in value if isinstance(one, Widget))
    elif isinstance(value, Mapping):
        yield from (one for one in value.values() if isinstance(one, Widget))
