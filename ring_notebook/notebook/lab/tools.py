"""The tools of agents: methods of `Lab` and `Handle`, within the bounds of a person, and written to a journal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, getdoc, signature
from threading import Lock
from time import monotonic
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ring_notebook.errors import RingError
from ring_notebook.notebook.lab.answers import Answer, RunVerdict, Said, Table, clean, said, schema, table
from ring_notebook.notebook.lab.handle import Handle, Progress
from ring_notebook.notebook.lab.lab import Lab
from ring_notebook.notebook.run.agent_calls import begin_call, end_call

Permission = Literal["read", "steer", "run", "manage"]
PERMISSIONS: tuple[Permission, ...] = get_args(Permission)
MOST_BYTES = 256 << 10
"""Of an answer as JSON, and of the arguments of a call."""
_MOST_LIST = 1000
_MOST_ERROR = 2000  # characters
_MOST_WAIT, _USUAL_WAIT = 3600.0, 60.0  # seconds
_HIDDEN = ("self", "progress", "options")  # parameters that are no arguments of tools


@dataclass(frozen=True)
class Bounds:
    """What a person allows: permissions, and for each run the most seconds and ranks, 0 for all of the cluster."""

    may: frozenset[str] = frozenset({"read"})
    seconds: float = 600.0
    ranks: int = 0

    def __str__(self) -> str:
        allowed = ", ".join(one for one in PERMISSIONS if one in self.may) or "nothing"
        return f"may {allowed}; a run at most {self.seconds:g} s" + (f" on {self.ranks} ranks" if self.ranks else "")


class RefusedError(RingError):
    """A call that the bounds do not allow, or with arguments that the tool does not take; nothing was done."""


class Tool(NamedTuple):
    """A method, and the permission that it ``needs``. Methods of `Handle` take the argument ``run``: the beginning of a
    name or id; empty for the newest run."""

    method: Callable[..., Any]
    needs: Permission

    @property
    def about(self) -> str:
        """What it does, without what it raises: a call that fails says that."""
        return " ".join((getdoc(self.method) or "").split()).partition(" Raises ")[0].replace("``", "`")

    @property
    def of_run(self) -> bool:
        """Whether it is a method of `Handle`."""
        return self.method.__qualname__.startswith("Handle.")

    @property
    def arguments(self) -> dict[str, tuple[Any, Any]]:
        """The type and the default of each argument, by name; Parameter.empty without a default."""
        hints = get_type_hints(self.method)
        found: dict[str, tuple[Any, Any]] = {}
        for name, one in signature(self.method).parameters.items():
            if one.kind is Parameter.VAR_POSITIONAL:  # of names; a program may also give handles
                found[name] = Sequence[str], ()
            elif one.kind is Parameter.VAR_KEYWORD and name not in _HIDDEN:
                found[name] = Mapping[str, Any], Parameter.empty
            elif name not in _HIDDEN:
                found[name] = hints[name], _USUAL_WAIT if name == "timeout" else one.default
        return found | ({"run": (str, "")} if self.of_run else {})

    @property
    def input_schema(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        made = {name: schema(hint) for name, (hint, _) in self.arguments.items()}
        for name, (_, default) in self.arguments.items():
            made[name] |= {} if default is Parameter.empty else {"default": default}
        required = [name for name, (_, default) in self.arguments.items() if default is Parameter.empty]
        return {"type": "object", "properties": made, "required": required, "additionalProperties": False}

    @property
    def answer(self) -> type[Answer]:
        """The class of its answer."""
        hint = get_type_hints(self.method)["return"]
        if isinstance(hint, type) and issubclass(hint, Answer):
            return hint
        return RunVerdict if hint is Handle else Table if get_origin(hint) is list else Said

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise RefusedError for arguments that the tool does not take."""
        known = self.arguments
        if unknown := [name for name in given if name not in known]:
            raise RefusedError(f"no argument {clean(unknown[0], 60)!r}; there are: {', '.join(known) or 'none'}")
        for name, (hint, default) in known.items():
            if name not in given and default is Parameter.empty:
                raise RefusedError(f"the argument {name} is missing")
            if name in given and not _fits(given[name], hint):
                raise RefusedError(f"{name}: expected {json.dumps(schema(hint))}")

    def call(self, lab: Lab, given: Mapping[str, Any], progress: Progress) -> Answer:
        """Call the method, with arguments that `check` has seen."""
        rest, places = {name: one for name, one in given.items() if name != "run" or not self.of_run}, []
        kinds = {name: one.kind for name, one in signature(self.method).parameters.items()}
        for name in [*rest]:
            if kinds[name] is Parameter.VAR_POSITIONAL:
                places = rest.pop(name)
            elif kinds[name] is Parameter.VAR_KEYWORD:
                rest |= rest.pop(name)
        rest |= {"progress": progress} if "progress" in kinds else {}
        owner = lab.find(given.get("run", "")) if self.of_run else lab
        return _answer(self.method(owner, *places, **rest))


