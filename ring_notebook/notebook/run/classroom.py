"""The shared runs of many notebooks as tiles: from the files of a folder, or from links (see `sharing`).

What is shown was written by others: a file is read without following links and never executed, and every text of it is
escaped. It is shown under the login that owns the file, even if it gives itself another name.
"""

from __future__ import annotations

import os
import pwd
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from html import escape
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread

from IPython.display import display

from ring_notebook.errors import RingError
from ring_notebook.files.private_files import open_regular
from ring_notebook.files.whole_file import checked
from ring_notebook.notebook.colors import GREY, RED, STATUS_COLORS
from ring_notebook.notebook.run.sharing import MOST_BYTES, PERIOD, SIGN_OF_LIFE, SUFFIX, Tile, read_tile
from ring_notebook.notebook.style import duration, number, sparkline, whole
from ring_notebook.text.words import aligned, plural

MOST_TILES = 400
_AT_ONCE = 8  # links
_SECONDS_OF_A_LINK = 2.0
_SILENT = 3 * SIGN_OF_LIFE
_ORDER = ("failed", "stuck", "no progress", "interrupted", "running", "ok", "idle")


@dataclass(frozen=True)
class Seen:
    """A tile, and when it and its state last changed, on this kernel's clock; or why there is none."""

    name: str
    tile: Tile | None
    trouble: str = ""
    since: float = 0.0
    changed: float = 0.0


class Classroom:
    """Tiles of all runs below folders and links, drawn in the cell that makes it until `close`.

    ``sources`` are folders and addresses, at least one. Raises RingError for what is neither.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self._links = [one for one in sources if "://" in one]
        self._folders = [Path(one) for one in sources if "://" not in one]
        for link in self._links:
            if urllib.parse.urlsplit(link).scheme not in ("http", "https"):
                raise RingError(f"{link}: expected a folder, or a link that begins with http:// or https://")
        for folder in self._folders:
            if not folder.is_dir():
                raise RingError(f"{folder} is no folder; `%ring share` needs one that all can write to")
        self._seen: dict[str, Seen] = {}
        self._raw: dict[str, bytes] = {}
        self._ended = Event()
        self._place = display(self._shown(self._look()), raw=True, display_id=True)
        self._thread = Thread(target=self._loop, name="ring-classroom", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the tiles as they are."""
        self._ended.set()
        self._thread.join()

    def _loop(self) -> None:
        before: dict[str, str] = {}
        with ThreadPoolExecutor(_AT_ONCE, "ring-classroom") as pool:
            while not self._ended.wait(PERIOD):
                shown = self._shown(self._look(pool.map))
                if shown != before:
                    self._place.update(shown, raw=True)
                    before = shown

    def _look(self, each: Callable[..., object] = map) -> list[Seen]:
        """All tiles; runs that need help come first."""
        keys: list[str] = []
        for folder in self._folders:
            try:
                keys += sorted(one.path for one in os.scandir(folder) if one.name.endswith(SUFFIX))
            except OSError:
                keys.append(str(folder))  # reading it reports why
        keys = list(dict.fromkeys([*keys, *self._links]))[:MOST_TILES]
        looked = list(each(self._read, keys))  # type: ignore[call-overload]
        self._seen = dict(zip(keys, looked, strict=True))
        order = {state: at for at, state in enumerate(_ORDER)}
        return sorted(looked, key=lambda one: (order[one.tile.state] if one.tile else -1, one.name))

    def _read(self, key: str) -> Seen:
        """The tile at ``key``, parsed only if it has changed."""
        now = time.monotonic()
        before = self._seen.get(key)
        try:
            data = _data_at(key)
            if before is not None and before.tile is not None and data == self._raw.get(key):
                silent = now - before.since
                trouble = f"no sign of life for {duration(silent // 10 * 10)}" if silent > _SILENT else ""
                return replace(before, trouble=trouble)
            tile = read_tile(data)
            self._raw[key] = data
        except (OSError, ValueError, HTTPException) as error:
            reason = str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error)
            return Seen(before.name if before else _short(key), None, reason)
        same = before is not None and before.tile is not None and before.tile.state == tile.state
        changed = before.changed if same and before is not None else now
        return Seen(_name(key, tile), tile, "", now, changed)

    def _shown(self, seen: Sequence[Seen]) -> dict[str, str]:
        counts = {state: sum(one.tile is not None and one.tile.state == state for one in seen) for state in _ORDER}
        each = [f"{count} {state}" for state, count in counts.items() if count]
        line = " · ".join([plural(len(seen), "notebook"), *each])
        page = "".join(map(_tile_html, seen))
        text = aligned([_row(one) for one in seen]) if seen else "No notebook shares a run yet."
        page = f"{_CSS}<p>{line}</p><div class='ring-tiles'>{page}</div>"
        return {"text/html": page, "text/plain": f"{line}\n{text}"}


