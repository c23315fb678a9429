"""The commands of ``%ring`` and the magics of cells, a file each: options, help and action, declared by `command`.

``ring_NAME.py`` is ``%ring NAME``, and ``ringNAME.py`` is ``%%ringNAME``.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ring_notebook.notebook.line_command import Command
from ring_notebook.notebook.session.session import Session

GROUPS = ("cluster", "cells", "runs", "steering", "snapshots", "jobs", "sharing")


def declared() -> dict[str, Command[..., Any]]:
    """The magics by name: ``%ring``, which has the commands by group and name, and the magics of cells."""
    modules = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)]
    found = {one.prog: one for module in modules for one in vars(module).values() if isinstance(one, Command)}

    def help_of_all(_: Session) -> str:
        """Manage the cluster that %%ringtrain cells run on, and its runs."""
        return "\n".join(one.help() for one in magics.values()).rstrip()

    magics: dict[str, Command[..., Any]] = {"ring": Command("%ring", help_of_all)}
    for one in sorted(found.values(), key=lambda one: (GROUPS.index(one.group), one.prog)):
        if one.prog.startswith("%%"):
            magics[one.name.lstrip("%")] = one
        elif one.prog == f"%ring {one.name}":  # else it belongs to another command
            magics["ring"].commands[one.name] = one
    return magics


MAGICS = declared()
RING = MAGICS["ring"]
