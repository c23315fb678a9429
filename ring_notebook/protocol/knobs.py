"""The range of a knob: the values that it takes, how they are read from text, and how a slider divides them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

Value: TypeAlias = float | int | bool | str
"""The value of a knob."""

HAS_STEPS = "an optimizer of `ring.prepare` makes them, or `ring.step()`"
"""Advice for a run whose ranks had no point at which all take a change."""

_WIDE = 50.0  # the least ratio of the ends of a range that a slider divides evenly in its logarithm
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Range:
    """The values of a knob: those of ``choices`` if there are some, else those like ``first`` within low and high.

    A bool takes True and False, an int whole numbers, a float finite numbers. ``low`` and ``high`` are None without a
    limit. With ``log`` a slider divides the range evenly in its logarithm.
    """

    first: Value
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Value, ...] = ()

    def checked(self, value: Any, name: str) -> Value:
        """``value`` as the knob ``name`` takes it. Raises ValueError, which says what it takes."""
        if self.choices:
            for one in self.choices:
                if value == one and isinstance(value, str) == isinstance(one, str):
                    return one
        elif isinstance(self.first, bool):
            if isinstance(value, bool):
                return value
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            number = value if isinstance(self.first, int) else float(value)
            fits = not isinstance(self.first, int) or number == int(number)
            above = self.low is None or number >= self.low
            if fits and above and (self.high is None or number <= self.high):
                return int(number) if isinstance(self.first, int) else number
        raise ValueError(f"{name} = {value!r}: the knob takes {self.described()}")

    def read(self, text: str, name: str) -> Value:
        """The value that a user has typed. Raises ValueError, which says what the knob ``name`` takes."""
        if self.choices:
            found = [one for one in self.choices if str(one) == text or _is_number(text, one)]
            return found[0] if found else self.checked(text, name)
        if isinstance(self.first, bool) and text.lower() in (*_YES, *_NO):
            return text.lower() in _YES
        try:
            return self.checked(float(text) if not text.lstrip("+-").isdecimal() else int(text), name)
        except ValueError:
            raise ValueError(f"{name} = {text}: the knob takes {self.described()}") from None

    def described(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if isinstance(self.first, bool):
            return "True or False"
        kind = "whole numbers" if isinstance(self.first, int) else "numbers"
        ends = [f"from {self.low:g}"] if self.low is not None else []
        ends += [f"to {self.high:g}"] if self.high is not None else []
        return " ".join([kind, *ends])


def _is_number(text: str, value: Value) -> bool:
    """Whether ``text`` is another way to write the number ``value``, such as ``1e-3`` for 0.001."""
    if isinstance(value, bool | str):
        return isinstance(value, bool) and text.lower() in (_YES if value else _NO)
    try:
        return float(text) == value
    except ValueError:
        return False


def made(
    name: str, first: Any, low: float | None, high: float | None, log: bool | None, choices: Iterable[Any]
) -> Range:
    """The range of a new knob. Raises TypeError or ValueError where the arguments contradict each other."""
    chosen = tuple(choices)
    for one in (first, *chosen):
        if not isinstance(one, bool | int | float | str):
            raise TypeError(f"knob {name!r}: a value is a number, a bool or a str, got {one!r:.100}")
    if isinstance(first, str) and not chosen:
        raise ValueError(f"knob {name!r}: a str needs choices=[...]")
    limits = [one for one in (low, high) if one is not None]
    if limits and (chosen or isinstance(first, bool)):
        raise ValueError(f"knob {name!r}: low and high are for numbers, not for a bool or choices")
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in limits):
        raise ValueError(f"knob {name!r}: low and high must be finite numbers, got {low!r} and {high!r}")
    if low is not None and high is not None and low >= high:
        raise ValueError(f"knob {name!r}: low must be less than high, got {low:g} and {high:g}")
    if log and (low is None or low <= 0):
        raise ValueError(f"knob {name!r}: log=True needs a low above 0, got {low!r}")
    if log is None:
        log = low is not None and high is not None and low > 0 and high / low >= _WIDE
    whole = Range(first, low, high, bool(log), chosen)
    whole.checked(first, name)
    return whole


def encoded(one: Range) -> dict[str, Any]:
    return {**asdict(one), "choices": list(one.choices)}


def decoded(fields: Mapping[str, Any]) -> Range:
    """The range that `encoded` has made. Raises TypeError or KeyError for another one."""
    return Range(**{**fields, "choices": tuple(fields["choices"])})


def unknown(name: str, known: Iterable[str]) -> str:
    """The error for a knob that does not exist."""
    names = list(known)
    if not names:
        return (
            f"there is no knob {name!r}: the run has none yet; `ring.prepare` makes those of an optimizer, and "
            "`ring.knob` any other"
        )
    like = get_close_matches(name, names, 1)
    return f"there is no knob {name!r}; " + (f"did you mean {like[0]}?" if like else f"there are {', '.join(names)}")
