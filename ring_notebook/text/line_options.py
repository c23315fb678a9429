"""Options of a line, each declared in the annotation of what it sets, and readers of what a user types as a value."""

from __future__ import annotations

import argparse
import ast
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import Parameter, get_annotations, signature
from keyword import iskeyword
from typing import Any, TypeVar, get_type_hints
from unicodedata import normalize

T = TypeVar("T")
_MOST_RANKS = 1 << 16  # in one span, so that a typo costs no memory
MOST_RUNS = 1000  # of a sweep, for the same reason
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Option:
    """An option, or without a dash an argument, ``shown`` as it is typed: ``-t, --ranks 0,2-3``, ``--keep``, ``NAME``.

    It sets the parameter or field in whose annotation it stands::

        ranks: Annotated[Sequence[int] | None, Option("-t, --ranks 0,2-3", "start these again", rank_numbers)] = None

    ``read`` makes its value from a text; an option without a value sets ``const``. Without ``help`` it is hidden. A
    line may have one ``exclusive`` option. ``many``: several values, or with ``repeats`` texts of several such options.
    ``complete(session, begun)`` gives values that a user may mean.
    """

    shown: str
    help: str = ""
    read: Callable[[str], Any] = str
    choices: Sequence[str] = ()
    const: Any = True
    exclusive: bool = False
    many: bool = False
    repeats: bool = False
    complete: Callable[[Any, str], Iterable[str]] | None = None
    sets: str = ""
    default: Any = Parameter.empty

    @property
    def flags(self) -> list[str]:
        """The flags as they are typed; none for an argument."""
        return [word.rstrip(",") for word in self.shown.split() if word.startswith("-")]

    @property
    def value(self) -> str:
        """The name of its value; empty if it takes none."""
        return "".join(word for word in self.shown.split() if not word.startswith("-"))

    @property
    def usage(self) -> str:
        """The option as it is typed, in brackets if it may be left out."""
        return self.shown if self.default is Parameter.empty else f"[{self.shown}]"

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        given: dict[str, Any] = {"help": argparse.SUPPRESS, "default": self.default}
        required = self.default is Parameter.empty
        if self.flags:
            given["dest"] = self.sets
        if self.value:
            given |= {"type": read_by(self.read), "metavar": self.value, "choices": self.choices or None}
            if self.repeats:
                given["action"] = "append"
            elif self.many:
                given["nargs"] = "+" if required or self.flags else "*"
            elif not required and not self.flags:
                given["nargs"] = "?"
        else:
            given |= {"action": "store_const", "const": self.const}
        parser.add_argument(*(self.flags or [self.sets]), **given)


def options_of(*declared: Callable[..., Any]) -> list[Option]:
    """The options of the parameters of functions, and of the fields of dataclasses."""
    found = []
    for one in declared:
        parameters = signature(one).parameters
        # Python 3.10 changes the annotation of a function's parameter with the default None.
        hints = (
            get_type_hints(one, include_extras=True) if isinstance(one, type) else get_annotations(one, eval_str=True)
        )
        for name, hint in hints.items():
            options = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Option)]
            found += [replace(option, sets=name, default=parameters[name].default) for option in options]
    return found


def read_by(read: Callable[[str], T]) -> Callable[[str], T]:
    """``read`` as a type of argparse, which shows the text of its own errors only."""

    def type_of(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return type_of


def count(text: str) -> int:
    """A number of things, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def count_or_zero(text: str) -> int:
    """A number of things, or 0."""
    return 0 if text == "0" else count(text)


def seconds(text: str) -> float:
    """Seconds, 0 or more."""
    value = -1.0
    with suppress(ValueError):
        value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"expected seconds, 0 or more, got {text!r}")
    return value


def duration(text: str) -> float:
    """``90s``, ``20m`` or ``2h`` in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text)
    if match is None:
        raise ValueError(f"expected a time such as 90s, 20m or 2h, got {text!r}")
    return float(match[1]) * _UNITS[match[2] or ""]


def rank_numbers(text: str) -> list[int]:
    """``0,2-3`` as ranks in order."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last.isdecimal() if dash else not last) or int(last or first) < int(first):
            raise ValueError(f"expected ranks such as 0,2-3, got {text!r}")
        chosen.update(range(int(first), min(int(last or first), int(first) + _MOST_RANKS) + 1))
    return sorted(chosen)


def step_list(text: str) -> list[int]:
    """``100,200`` as steps, from 1."""
    return [count(step) for step in text.split(",")]


def knob_value(text: str) -> tuple[str, str]:
    """``lr=0.05`` as the name of a knob and its value, which the knob reads."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals and value):
        raise ValueError(f"expected the value of a knob such as lr=0.05, got {text!r}")
    return name, value


def values_of(text: str) -> tuple[str, list[bool | int | float | str | None]]:
    """``lr=0.1,0.01`` or ``seed=0..3``, which ends with 3, as a name and its values: Python's, or texts."""
    name, _, listed = text.partition("=")
    if span := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", listed):
        first, last = map(int, span.groups())
        values: list[Any] = list(range(first, min(last, first + MOST_RUNS) + 1))
    else:
        values = [_value(one) for one in listed.split(",") if one]
    if not name.isidentifier() or iskeyword(name) or not values:
        raise ValueError(f"expected a name and values such as lr=0.1,0.01 or seed=0..3, got {text!r}")
    if len(values) > MOST_RUNS:
        raise ValueError(f"expected at most {MOST_RUNS} values, got {text!r}")
    return normalize("NFKC", name), list({repr(one): one for one in values}.values())  # as Python spells names


def _value(text: str) -> bool | int | float | str | None:
    """The value of a Python literal; any other text stays."""
    with suppress(ValueError, SyntaxError):
        if (value := ast.literal_eval(text)) is None or isinstance(value, bool | int):
            return value
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        raise ValueError(f"expected finite numbers, got {text!r}")
    return number


def name_list(text: str) -> list[str]:
    """``loss,acc`` as a list."""
    return [name for name in text.split(",") if name]
