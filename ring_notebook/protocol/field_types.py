"""Checks that values from another process have the types that a dataclass declares."""

from __future__ import annotations

from array import array
from dataclasses import fields
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN = (str, int, bool, bytes)


def check_fields(cls: Any, values: dict[str, Any]) -> None:
    """Raise ValueError with the name of a field that dataclass ``cls`` lacks or declares with another type."""
    hints = _hints(cls)
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"there is no field {name!r:.100}")
        hint = hints[name]
        if not (type(value) is hint if hint in _PLAIN else _fits(value, hint)):
            raise ValueError(f"{name}: expected {hint}, got {value!r:.100}")


@lru_cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, localns={"array": list})  # before Python 3.12, array takes no parameter at run time
    return {field.name: hints[field.name] for field in fields(cls)}


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        return type(value) in (int, float) if hint is float else type(value) is hint
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inner[1:] == (...,):  # thousands of names of metrics, perhaps
            return set(map(type, value)) <= {inner[0]} if inner[0] in _PLAIN else all(_fits(v, inner[0]) for v in value)
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    return isinstance(value, array)
