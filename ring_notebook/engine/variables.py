"""The ranks' variables: put there, taken from there, described."""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

import cloudpickle
from IPython.core.interactiveshell import InteractiveShell

__all__ = ["describe", "get", "put"]


def put(pickled: bytes) -> None:
    """Set variables from a pickled dict."""
    _namespace().update(pickle.loads(pickled))


def get(name: str) -> bytes:
    """The value of a variable, pickled with the classes that the cells defined.

    Raises NameError when there is none, TypeError when it cannot be pickled.
    """
    namespace = _namespace()
    if name not in namespace:
        raise NameError(f"no variable {name!r} on this rank; `%ring status` lists what the ranks have")
    try:
        data: bytes = cloudpickle.dumps(namespace[name])
    except Exception as error:
        kind = type(namespace[name]).__name__
        raise TypeError(
            f"{name!r} ({kind}) cannot be pickled: {error}; pull what it is made of, such as its state_dict()"
        ) from None
    return data


def describe(name: str = "") -> dict[str, str]:
    """Type, shape, dtype and device of a variable, or of all that cells have made; missing ones left out."""
    namespace = _namespace()
    hidden = InteractiveShell.instance().user_ns_hidden
    names = [name] if name else [key for key in namespace if not key.startswith("_") and key not in hidden]
    return {
        key: _kind(namespace[key])
        for key in names
        if key in namespace and (name or not isinstance(namespace[key], ModuleType))
    }


def _kind(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, (bool, int, float, str)):
        text = repr(value)
        return f"{kind} {text}" if len(text) <= 40 else f"{kind} {text[:37]}..."
    details = [
        str(tuple(value.shape)) if hasattr(value, "shape") else "",
        str(getattr(value, "dtype", "")),
        f"on {value.device}" if hasattr(value, "device") else "",
    ]
    if not any(details) and hasattr(value, "__len__"):
        details = [f"of {len(value)}"]
    return " ".join([kind, *filter(None, details)])


def _namespace() -> dict[str, Any]:
    namespace: dict[str, Any] = InteractiveShell.instance().user_ns
    return namespace
