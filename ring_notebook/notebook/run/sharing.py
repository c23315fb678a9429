"""The newest run of a notebook for others to see: behind a secret link, or as a small file in a folder.

Others can only read: the server answers GET alone, and the file belongs to its writer. Both give a `Tile`, of about a
kilobyte. The link also has a page, which draws the report of the run every second.
"""

from __future__ import annotations

import atexit
import getpass
import hmac
import json
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Literal

from ring_notebook.errors import RingError
from ring_notebook.files.whole_file import whole_file
from ring_notebook.notebook.bounded_server import BoundedServer
from ring_notebook.notebook.panel.charts.curves import mean_line
from ring_notebook.notebook.panel.headline import headline
from ring_notebook.notebook.panel.report import mime_bundle
from ring_notebook.notebook.panel.waits import stuck
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.failures import in_a_line, primary
from ring_notebook.protocol.field_types import check_fields

PERIOD = 0.4  # seconds between two looks at the run
SIGN_OF_LIFE = 10.0  # seconds at most between two versions of a file
SUFFIX = ".ring-tile.json"
MOST_BYTES = 16 << 10  # of a tile
_MOST_POINTS = 60
_MOST_TEXT = 300
_SECONDS_OF_A_VISIT = 10.0  # of a connection that sends nothing

State = Literal["idle", "running", "stuck", "no progress", "ok", "failed", "interrupted"]