def _answer(result: Any) -> Answer:
    if isinstance(result, Handle):
        return result.verdict()
    if isinstance(result, list):
        return table(("name", "status"), [(one.name, one.status) for one in result])
    words = {True: "done", False: "not yet", None: "done"}
    return result if isinstance(result, Answer) else said(words.get(result) or str(result))


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Sequence:
        return isinstance(value, list) and len(value) <= _MOST_LIST and all(_fits(one, inner[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, dict) and len(value) <= _MOST_LIST and all(_fits(v, inner[1]) for v in value.values())
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return _fits(value, float) or type(value) in (str, bool) if hint is Any else type(value) is hint


_READ = (Lab.status, Lab.runs, Lab.queue, Lab.stacks, Lab.compare, Handle.verdict, Handle.wait, Handle.curves)
_READ_MORE = (Handle.chart, Handle.output, Handle.cell, Handle.trace, Handle.knobs)
_METHODS: dict[Permission, Sequence[Callable[..., Any]]] = {
    "read": (*_READ, *_READ_MORE),
    "steer": (Handle.set, Handle.pause, Handle.resume, Handle.stop, Handle.snapshot),
    "run": (Lab.run, Handle.branch),
    "manage": (Lab.start_cluster, Lab.stop_cluster, Lab.heal),
}
_NAMES = {"run": "run_cell", "set": "set_knobs"}
TOOLS = {
    _NAMES.get(method.__name__, method.__name__): Tool(method, needs)
    for needs, methods in _METHODS.items()
    for method in methods
}
"""By name."""


@dataclass
class ToolCalls:
    """Where calls of agents arrive: it checks them against ``bounds`` and writes them to the journal.

    Without a cluster, the first run starts one of ``starts`` ranks, unless that is 0.
    """

    lab: Lab
    bounds: Bounds
    starts: int = 0
    _starting: Lock = field(default_factory=Lock)

    def call(
        self, who: str, name: str, given: Mapping[str, Any], progress: Progress = lambda *_: True
    ) -> dict[str, Any]:
        """The tool's ``text``, its ``data`` (see its schema), and whether it is an ``error``; raises nothing."""
        who, began = clean(who, 60) or "an agent", monotonic()
        try:
            call = begin_call(who, clean(name, 60), given)
        except OSError as error:
            return _error(f"the journal of calls cannot be written ({error.strerror}), so nothing is done")
        outcome = "failed: it was not finished"
        try:
            answer = self._answer(who, name, given, progress)
            found = {"text": answer.text(), "data": answer.json(), "error": False}
            if len(json.dumps(found)) > MOST_BYTES:
                raise RingError(f"the answer has more than {MOST_BYTES >> 10} KiB; ask for less")
            outcome = "ok"
            return found
        except Exception as error:
            text = clean(f"{type(error).__name__}: {error}", _MOST_ERROR)
            outcome = f"{'refused' if isinstance(error, RefusedError) else 'failed'}: {text}"
            return _error(text)
        finally:
            end_call(call, outcome, monotonic() - began)

    def _answer(self, who: str, name: str, given: Mapping[str, Any], progress: Progress) -> Answer:
        tool = TOOLS.get(name)
        if tool is None:
            raise RefusedError(f"there is no tool {clean(name, 60)!r}; there are: {', '.join(TOOLS)}")
        if tool.needs not in self.bounds.may:
            raise RefusedError(f"{name} needs the permission {tool.needs!r}; you {self.bounds}")
        tool.check(given)
        with self._starting:
            if self.starts and tool.needs == "run" and self.lab.session.cluster is None:
                self.lab.start_cluster(self.starts)
        lab = self.lab.asked_by(who)
        answer = tool.call(lab, self._within(name, tool, given), progress)
        if name == "status" and isinstance(answer, Table):
            return Table(answer.columns, answer.rows, "; ".join(filter(None, [answer.note, f"you {self.bounds}"])))
        return answer

    def _within(self, name: str, tool: Tool, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with limits where none were given. Raises RefusedError above what the bounds allow."""
        known, made = tool.arguments, dict(given)
        if "timeout" in known:
            made["timeout"] = min(max(0.0, given.get("timeout", _USUAL_WAIT)), _MOST_WAIT)
        if "seconds" in known:
            if made.get("seconds", 0.0) > self.bounds.seconds:
                raise RefusedError(f"a run may take at most {self.bounds.seconds:g} s, asked for {made['seconds']:g} s")
            made["seconds"] = made.get("seconds") or self.bounds.seconds
        if "n" in known or name == "branch":
            there = self.lab.cluster.n if tool.needs == "run" else self.bounds.ranks or math.inf
            most = min(self.bounds.ranks or there, there)
            asked = self.lab.find(given.get("run", "")).verdict().ranks if name == "branch" else made.get("n") or 0
            if asked > most:
                raise RefusedError(f"at most {most} ranks are allowed, asked for {asked}")
            if name != "branch" and (asked or most < math.inf):
                made["n"] = asked or most
        return made


def _error(text: str) -> dict[str, Any]:
    return {"text": text, "data": None, "error": True}
