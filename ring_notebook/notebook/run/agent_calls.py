"""The journal of what agents have asked for: each call with who, when, with which arguments, and how it ended."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from ring_notebook.files.private_files import make_private_folder, open_private
from ring_notebook.files.run_folders import runs_directory
from ring_notebook.notebook.table import Listing

_MOST_BYTES = 4 << 20  # of the journal; one older journal is kept
_MOST_TEXT = 500
_lock = Lock()


def journal() -> Path:
    """The file, beside the folder of the runs."""
    return runs_directory().parent / "agents.jsonl"


def begin_call(who: str, tool: str, arguments: Mapping[str, Any]) -> str:
    """Note that a call begins; returns its id for `end_call`. Raises OSError if that cannot be written."""
    call, given = uuid.uuid4().hex[:12], json.dumps(arguments, default=str)
    _write({"call": call, "time": time.time(), "who": who, "tool": tool[:_MOST_TEXT], "arguments": given[:_MOST_TEXT]})
    return call


def end_call(call: str, outcome: str, seconds: float) -> None:
    """Note how a call ended: ``ok``, ``refused: ...`` or ``failed: ...``."""
    _write({"call": call, "outcome": outcome[:_MOST_TEXT], "seconds": round(seconds, 3)})


def _write(entry: Mapping[str, Any]) -> None:
    path = journal()
    with _lock:
        make_private_folder(path.parent)
        with suppress(FileNotFoundError):
            if path.stat().st_size > _MOST_BYTES:
                path.replace(path.with_suffix(".1.jsonl"))
        with open_private(path, "a") as file:  # one write: several processes may append
            file.write(json.dumps(entry) + "\n")


def calls(most: int = 50) -> Listing:
    """The newest calls of agents, newest first. Unreadable lines are skipped."""
    found: dict[str, dict[str, Any]] = {}
    for path in (journal().with_suffix(".1.jsonl"), journal()):
        with suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                with suppress(ValueError, TypeError, KeyError):
                    entry = json.loads(line)
                    found.setdefault(entry["call"], {}).update(entry)
    newest = [one for one in reversed(found.values()) if {"time", "who", "tool"} <= one.keys()]
    rows = [
        [
            time.strftime("%d %b %H:%M:%S", time.localtime(one["time"])),
            *(str(one.get(name, "")) for name in ("who", "tool", "arguments", "outcome", "seconds")),
        ]
        for one in newest[:most]
    ]
    note = f"and {len(newest) - most} more in {journal()}" if len(newest) > most else ""
    columns = ("when", "who", "tool", "arguments", "outcome", "seconds")
    return Listing(columns, rows, note or ("" if rows else "No agent has called anything in this folder."))
