"""Knobs of this rank, and the changes that its user makes to them: all ranks take a change at the same point of a run.

A point is the end of a step that all ranks have committed to (`step_guard`), or a call of `step`. Changes are numbered
from 1 in a run, by its rank 0. With each commit a rank sends the number up to which it has received all changes; the
ranks get the least of these numbers, and take the changes up to it after the step. A pause and its end are changes too.
"""

from __future__ import annotations

import math
import operator
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import time
from typing import Any
from weakref import WeakValueDictionary

from ring_notebook.core import metrics, world
from ring_notebook.protocol.knobs import Range, Value, encoded, made, unknown
from ring_notebook.protocol.records import PAUSE, RESUME, SET, SNAPSHOT, Change, KnobRecord, Record
from ring_notebook.text.error_text import error_text

_LOOK = 1.0  # seconds between checks of a paused rank whether another one has failed


class Knob:
    """A value that its user may change while the cell runs; use it as the number, bool or text that it is.

    ``value`` is the present value. It changes only at the points of a run at which all ranks take a change, so it is
    equal on all ranks, and constant within a step.
    """

    __array_ufunc__ = None  # numpy leaves the operation to the methods below

    def __init__(
        self,
        name: str,
        range_: Range,
        value: Value,
        read: Callable[[], Value] | None = None,
        apply: Callable[[Value], object] | None = None,
    ) -> None:
        self.name = name
        self.range = range_
        self.made_in = steering.run
        self._value = value
        self._read, self._apply = read, apply

    @property
    def value(self) -> Any:
        return self._value if self._read is None else self._read()

    @property
    def is_own(self) -> bool:
        """Whether the user's code made it, not an optimizer."""
        return self._read is None

    def take(self, value: Value) -> None:
        """Change the value, as part of a change that all ranks take."""
        if self._apply is not None:
            self._apply(value)
        self._value = value

    def __reduce__(self) -> Any:
        return _kept, (self.name, self.range, self.value)

    def __repr__(self) -> str:
        return f"<knob {self.name} = {self.value!r}>"

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value, form)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return self.value.__index__()  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == _value(other))

    __hash__ = None  # type: ignore[assignment]


def _value(other: Any) -> Any:
    return other.value if isinstance(other, Knob) else other


def _forward(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def operation(self: Knob, *others: Any) -> Any:
        operands = (self.value, *map(_value, others))
        return function(*(reversed(operands) if reflected else operands))

    return operation


_BINARY = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    divmod,
)
_UNARY = (operator.neg, operator.pos, operator.abs, round, math.trunc, math.floor, math.ceil)
for _function in (*_BINARY, *_UNARY, operator.lt, operator.le, operator.gt, operator.ge):
    setattr(Knob, f"__{_function.__name__}__", _forward(_function, False))
for _function in _BINARY:
    setattr(Knob, f"__r{_function.__name__}__", _forward(_function, True))