def _data_at(key: str) -> bytes:
    """What a file holds, or a link answers."""
    if "://" not in key:
        with open_regular(Path(key), os.O_NOFOLLOW) as file:
            return checked(file.read(2 * MOST_BYTES))
    with urllib.request.urlopen(f"{key.rstrip('/')}/tile", timeout=_SECONDS_OF_A_LINK) as answer:
        data: bytes = answer.read(MOST_BYTES + 1)
    return data


def _name(key: str, tile: Tile) -> str:
    """Whose tile it is: the owner of a file, with the name that the tile gives in brackets."""
    if "://" in key:
        return tile.who
    try:
        owner = pwd.getpwuid(os.lstat(key).st_uid).pw_name
    except (KeyError, OSError):
        return tile.who
    return owner if owner == tile.who else f"{tile.who} ({owner})"


def _short(key: str) -> str:
    """A name for what could not be read, without the secret of a link."""
    return urllib.parse.urlsplit(key).netloc if "://" in key else Path(key).name.removesuffix(SUFFIX)


def _facts(seen: Seen) -> str:
    tile = seen.tile
    if tile is None:
        return seen.trouble
    facts = [plural(tile.ranks, "rank"), duration(tile.seconds)] if tile.run else []
    if tile.progress is not None:
        facts.append(f"{tile.progress:.0%}")
    if tile.samples_per_s:
        facts.append(f"{whole(tile.samples_per_s)} samples/s")
    if tile.state not in ("running", "stuck", "no progress"):
        minutes = (time.monotonic() - seen.changed) // 60
        facts.append(f"idle {minutes:.0f} min" if minutes >= 1 else "idle" if tile.run else "")
    return " · ".join(filter(None, [*facts, seen.trouble]))


def _row(seen: Seen) -> list[str]:
    state = seen.tile.state if seen.tile else "unreadable"
    run = seen.tile.run if seen.tile else ""
    value = f"{seen.tile.metric} {number(seen.tile.curve[-1])}" if seen.tile and seen.tile.curve else ""
    return [seen.name, state, run, value, _facts(seen), seen.tile.text if seen.tile else ""]


def _tile_html(seen: Seen) -> str:
    name, state, run, value, facts, problem = map(escape, _row(seen))
    color = RED if state in ("stuck", "no progress", "unreadable") else STATUS_COLORS.get(state, GREY)
    curve = sparkline(seen.tile.curve, 200, 40) if seen.tile else ""
    return (
        f"<div style='border-left-color:{color}'><b>{name}</b> <span style='color:{color}'>● {state}</span> {run}"
        f"<div>{curve} {value}</div><div class='ring-facts'>{facts}</div><div class='ring-wrong'>{problem}</div></div>"
    )


_CSS = f"""<style>
.ring-tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 8px;
  font-size: 12px; }}
.ring-tiles > div {{ border: 1px solid var(--jp-border-color2, #8885); border-left: 4px solid; border-radius: 6px;
  padding: 5px 8px; min-width: 0; overflow: hidden; line-height: 1.5; overflow-wrap: anywhere; }}
.ring-tiles img {{ max-width: 100%; display: block !important; }}
.ring-facts {{ color: {GREY}; }}
.ring-wrong {{ color: {RED}; display: -webkit-box; -webkit-line-clamp: 3; -webkit-box-orient: vertical;
  overflow: hidden; }}
</style>"""