@dataclass(frozen=True)
class Tile:
    """A summary of a run for others. ``time``: when it was made, in seconds since the epoch on ``who``'s clock.

    ``text``: its error, or what is wrong with it. ``failed``: the ranks that failed first. ``seconds``: since the run
    began, until its end. ``curve``: at most 60 points of ``metric``, the mean of the ranks; NaN where there is none.
    """

    who: str
    time: float
    state: State = "idle"
    run: str = ""
    text: str = ""
    ranks: int = 0
    failed: tuple[int, ...] = ()
    seconds: float = 0.0
    progress: float | None = None
    samples_per_s: float = 0.0
    metric: str = ""
    curve: tuple[float, ...] = ()

    def data(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()


def tile_of(log: RunRecord | None, who: str) -> Tile:
    """What ``who`` shares of a run at this moment; None before the first one."""
    if log is None:
        return Tile(who, time.time())
    view = log.view()
    content = headline(log, view, stuck(view))
    failures = primary(view.failures)
    raised = in_a_line(failures) if failures else ""
    wrong = [str(log.summary.get("error", "")), raised, *content.alarms, *content.warnings]
    metric = "loss" if "loss" in view.curves else next(iter(view.charted), "")
    points = view.curves.get(metric)
    values = mean_line("", points, "").y.tolist() if points else []
    return Tile(
        who,
        time.time(),
        content.status,  # type: ignore[arg-type]  # a RunStatus, or what `headline` says of ranks that are stuck
        log.title[:_MOST_TEXT],
        next(filter(None, wrong), "")[:_MOST_TEXT],
        log.size,
        tuple(failure.rank for failure in failures),
        float(round(view.elapsed)),
        content.progress,
        float(f"{view.samples_per_s:.3g}"),
        metric[:_MOST_TEXT],
        tuple(_fewer(values)),
    )


def _fewer(values: Sequence[float]) -> list[float]:
    """At most `_MOST_POINTS` of the values, each the mean of its neighbours."""
    each = -(-len(values) // _MOST_POINTS) or 1
    parts = [values[at : at + each] for at in range(0, len(values), each)]
    return [sum(part) / len(part) for part in parts]


def read_tile(data: bytes) -> Tile:
    """The tile in ``data``, which anybody may have written. Raises ValueError for anything else."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"expected a tile of at most {MOST_BYTES} bytes, got more")
    try:
        values = json.loads(data)
        if not isinstance(values, dict):
            raise ValueError("expected an object")
        values = {name: tuple(one) if isinstance(one, list) else one for name, one in values.items()}
        values["curve"] = tuple(map(float, values.get("curve", ())))
        check_fields(Tile, values)
        tile = Tile(**values)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no tile: {error}") from None
    numbers = [tile.time, tile.seconds, tile.progress or 0.0, tile.samples_per_s]
    if not all(map(math.isfinite, numbers)) or len(tile.curve) > _MOST_POINTS:
        raise ValueError("a number of the tile is not finite, or its curve is too long")
    return tile


class Sharing:
    """What a notebook shares, if it does: ``newest`` gives its newest run."""

    def __init__(self, newest: Callable[[], RunRecord | None]) -> None:
        self._newest = newest
        self._link: _Link | None = None
        self._file: _File | None = None

    def begin(self, where: str = "", name: str = "") -> str:
        """Share by a new link, or by a file in the folder ``where``, as ``name`` or the user's login. ``off``: end it.

        Returns what to tell the others. Raises RingError if ``where`` is no folder, OSError if it cannot be written.
        """
        if where == "off":
            return self.end()
        shown = _Shown(self._newest, name or _login())
        if where:
            file = _File(Path(where), shown)  # before the old one ends: the folder may not exist
            if self._file is not None and self._file.path != file.path:
                self._file.close()
            self._file = file
            return file.text
        if self._link is not None:
            self._link.close()
        self._link = _Link(shown)
        return self._link.text

    def end(self) -> str:
        """Share nothing more; returns whether anything was, as a sentence."""
        shared = [one for one in (self._link, self._file) if one is not None]
        self._link = self._file = None
        for one in shared:
            one.close()
        return "Runs are not shared any more." if shared else "Nothing is shared."


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container whose user has no name
        return f"user-{os.getuid()}"


class _Shown:
    """The tile and the report of the newest run. `recent` makes each once in a `PERIOD` at most, for all visitors."""

    def __init__(self, newest: Callable[[], RunRecord | None], who: str) -> None:
        self._newest = newest
        self._who = who
        self._lock = Lock()
        self._made: dict[Callable[[], bytes], tuple[float, bytes]] = {}

    def tile(self) -> bytes:
        return tile_of(self._newest(), self._who).data()

    def report(self) -> bytes:
        log = self._newest()
        page = mime_bundle(log, displays=True)["text/html"] if log is not None else "<p>No cell has run yet.</p>"
        return page.encode()

    def recent(self, make: Callable[[], bytes]) -> bytes:
        """What ``make`` returned less than `PERIOD` ago, else returns now."""
        with self._lock:
            since, made = self._made.get(make, (-math.inf, b""))
            if time.monotonic() - since >= PERIOD:
                made = make()
                self._made[make] = time.monotonic(), made
            return made


class _File:
    """Keeps a tile in a file of a folder, which all may read."""

    def __init__(self, folder: Path, shown: _Shown) -> None:
        if not folder.is_dir():
            raise RingError(f"{folder} is no folder; give one that the others can read, or no folder for a link")
        name = f"{_login()}-{socket.gethostname()}-{os.getpid()}{SUFFIX}"
        self.path = folder.absolute() / name
        self._shown = shown
        self._written = b""
        self._since = 0.0
        self._ended = Event()
        self._write(shown.tile())  # here, so that a folder that cannot be written is an error of the command
        self.text = f"Sharing the newest run in {self.path}; `%ring classroom {folder}` shows it."
        self._thread = Thread(target=self._loop, name="ring-share", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _write(self, tile: bytes) -> None:
        with whole_file(self.path) as file:
            os.fchmod(file.fileno(), 0o644)  # regardless of the umask: others must read it
            file.write(tile)
        self._written, self._since = tile, time.monotonic()

    def _loop(self) -> None:
        told = False
        while not self._ended.wait(PERIOD):
            try:
                tile = self._shown.tile()
                if _differ(tile, self._written) or time.monotonic() - self._since >= SIGN_OF_LIFE:
                    self._write(tile)
                told = False
            except OSError as error:  # a full disk, a file system that went away: the run matters more
                if not told:
                    print(f"%ring share: {error}", file=sys.stderr)  # noqa: T201
                told = True

    def close(self) -> None:
        """Remove the file."""
        atexit.unregister(self.close)
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            self.path.unlink()


def _differ(tile: bytes, before: bytes) -> bool:
    """Whether a tile differs from the one before, except in its time. As text, so that NaN equals NaN."""
    said = [json.dumps({**json.loads(one), "time": 0}) for one in (tile, before)]
    return said[0] != said[1]


_PAGE = """<!doctype html><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>Ring Notebook</title>
<style>:root{color-scheme:light dark}body{font:13px system-ui,sans-serif;margin:12px}#late{color:#ef4444}</style>
<div id=late></div><div id=report></div>
<script nonce=NONCE>
const report = document.getElementById("report"), late = document.getElementById("late"); let before = "";
async function draw() {
  try {
    const answer = await fetch("report"); if (!answer.ok) throw answer.status;
    const text = await answer.text(); late.textContent = "";
    if (text != before) {
      const open = [...report.querySelectorAll("details")].map(one => one.open); report.innerHTML = before = text;
      report.querySelectorAll("details").forEach((one, at) => { if (open[at] != null) one.open = open[at]; });
    }
  } catch { late.textContent = "The notebook does not answer: it has ended, or shares nothing more."; }
  setTimeout(draw, 1000);
}
draw();
</script>"""


class _Link(BoundedServer, HTTPServer):
    """A server on the loopback interface, whose paths begin with a secret."""

    most, name = 16, "ring-share"

    def __init__(self, shown: _Shown) -> None:
        self.shown = shown
        self.token = secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", 0), _Visit)
        path = f"{self.server_address[1]}/{self.token}/"
        hub = os.environ.get("JUPYTERHUB_SERVICE_PREFIX", "/")
        self.text = (
            f"Sharing the newest run at http://127.0.0.1:{path}\nRead-only; everyone with the link sees what the run "
            f"prints. From another machine: the address of your Jupyter server with {hub}proxy/{path} behind it, if it "
            "has jupyter-server-proxy; or a tunnel (ssh -L). `%ring share off` ends it."
        )
        self.begin()


class _Visit(BaseHTTPRequestHandler):
    server: _Link
    protocol_version = "HTTP/1.1"
    timeout = _SECONDS_OF_A_VISIT

    def do_GET(self) -> None:
        token, *rest = self.path.lstrip("/").split("/")
        shown = self.server.shown
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(404, b"There is nothing here.", "text/plain")
        elif rest == [""]:
            nonce = secrets.token_urlsafe(12)
            self._answer(200, _PAGE.replace("NONCE", nonce).encode(), "text/html", f"'nonce-{nonce}'")
        elif rest == ["report"]:
            self._answer(200, shown.recent(shown.report), "text/html")
        elif rest == ["tile"]:
            self._answer(200, shown.recent(shown.tile), "application/json")
        else:
            self._answer(404, b"There is nothing here.", "text/plain")

    def _answer(self, status: int, body: bytes, kind: str, script: str = "'none'") -> None:
        """``script``: the scripts that a page may run. What a cell displays is in the report, so none of it may."""
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        allowed = f"script-src {script}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
        self.send_header(
            "Content-Security-Policy", f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
        )
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing in the notebook."""