class _Steering:
    """The knobs and changes of this process. Another thread receives changes; the main thread takes them."""

    def __init__(self) -> None:
        self.knobs: dict[str, Knob] = {}
        """The knobs of the run, by name."""
        self._own: WeakValueDictionary[str, Knob] = WeakValueDictionary()  # knobs that the user's code made
        self._on_pause: Callable[[bool], object] = bool
        self._on_snapshot: Callable[[Mapping[str, Any], int], object] = lambda _asked, _number: None
        self.begin("", 0)

    def begin(
        self,
        run: str,
        rank: int,
        due: Sequence[Mapping[str, Any]] = (),
        on_pause: Callable[[bool], object] = bool,
        on_snapshot: Callable[[Mapping[str, Any], int], object] = lambda _asked, _number: None,
    ) -> None:
        """Begin a run with changes that are ``due`` at points: another run's, and pauses.

        Values that are due at point 0 replace the first values of knobs. ``on_snapshot`` gets the request for a
        snapshot and the number of the change; all ranks call it at the same point.
        """
        self.run, self.rank = run, rank
        self.newest = 0
        """All changes up to this number have been received."""
        self.taken = 0
        self.points = 0
        self.is_paused = False
        self._received: dict[int, Mapping[str, Any]] = {}
        self._arrived = threading.Condition()
        self._let_go = False
        self._on_pause, self._on_snapshot = on_pause, on_snapshot
        self._due = deque(sorted((one for one in due if one["point"]), key=lambda one: int(one["point"])))
        self._first = {name: one for one in due if not one["point"] for name in one["values"]}
        self._dues = 0
        self._next = self._due[0]["point"] if self._due else -1
        self._records: deque[Record] = deque()
        self.knobs = {}
        for knob in list(self._own.values()):  # in variables of earlier cells
            self.add(knob)

    def end(self) -> list[Mapping[str, Any]]:
        """End the run; returns the changes that no rank has taken."""
        left = [*self.untaken(), *({**one, "values": {name: one["values"][name]}} for name, one in self._first.items())]
        self.run, self.newest, self.taken, self._next = "", 0, 0, -1
        return left

    def add(self, knob: Knob) -> None:
        """Add a knob to the run; replaces a knob of that name."""
        self.knobs = {**self.knobs, knob.name: knob}  # another thread may be reading the old one
        if knob.is_own:
            self._own[knob.name] = knob
        if self.run:
            self._records.append(KnobRecord(self.run, self.rank, knob.name, knob.value, encoded(knob.range)))
            if first := self._first.pop(knob.name, None):
                value = first["values"][knob.name]
                value = knob.range.read(value, knob.name) if isinstance(value, str) else value
                self._dues += 1
                self._make({**first, "values": {knob.name: value}, "number": -self._dues})

    def drain(self) -> list[Record]:
        """The records of new knobs and of changes that were taken. Any thread may call it."""
        return [self._records.popleft() for _ in range(len(self._records))]

    # --- received ---
    def receive(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Receive changes, in any order; repeated ones are ignored."""
        with self._arrived:
            for one in changes:
                if int(one["number"]) > self.newest:
                    self._received[int(one["number"])] = one
            while self.newest + 1 in self._received:
                self.newest += 1
            self._arrived.notify_all()

    def untaken(self) -> list[Mapping[str, Any]]:
        """The changes that were received and not taken, in order."""
        return [one for number, one in sorted(self._received.copy().items()) if number > self.taken]

    def let_go(self) -> None:
        """End a pause without a change, because the run ends."""
        with self._arrived:
            self._let_go = True
            self._arrived.notify_all()

    # --- taken ---
    def passed(self, agreed: int) -> None:
        """Note that all ranks are at a point and have received the changes up to ``agreed``; take these."""
        self.points += 1
        metrics.pass_point(self.points)
        if self.points == self._next:
            self._take_due()
        if agreed > self.taken:
            self.take(agreed)

    def take(self, agreed: int) -> None:
        """Take the changes up to number ``agreed``."""
        while self.taken < agreed:
            self.taken += 1
            self._make(self._received.pop(self.taken))

    def _take_due(self) -> None:
        while self._due and self._due[0]["point"] <= self.points:
            self._dues += 1
            self._make({**self._due.popleft(), "number": -self._dues})
        self._next = self._due[0]["point"] if self._due else -1

    def _make(self, change: Mapping[str, Any]) -> None:
        made = {}
        if change["action"] == SNAPSHOT:
            self._on_snapshot(change["values"], change["number"])
            return
        if change["action"] != SET:
            self.is_paused = change["action"] == PAUSE
        for name, value in change["values"].items():
            try:
                knob = self.knobs[name]
                knob.take(knob.range.checked(value, name))
                made[name] = value
            except Exception as error:  # this rank has no such knob, or its optimizer refuses the value
                why = f"{type(error).__name__}: {error_text(error)}"
                sys.stderr.write(f"ring.knob: rank {self.rank} has not set {name} = {value!r} ({why})\n")
        self._records.append(
            Change(
                self.run,
                self.rank,
                time(),
                change["number"],
                change["action"],
                made,
                change["who"],
                self.points,
                metrics.next_step(),
            )
        )

    def wait(self) -> None:
        """Return when a change that ends the pause has been received, or a rank has failed. An interrupt ends it."""
        self._on_pause(True)
        try:
            with self._arrived:
                while not self._ends() and not self._let_go and not world.is_aborted():
                    self._arrived.wait(_LOOK)
        finally:
            self._on_pause(False)
        self.is_paused = self.is_paused and not self._let_go

    def _ends(self) -> bool:
        return any(one["action"] in (RESUME, SNAPSHOT) for one in self.untaken() if one["number"] <= self.newest)


steering = _Steering()
"""The knobs of this process."""


def knob(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    log: bool | None = None,
    choices: Sequence[Any] = (),
) -> Knob:
    """A value that you may change while the cell runs, for example ``lr = ring.knob("lr", 0.1, low=1e-5, high=1)``.

    The result is used like the number that it is: ``float(lr)``, ``lr.value``, ``loss * lr``. It shows as a slider in
    the panel; ``%ring set lr=0.05`` and ``run.set(lr=0.05)`` change it too. All ranks take a change at the same point:
    at the end of a step of an optimizer that all ranks of the run train with, or in `step`. In a script it stays as it
    is. A second call in a run gives the same knob, with its present value; a call in a later run a new one.

    value: the first value: a float, an int (it then takes whole numbers), a bool, or one of ``choices``.
    low, high: the least and the greatest value of a number, inclusive.
    log: the slider divides its range evenly in the logarithm; by default where ``low`` is above 0 and ``high`` is 50
        times as large.
    choices: the values that it takes.

    Raises TypeError or ValueError for a value outside of its own range, for ranges that contradict themselves, and for
    the name of a knob that an optimizer of this run has.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"knob {name!r}: a name has letters, digits and _, so that `%ring set {name}=...` can have it")
    range_ = made(name, _value(value), low, high, log, choices)
    before = steering.knobs.get(name)
    if before is not None and before.is_own and before.made_in == steering.run != "" and before.range == range_:
        return before
    if before is not None and not before.is_own:
        raise ValueError(
            f"knob {name!r} belongs to a prepared optimizer already: use `%ring set {name}=...`, or "
            "give this knob another name"
        )
    new = Knob(name, range_, range_.checked(_value(value), name))
    steering.add(new)
    return new


