"""The compiled core, with an error that says what to do where it is missing."""

from __future__ import annotations

from types import ModuleType

from ring_notebook.errors import CoreMissingError

__all__ = ["core"]


def core() -> ModuleType:
    """The ``ring_notebook._core`` extension module. Raises CoreMissingError when it is not compiled."""
    try:
        from ring_notebook import _core
    except ImportError as error:
        raise CoreMissingError(
            f"the native core of Ring Notebook cannot be loaded ({error}). "
            "Compile it with `pip install -e .` in a clone, or `pip install --force-reinstall ring-notebook`."
        ) from error
    module: ModuleType = _core
    return module
