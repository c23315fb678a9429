"""Command lines of our own Python processes, which import nothing from the current folder.

``python -m`` and ``python -c`` look for modules in the current folder first: a user's ``random.py`` would run in our
supervisor, and in a clone our processes would import the sources, which are not compiled. The option
against that (``-P``) exists since Python 3.11 only, and its environment variable would also reach the user's programs.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module

_JUPYTER = r"(IPython|ipykernel|ipyparallel|jupyter_client|jupyter_core|tornado|traitlets|zmq)(\.|$)"
_WITHOUT_CURRENT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path); "
# The process may be a fork of one that has imported the module: runpy would warn that it executes it again.
_RUN_MODULE = (
    "from runpy import run_module; module = sys.argv.pop(1); sys.modules.pop(module, None); "
    'run_module(module, run_name="__main__", alter_sys=True)'
)


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command that runs ``module`` with these arguments, as ``python -m`` does."""
    return [*code_command(_RUN_MODULE, python), module, *arguments]


def code_command(code: str, python: str = sys.executable) -> list[str]:
    """The command that executes ``code``, as ``python -c`` does."""
    return [python, "-c", f"{_WITHOUT_CURRENT_FOLDER}{code}"]


def prepare_for_jupyter() -> None:
    """Protect this process, which becomes a program of ipyparallel, from its environment.

    PYTHONWARNINGS may turn deprecations in Jupyter's libraries into errors. IPython would expand ``$HOME`` in the name
    of a cluster's folder.
    """
    for category in (DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=_JUPYTER)
    for module in ("IPython.core.profiledir", "ipyparallel.apps.baseapp"):
        vars(import_module(module))["expand_path"] = str