def _kept(name: str, range_: Range, value: Value) -> Knob:
    """Unpickle a knob, for instance of a snapshot, and add it to the run unless that has a knob of its name."""
    one = Knob(name, range_, value)
    if name not in steering.knobs:
        steering.add(one)
    return one


def change(run: str, action: str, values: Mapping[str, Any], who: str) -> dict[str, Any]:
    """On rank 0: number a change that the kernel asks for; returns all changes that a rank may not have received yet.

    ``values`` are texts, or the values themselves. Returns ``{"changes": [...], "values": {...}}``, or
    ``{"error": text}`` if a knob does not exist or refuses its value; then ``"early"`` says whether the run has made no
    step, so that the knob may still come.
    """
    if run != steering.run:
        return {"error": "the run has not begun on rank 0, or has ended", "early": True}
    knobs = steering.knobs
    try:
        for name in values if action == SET else ():
            if name not in knobs:
                raise ValueError(unknown(name, knobs))
        read = (
            {
                name: knobs[name].range.read(value, name)
                if isinstance(value, str)
                else knobs[name].range.checked(value, name)
                for name, value in values.items()
            }
            if action == SET
            else dict(values)
        )
    except ValueError as error:
        return {"error": str(error), "early": not steering.points and not values.keys() <= knobs.keys()}
    one = {"number": steering.newest + 1, "action": action, "values": read, "who": who}
    steering.receive([one])
    return {"changes": [*steering.untaken()], "values": read}


def receive(run: str, changes: Sequence[Mapping[str, Any]]) -> None:
    """On the other ranks: receive the changes that rank 0 has numbered."""
    if run == steering.run:
        steering.receive(changes)


def let_go() -> None:
    """End a pause, because another rank has failed or died."""
    steering.let_go()


def present() -> dict[str, Value]:
    """The present values of all knobs, by name."""
    return {name: one.value for name, one in steering.knobs.items()}
