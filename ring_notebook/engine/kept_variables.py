"""Saves the variables of this rank in a snapshot, and restores them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.core import kept_state, metrics
from ring_notebook.core.steering import steering
from ring_notebook.engine import setup
from ring_notebook.errors import RingError
from ring_notebook.files import snapshot_files
from ring_notebook.files.file_digest import digest
from ring_notebook.text.error_text import error_text

# IPython's own, and what ipyparallel calls functions with.
_HIDDEN = re.compile(r"_+|_i+|_i?\d+|_[iod]h|_exit_code|__\w+__|_[0-9a-f]{8}_\w+_(f|args|kwargs|result)")
_pending: kept_state.Loaded | None = None


def save(
    folder: str,
    id: str,
    about: Mapping[str, Any],
    rank: int | None,
    size: int,
    place: Mapping[str, Any] | None = None,
) -> snapshot_files.Snapshot | None:
    """Write this rank's part of the snapshot ``id``, as ``rank`` of ``size``; all these ranks call it, and do not wait.

    ``rank`` is by default that of the cluster. ``place`` says where in a cell it is. Returns the snapshot on the rank
    that was the last. Raises RingError when it cannot be written.
    """
    rank = setup.rank() if rank is None else rank
    started = perf_counter()
    setup.wait_for_preload()
    writer = None
    try:
        writer = snapshot_files.Writer(Path(folder), id, rank, size)
        own = variables()
        kept = kept_state.dump(own, writer.put)
        report = {
            "names": [name for name in kept.names if not isinstance(own[name], ModuleType)],
            "left_out": kept.left_out,
            "loses": kept.loses,
            "modules": _own_modules(),
            "point": steering.points if place else 0,  # between runs nobody counts
            "step": metrics.next_step(),
            "place": place or {},
            "seconds": perf_counter() - started,
            "written": writer.written,
        }
        whole = writer.finish(kept.content, about, report)
    except OSError as error:
        if writer is not None:
            writer.give_up()
        raise RingError(f"rank {rank}: {snapshot_files.explained(error, Path(folder))}") from None
    except BaseException:
        if writer is not None:
            writer.give_up()
        raise
    return whole


def variables() -> dict[str, Any]:
    shell = InteractiveShell.instance()
    hidden = shell.user_ns_hidden
    return {
        name: value
        for name, value in sorted(shell.user_ns.items())
        if name not in hidden and not _HIDDEN.fullmatch(name)
    }


def load(folder: str, ranks: int, size: int | None = None) -> dict[str, Any]:
    """Load this rank's part of a snapshot of ``ranks``, without using it. Returns what to tell the user.

    Loads it as a rank of ``size``, by default all; rank r beyond these copies rank r modulo ``size``.

    Raises RingError, with what to do, when it cannot be loaded.
    """
    global _pending
    _pending, rank, size = None, setup.rank(), size or setup.size()
    setup.wait_for_preload()
    path = Path(folder)
    snapshot_files.check_folder(path.parent)
    try:
        _pending = kept_state.load(
            (rank % size, size),
            ranks,
            partial(snapshot_files.read_rank, path),
            partial(snapshot_files.read_blob, path),
        )
    except ModuleNotFoundError as error:
        raise RingError(
            f"rank {rank}: a variable needs module {error.name!r}, which cannot be imported here; put it beside the "
            "notebook or install it, and restore again"
        ) from None
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(error_text(error).split())}"
        raise RingError(
            f"rank {rank} cannot load the snapshot: {error if isinstance(error, RingError) else why}"
        ) from None
    names = [name for name, value in _pending.values.items() if not isinstance(value, ModuleType)]
    return {"names": names, "modules": _own_modules()}


def use() -> None:
    """Replace all variables by those that `load` has loaded."""
    global _pending
    assert _pending is not None
    shell = InteractiveShell.instance()
    for name in variables():
        del shell.user_ns[name]
    shell.user_ns.update(_pending.values)
    _pending.use()
    _pending = None


def forget() -> None:
    """Drop what `load` has loaded: another rank failed to load."""
    global _pending
    _pending = None


def _own_modules() -> dict[str, str]:
    """The user's own modules that this rank has imported, each with a digest of its file."""
    found = {}
    installed = tuple({sys.prefix, sys.base_prefix, str(Path(__file__).parents[1])})
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.endswith(".py") and not file.startswith(installed) and name != "__main__":
            found[name] = digest(Path(file))
    return {name: known for name, known in found.items() if known}
