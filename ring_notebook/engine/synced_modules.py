"""The user's own modules on a rank: imported from the notebook's folder or a copy of it, and reloaded."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.util import cache_from_source
from pathlib import Path
from types import ModuleType

from IPython.extensions.autoreload import superreload

from ring_notebook.engine import setup
from ring_notebook.files.claimed_folders import claimed_folder
from ring_notebook.files.file_digest import digest
from ring_notebook.files.private_files import make_private_folder, open_private
from ring_notebook.rank.exit_watch import at_exit
from ring_notebook.text.error_text import error_text

_OWN = __name__.partition(".")[0]
_copy: Path | None = None  # of the notebook's folder, if this host does not have it
_at_exit = ExitStack()


def compare(folder: str, digests: Mapping[str, str], removed: Sequence[str]) -> tuple[str, list[str]]:
    """The folder to import from on this host, and the files that are missing or different there.

    It is the notebook's ``folder`` itself if this host has it, else a private copy, from which ``removed`` files are
    removed.
    """
    if _copy is None and all(digest(Path(folder, path)) == known for path, known in digests.items()):
        return folder, []
    root = _own_copy()
    for path in removed:
        with suppress(FileNotFoundError):
            _inside(path).unlink()
    return str(root), [path for path, known in digests.items() if digest(root / path) != known]


def take(contents: Mapping[str, bytes]) -> None:
    """Write files into this host's copy. Raises ValueError for a path outside of it."""
    for path, content in contents.items():
        file = _inside(path)
        make_private_folder(file.parent)
        with open_private(file, "wb") as written:
            written.write(content)


def _own_copy() -> Path:
    global _copy
    if _copy is None:
        _copy = _at_exit.enter_context(claimed_folder("code"))
        at_exit(_at_exit.close)
    return _copy


def _inside(path: str) -> Path:
    root = _own_copy()
    if not (root / path).resolve().is_relative_to(root):
        raise ValueError(f"rank {setup.rank()}: {path!r} is outside of the synced folder")
    return root / path


def use(roots: Sequence[str], changed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Import from ``roots[rank]`` from now on, and reload modules that have ``changed`` there, as `%autoreload 2` does.

    Returns the names of the reloaded modules, and the errors of the others.
    """
    root = roots[setup.rank()]
    if root not in sys.path:
        # Before the current folder, which `engine_program` has put after Python's own modules.
        sys.path.insert(sys.path.index("") if "" in sys.path else 0, root)
    importlib.invalidate_caches()
    files = {os.path.join(root, path) for path in changed if path.endswith(".py")}
    for file in files:
        # A file that was changed within a second to the same size would look like the compiled one.
        with suppress(OSError):
            os.unlink(cache_from_source(file))
        linecache.cache.pop(file, None)
    reloaded: list[str] = []
    failed: list[str] = []
    # In the order of sys.modules, a module comes after those that it imports, so it gets the reloaded ones.
    for name, module in list(sys.modules.items()):
        # Not this package, which its developers have in their folder: a reload would lose the state of the rank.
        if name.partition(".")[0] != _OWN and _is_one_of(files, module):
            if error := _reload(module):
                failed.append(error)
            else:
                reloaded.append(name)
    return reloaded, failed


def _is_one_of(files: set[str], module: ModuleType) -> bool:
    file = module.__dict__.get("__file__") if isinstance(module, ModuleType) else None
    # Compare names first: a path may have links, and resolving those of all modules takes long.
    return isinstance(file, str) and any(
        os.path.basename(file) == os.path.basename(one) and os.path.realpath(file) == one for one in files
    )


def _reload(module: ModuleType) -> str:
    """Reload the module and give its old functions and classes their new code; returns the error, or an empty text."""
    try:
        superreload(module)
    except SyntaxError as error:
        return f"{os.path.basename(error.filename or '')}, line {error.lineno}: SyntaxError: {error.msg}"
    except Exception as error:
        line, tb = 0, error.__traceback__
        while tb is not None:
            line = tb.tb_lineno if tb.tb_frame.f_code.co_filename == module.__file__ else line
            tb = tb.tb_next
        return f"{os.path.basename(module.__file__ or '')}, line {line}: {type(error).__name__}: {error_text(error)}"
    return ""
