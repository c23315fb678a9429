"""Where a training has its commits on disk: a file of its own for each function, its text and the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import Any

from ring_notebook.config import config
from ring_notebook.core import world

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(...))


def commit_path(func: Callable[..., Any]) -> Path | None:
    """Where ``func`` has its commits on disk, if anywhere.

    Another function of its name, or a changed one, has another place, and so has a script that is called otherwise.
    """
    run = world.current().run
    folder = config().commit_dir or (".ring/commits" if run is not None else "")
    if not folder:
        return None
    # An engine's command line says nothing of the cells that run in it.
    script = (*(Path(name).name for name in sys.argv[:1]), *sys.argv[1:]) if run is None else ()
    text = f"{_text_of(func)} {script!a}"
    return Path(folder) / f"{name_of(func)}-{blake2b(text.encode(), digest_size=4).hexdigest()}.pt"


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function, or of the class of what can be called like one."""
    return str(getattr(func, "__name__", type(func).__name__))


def _text_of(value: Any) -> str:
    """What is equal in all processes for the same source, wherever in which file it stands, and for no other."""
    if isinstance(value, _CONSTANTS):
        return ascii(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text_of, value))})"
    if isinstance(value, (set, frozenset)):  # each process has an order of its own
        return f"{{{', '.join(sorted(map(_text_of, value)))}}}"
    if isinstance(value, dict):
        return _text_of(tuple(value.items()))
    if isinstance(value, CodeType):
        return _text_of((value.co_code, value.co_names, value.co_freevars, value.co_consts))
    if isinstance(value, partial):
        return _text_of((value.func, value.args, value.keywords))
    function = unwrap(value) if callable(value) else value
    if hasattr(function, "__code__"):
        return _text_of((function.__code__, function.__defaults__, function.__kwdefaults__))
    return str(getattr(value, "__qualname__", type(value).__qualname__))  # a repr may have an address
