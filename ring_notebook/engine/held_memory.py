"""Which variables of this rank hold memory; frees what only a failed cell and the caches of frameworks still hold."""

from __future__ import annotations

import gc
import sys
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.engine import debuggers, kept_variables, namespace

_LAST = ("last_traceback", "last_value", "last_type", "last_exc")


def free() -> dict[str, Any]:
    """Forget the frames of a failed cell, collect garbage and empty caches. Returns what was freed, and what is held.

    ``held`` has rows of variable, device and bytes, the most first; ``freed`` and ``cached`` are bytes: of tensors, and
    of caches on devices.
    """
    variables = kept_variables.variables()
    before = sum(size for _, _, size in namespace.held(variables))
    forget_failure()
    gc.collect()
    cached = namespace.empty_caches()
    rows = namespace.held(variables)
    return {"held": rows, "freed": before - sum(size for _, _, size in rows), "cached": cached}


def forget_failure() -> bool:
    """Forget the exception that ended the last cell: ours for the debugger, Python's, and those that IPython keeps.

    Returns whether there was one; the next collection frees its reference cycles.
    """
    failed = debuggers.forget_frames()
    for name in _LAST:
        if hasattr(sys, name):
            failed = True
            delattr(sys, name)
    shell = InteractiveShell.instance()
    for name in ("InteractiveTB", "SyntaxTB"):
        formatter = getattr(shell, name, None)
        for attribute in ("tb", "etype", "evalue", "last_syntax_error"):
            if getattr(formatter, attribute, None) is not None:
                setattr(formatter, attribute, None)
    return failed
