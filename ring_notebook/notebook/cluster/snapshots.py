"""Snapshots from the kernel: has all ranks write one, or load one, and says in words what was kept."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.files import snapshot_files
from ring_notebook.files.run_folders import new_run_id
from ring_notebook.files.snapshot_files import Snapshot, by_reason, python_version
from ring_notebook.notebook.engines import Engines
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.table import Listing
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.words import plural, size_text

_RANK_SIDE = "ring_notebook.engine.kept_variables"
_TIMEOUT = 3600.0  # seconds that ranks have to write or load all variables
_MOST_NAMES = 12


def keep(engines: Engines, name: str, setup: Sequence[RunRecord] = ()) -> Snapshot:
    """Have all ranks, which are idle, keep their variables. Raises RingError; the snapshots before it then stay."""
    if not name:  # only a run gives one a name
        raise RingError("a snapshot between runs needs a name, as in `%ring snapshots save before`")
    folder, id = snapshot_files.root(), new_run_id()
    snapshot_files.check_folder(folder)
    arguments = str(folder), id, snapshot_files.about(name, setup), None, len(engines.all)
    try:
        _call(engines, "save", *arguments)
        return snapshot_files.read(folder / id)
    except FileNotFoundError:
        hosts = ", ".join(sorted({engine.host for engine in engines.all}))
        raise RingError(
            f"not all ranks have written to {folder}: the hosts {hosts} must share the folder of the notebook"
        ) from None
    finally:
        shutil.rmtree(folder / f".{id}.partial", ignore_errors=True)


def bring_back(engines: Engines, snapshot: Snapshot, size: int | None = None) -> str:
    """Replace the variables of all ranks by those of a snapshot; returns what to tell the user.

    They are restored for a run on ``size`` ranks, by default all; each next ``size`` ranks are copies of these. Raises
    RingError when a rank cannot load them: then no rank has changed.
    """
    if snapshot.about["python"] != python_version():
        raise RingError(
            f"{snapshot.name} was made with Python {snapshot.about['python']}, this is {python_version()}: functions "
            "and classes of cells cannot be loaded; use that Python"
        )
    try:
        loaded = _call(engines, "load", str(snapshot.path), snapshot.size, size)
    except BaseException:
        engines.call_beside(f"{_RANK_SIDE}:forget")
        raise
    _call(engines, "use")
    return _restored(snapshot, size or len(engines.all), loaded)


def _call(engines: Engines, function: str, *arguments: Any) -> list[Any]:
    try:
        return engines.call(f"{_RANK_SIDE}:{function}", *arguments, timeout=_TIMEOUT)
    except KeyboardInterrupt:
        engines.signal(signal.SIGINT, engines.living())
        raise
    except ClusterError as error:  # a rank's error, with its class in front
        raise RingError(str(error).removeprefix("RingError: ")) from None


class Continued(NamedTuple):
    """The cell that continues run ``of`` from a snapshot on. ``begins_anew`` says which functions do not continue."""

    source: str
    options: CellOptions
    begins_anew: str
    of: str


def continued(snapshot: Snapshot, name: str = "") -> Continued:
    """The cell that continues the run of a snapshot, once it is restored, as a run of this name.

    Raises RingError for a snapshot that was made between runs.
    """
    run, place = snapshot.about.get("run"), dict(snapshot.about["ranks"][0]["place"])
    if not run:
        kept = snapshot.name
        raise RingError(f"{kept} was made between runs: `%ring snapshots restore {kept}`, then run a cell")
    functions = ", ".join(place.pop("functions"))
    options = replace(
        CellOptions.of(run["options"]),
        name=name,
        branch={**place, "of": f"{run['name']}@{snapshot.step}", "run": run["id"]},
        resume=False,
        setup=False,
        ranks=None,
        n=None,
        replay="",
        pause_at=(),  # of steps since its beginning
        who="",
    )
    anew = f"{functions}() begins anew: variables of functions are not kept; those of the cell are."
    return Continued(run["source"], options, anew * bool(functions), run["name"])


def set_up_cells(snapshot: Snapshot) -> list[RunRecord]:
    """The runs of the set-up cells that a snapshot keeps."""
    records = []
    for cell in snapshot.about["setup"]:
        record = RunRecord(snapshot.path / cell["run"], cell)
        record.summary = {"status": "ok", "seconds": 0.0}
        records.append(record)
    return records


def _restored(snapshot: Snapshot, size: int, loaded: Sequence[Any]) -> str:
    names = {name for rank in loaded for name in rank["names"]}
    at = time.strftime("%d %b %H:%M", time.localtime(snapshot.about["time"]))
    lines = [f"Restored {plural(len(names), 'variable')} of {snapshot.name} ({at}) on {plural(size, 'rank')}."]
    if size != snapshot.size:
        text = f"It is of {plural(snapshot.size, 'rank')}: prepared loaders are shared anew"
        if size > snapshot.size:
            new = range(snapshot.size, size)[:_MOST_NAMES]
            text += "".join(f"; rank {rank} has the variables of rank {rank % snapshot.size}" for rank in new)
        lines.append(f"{text}; what your cells have shared out themselves is as it was.")
    then = {name: digest for rank in snapshot.about["ranks"] for name, digest in rank["modules"].items()}
    now = {name: digest for rank in loaded for name, digest in rank["modules"].items()}
    if changed := sorted(name for name in then.keys() & now.keys() if then[name] != now[name]):
        lines.append(f"Changed since then: {', '.join(changed)}; restored objects use the new code.")
    return "\n".join([*lines, *by_reason("Not in it", snapshot.about["ranks"], "left_out")])


def find(name: str) -> Snapshot:
    """The newest snapshot of this folder called ``name``. Raises RingError if there is none that is whole."""
    return snapshot_files.find(snapshot_files.root(), name)


def listing() -> Listing:
    """All snapshots of this folder, newest first; a note names those that cannot be read."""
    folder = snapshot_files.root()
    snapshot_files.check_folder(folder)
    whole, torn = snapshot_files.found(folder)
    rows = []
    for one in reversed(whole):
        run = one.about.get("run") or {}
        at = time.strftime("%d %b %H:%M", time.localtime(one.about["time"]))
        count = str(len({name for rank in one.about["ranks"] for name in rank["names"]}))
        of_run = [run.get("name", ""), "" if one.step is None else str(one.step)]
        rows.append([one.name, at, str(one.size), size_text(one.bytes), count, *of_run])
    note = "\n".join(f"not readable: {line}" for line in torn)
    return Listing(
        ["name", "when", "ranks", "size", "variables", "run", "step"],
        rows,
        note or ("" if rows else "No snapshot; `%ring snapshots save NAME` keeps the variables of all ranks."),
    )


def remove(names: Sequence[str]) -> str:
    """Remove snapshots. Raises RingError, and removes nothing, when one is not there."""
    found = [find(name) for name in names]
    for one in found:
        snapshot_files.remove(one)
    return f"Removed {', '.join(one.name for one in found)}."
