"""The variables of a rank's cells: sets, reads and describes them, and provides ``ring``."""

from __future__ import annotations

import ast
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, cast

import cloudpickle
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.engine import setup
from ring_notebook.frameworks import Framework, default, frameworks, named
from ring_notebook.rank.rank_threads import threads_set
from ring_notebook.text.error_text import printable
from ring_notebook.text.words import first_characters

_MOST_NAMES = 12  # in a message
_MOST_HELP = 20_000  # characters
_NOTHING = object()


def provide_ring(names: set[str]) -> None:
    """Bind ``ring`` to the face of the framework that a cell with these names uses, unless the user has bound it.

    A cell that names no framework keeps the ``ring`` of the cell before it.
    """
    if "ring" in names or default().named_in(names):
        setup.wait_for_preload()
    if "ring" not in names:
        return
    namespace, wanted = _namespace(), named(names)
    if "ring" not in namespace or (wanted and getattr(namespace["ring"], "__name__", "") in _faces()):
        namespace["ring"] = import_module((wanted or default()).face)


def prepare_calls(tree: ast.AST) -> None:
    """Make the calls that frameworks need before a cell that names one of their functions."""
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for framework in frameworks():
        for function in {function for call, function in framework.before.items() if call in named}:
            setup.wait_for_preload()
            resolve_name(function)()


def _of_loaded(hook: Callable[[Framework], str]) -> list[str]:
    """The functions that frameworks have for this, of those that this rank has loaded."""
    return [function for known in frameworks() if known.face in sys.modules and (function := hook(known))]


def count_waits() -> None:
    """Let frameworks count the waits of this rank in their C++ code."""
    for function in _of_loaded(lambda one: one.count_waits):
        setup.wait_for_preload()
        resolve_name(function)()


def modes() -> list[Callable[[], list[str]]]:
    """Let frameworks remember their modes. Returns functions that restore changed modes and return their names."""
    functions = _of_loaded(lambda one: one.modes)
    if functions:
        setup.wait_for_preload()
    return [resolve_name(function)() for function in functions]


def held(variables: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Variable, device and bytes of what holds memory of frameworks, the most first."""
    return [row for function in _of_loaded(lambda one: one.held) for row in resolve_name(function)(variables)]


def empty_caches() -> int:
    """Give the cached memory of frameworks back; returns its bytes."""
    return sum(resolve_name(function)() for function in _of_loaded(lambda one: one.empty_caches))


def tells_of_lost_rank(error: BaseException) -> bool:
    """Whether a framework's C++ code raised ``error`` because another rank has gone."""
    return any(resolve_name(function)(error) for function in _of_loaded(lambda one: one.lost_rank))


def original(error: BaseException) -> BaseException:
    """The exception of a collective that a framework's runtime turned into ``error``, else ``error`` itself."""
    for function in _of_loaded(lambda one: one.original):
        if found := resolve_name(function)(error):
            return cast(BaseException, found.with_traceback(error.__traceback__))
    return error


def threads() -> int:
    """The number of threads that this rank computes with, from its framework or its environment; 0 if unknown."""
    for function in _of_loaded(lambda one: one.threads):
        setup.wait_for_preload()
        return int(resolve_name(function)())
    return threads_set()


def _faces() -> set[str]:
    return {known.face for known in frameworks()}


def put(pickled: bytes) -> None:
    """Set variables from a pickled dict."""
    _namespace().update(pickle.loads(pickled))


def get(name: str) -> bytes:
    """The value of a variable, pickled with the classes that the cells defined.

    Raises NameError when there is none, TypeError when it cannot be pickled.
    """
    namespace = _namespace()
    if name not in namespace:
        there = sorted(describe())
        has = ", ".join(there[:_MOST_NAMES]) + ", ..." * (len(there) > _MOST_NAMES)
        raise NameError(f"no variable {name!r} on rank {setup.rank()}, which has {has or 'none yet'}")
    try:
        data: bytes = cloudpickle.dumps(namespace[name])
    except Exception as error:
        kind = type(namespace[name]).__name__
        raise TypeError(
            f"{name!r} ({kind}) cannot be pickled: {error}; pull its parts, such as its state_dict()"
        ) from None
    return data


def describe(name: str = "") -> dict[str, str]:
    """Type, shape, dtype and device of a variable, or of all variables of cells; a missing one is left out."""
    namespace = _namespace()
    return {
        key: _kind(namespace[key])
        for key in ([name] if name else names())
        if key in namespace and (name or not isinstance(namespace[key], ModuleType))
    }


def names(path: str = "") -> list[str]:
    """Names that cells have made or imported; with ``path``, its attributes. Empty where there are none.

    Only modules and classes are searched, because reading attributes of other objects may run code.
    """
    namespace = _namespace()
    if not path:
        hidden = InteractiveShell.instance().user_ns_hidden
        known = [*namespace]  # a cell that runs meanwhile may add some
        return sorted(key for key in known if not key.startswith("_") and key not in hidden)
    value = _found(path)
    if value is _NOTHING:
        return []
    public = getattr(value, "__all__", None) if isinstance(value, ModuleType) else None
    return sorted(public or dir(value))


def help_on(path: str) -> str:
    """Signature and documentation of a name, such as ``ring.allreduce``; empty where there are none.

    Only attributes of modules and classes are found, because reading those of other objects may run code.
    """
    value = _found(path)
    if value is _NOTHING:
        return ""
    lines = []
    if callable(value):
        with suppress(TypeError, ValueError):  # it has no signature
            lines.append(f"Signature: {path}{inspect.signature(value)}")
    if isinstance(value, ModuleType | type) or callable(value):
        lines.append(f"Docstring:\n{inspect.getdoc(value) or '<no docstring>'}")
    else:
        lines.append(f"On rank {setup.rank()}: {_kind(value)}")
    return printable("\n".join(lines), _MOST_HELP)


def _found(path: str) -> Any:
    """The value of a name, or of an attribute of modules and classes; _NOTHING where there is none."""
    namespace = _namespace()
    first, *rest = path.split(".")
    value: Any = namespace.get(first, _NOTHING)
    if first == "ring" and first not in namespace:  # the first cell that uses it will bind it
        setup.wait_for_preload()
        value = import_module(default().face)
    for name in rest:
        if not isinstance(value, ModuleType | type):
            return _NOTHING
        value = getattr(value, name, _NOTHING)
    return value


def _kind(value: Any) -> str:
    """Type, shape, dtype and device of a value, and its text when it is short; the name of a class."""
    if isinstance(value, type):
        return f"class {value.__name__}"
    kind = type(value).__name__
    try:
        if isinstance(value, (bool, int, float, str)):
            return f"{kind} {first_characters(printable(repr(value)), 40)}"
        details = [
            str(tuple(value.shape)) if hasattr(value, "shape") else "",
            str(getattr(value, "dtype", "")),
            f"on {value.device}" if hasattr(value, "device") else "",
        ]
        if not any(details) and hasattr(value, "__len__"):
            details = [f"of {len(value)}"]
    except Exception:  # the object's own code may raise anything
        return kind
    return " ".join([kind, *filter(None, details)])


def _namespace() -> dict[str, Any]:
    namespace: dict[str, Any] = InteractiveShell.instance().user_ns
    return namespace
