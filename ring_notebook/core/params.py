"""The hyper-parameters of a run: what its cell names, and what its optimizers and loaders were made with."""

from __future__ import annotations

from typing import Any

__all__ = ["begin", "drain", "log_params", "note"]

_LONGEST = 200  # characters of a value that is no number
_values: dict[str, Any] = {}
_logged: set[str] = set()
_changed = False


def log_params(**values: Any) -> None:
    """Record hyper-parameters of the run, for example ``log_params(lr=0.1, model="small")``; returns at once.

    They are shown with the run, listed by ``%ring runs`` and compared. Those of an optimizer and a loader that are
    made distributed, and constants of the cell, are recorded without it; a value that is given here comes first. What
    is no number, text or truth is recorded as its text. Rank 0's values count where ranks differ.
    """
    global _changed
    _values.update({name: _plain(value) for name, value in values.items()})
    _logged.update(values)
    _changed = True


def note(**values: Any) -> None:
    """Record what the cell has not given itself."""
    global _changed
    for name, value in values.items():
        if name not in _logged:
            _values[name] = _plain(value)
            _changed = True


def begin() -> None:
    """A run starts: forget those of the last one."""
    global _changed
    _values.clear()
    _logged.clear()
    _changed = False


def drain() -> dict[str, Any] | None:
    """All of them, when there are new ones since the last call. Callable from any thread."""
    global _changed
    if not _changed:
        return None
    _changed = False
    return dict(_values)


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value if not isinstance(value, str) else value[:_LONGEST]
    return str(value)[:_LONGEST]
