"""`%ring`, `%%ringtrain` and `%%ringscale`: parse their lines, then delegate."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable
from functools import partial, wraps
from shutil import which
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster import snapshots
from ring_notebook.notebook.magics import options, rank_names
from ring_notebook.notebook.magics.cell_queue import QueuedCell
from ring_notebook.notebook.magics.cells import DefaultCells
from ring_notebook.notebook.magics.session import Session
from ring_notebook.notebook.record.choices import CellOptions
from ring_notebook.notebook.run import catalogue, notices
from ring_notebook.notebook.run.failures import brief
from ring_notebook.notebook.run.run import Run
from ring_notebook.words import plural

F = TypeVar("F", bound=Callable[..., Any])

_ASKS_FOR_HELP = re.compile(r"%%ring(train|scale)\s(.*\s)?(-h|--help)\s*$")


def _one_line(method: F) -> F:
    """Show our own errors, file errors and interrupts as one line, without a traceback through this package."""

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (RingError, OSError, KeyboardInterrupt) as error:
            if not hasattr(error, "_render_traceback_"):
                brief(error, f"{type(error).__name__}: {str(error) or 'interrupted'}")
            raise

    return wrapped  # type: ignore[return-value]


def _explained_by(parser: options.LineParser) -> Callable[[F], F]:
    """Make the help of its parser the docstring of a magic."""

    def explain(method: F) -> F:
        method.__doc__ = parser.format_help()
        return method

    return explain


@magics_class
class RingMagics(Magics):
    """The magics of one notebook."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self._session = session

    @cell_magic
    @_one_line
    @_explained_by(options.TRAIN)
    def ringtrain(self, line: str, cell: str) -> None:
        given = options.TRAIN.parse(line)
        if given is None:
            return
        out = given.pop("out")

        self._session.train(cell, CellOptions(**given, cell_id=self._cell_id()), give=partial(self._assign, out))

    def _assign(self, out: str, run: Run | QueuedCell) -> None:
        """Assign the run, or the cell that waits; a run that was queued only where its cell still is."""
        before = self.shell.user_ns.get(out)
        if out and (isinstance(run, QueuedCell) or not isinstance(before, QueuedCell) or before.run is run):
            self.shell.user_ns[out] = run

    def _cell_id(self) -> str:
        """The id of the cell that is executed; empty where the front end does not send it."""
        parent: dict[str, Any] = getattr(self.shell, "get_parent", dict)()
        return str(parent.get("metadata", {}).get("cellId", ""))

    @cell_magic
    @_one_line
    @_explained_by(options.SCALE)
    def ringscale(self, line: str, cell: str) -> Any:
        given = options.SCALE.parse(line)
        if given is None:
            return None
        out = given.pop("out")
        report = self._session.scale(cell, **given)
        if out:
            self.shell.user_ns[out] = report
        return report

    @line_magic
    @_one_line
    @_explained_by(options.RING)
    def ring(self, line: str) -> Any:
        given = options.RING.parse(line)
        if given is None:
            return None
        command = given.pop("command")
        answer = (getattr(self, f"_{command}", None) or getattr(self._session, command))(**given)
        if not isinstance(answer, str):  # a table, say, which the notebook shows
            return answer
        if answer:
            print(answer)  # noqa: T201
        return None

    def _sync(self) -> str:
        return str(self._session.require().sync())

    def _default(self, state: str | None) -> str:
        return self._session.set_default(None if state is None else state == "on")

    def _doctor(self, hosts: str, json: bool) -> str:
        from ring_notebook.launch.doctor import as_json, diagnose_hosts, render

        checks = diagnose_hosts(self._session.hosts(hosts))
        return as_json(checks) if json else render(checks)

    def _status(self, json: bool) -> Any:
        return self._session.status_json() if json else self._session.status()

    def _set(self, words: list[str]) -> Any:
        given = dict(word.split("=", 1) for word in words if "=" in word)
        named = [word for word in words if "=" not in word]
        if len(named) > 1:
            raise UsageError(f"%ring set takes values such as lr=0.05, got {' '.join(named)}")
        return self._session.set(given, *named) if given else self._session.knobs(*named)

    def _push(self, names: list[str]) -> str:
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"no variable {', '.join(missing)} in this notebook")
        cluster = self._session.require()
        cluster.push({name: self.shell.user_ns[name] for name in names})
        return f"Pushed {', '.join(names)} to {plural(cluster.n, 'rank')}."

    def _pull(self, names: list[str], rank: int) -> Any:
        values, table = self._session.pull(names, rank)
        self.shell.user_ns.update(values)
        return table

    def _notify(self, function: str, after: float | None) -> str:
        if function and function != "off" and not callable(self.shell.user_ns.get(function)):
            raise UsageError(f"no function {function} in this notebook")
        if function or after is not None:
            tell = None if function in ("", "off") else self.shell.user_ns[function]
            notices.notify(tell, after=notices.AFTER if after is None else after, lab=function != "off")
        return notices.described()

    def _queue(self, action: str | None, cells: list[int]) -> Any:
        return self._session.queue() if action is None else self._session.cancel(cells)

    def _branch(self, out: str, **given: Any) -> None:
        self._session.branch(**given, give=partial(self._assign, out))

    def _snapshots(self, action: str | None, names: list[str]) -> Any:
        if action is None:
            return snapshots.listing()
        if not names:
            raise UsageError("%ring snapshots remove needs the name of a snapshot")
        return snapshots.remove(names)

    def _plot(self, metrics: list[str], runs: list[str], **look: Any) -> Any:
        last = [self._session.run.log] if self._session.run is not None else []
        records = [catalogue.find(run) for run in runs] or last
        if not records:
            raise RingError("no cell has run in this notebook; name runs, `%ring runs` lists them")
        return catalogue.plot(records, metrics, **look)

    def _share(self, where: str, name: str) -> str:
        return self._session.sharing.begin(where, name)

    def _classroom(self, sources: list[str]) -> None:
        self._session.watch_classroom([] if sources == ["off"] else sources)

    def _runs(self, action: str | None, names: list[str], every: bool, sort: str, where: list[str]) -> Any:
        if action is None:
            return catalogue.listing(every=every, sort=sort, where=where)
        if not names:
            raise UsageError(f"%ring runs {action} needs the name of a run")
        if action == "compare":
            return catalogue.compare(names)
        if action == "output":
            return "\n".join(map(catalogue.write_output, names))
        if action == "delete":
            return catalogue.delete(names)
        run, *words = names
        return catalogue.tag(run, words) if action == "tag" else catalogue.annotate(run, " ".join(words))


def register(shell: InteractiveShell) -> None:
    """Register the magics in ``shell``, once."""
    if "ringtrain" not in shell.magics_manager.magics["cell"]:
        session = Session()
        shell.register_magics(RingMagics(shell, session))
        rank_names.register(shell, session)
        default_cells = DefaultCells(shell, lambda: session.default)
        shell.input_transformers_cleanup.extend([_with_a_body, default_cells])
        if left := session.left_behind():
            print(left)  # noqa: T201
        # A kernel often runs without its environment being activated: then `!ringrun` would not be found.
        scripts = sysconfig.get_path("scripts")
        if which("ringrun") is None and which("ringrun", path=scripts):
            os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])


def _with_a_body(lines: list[str]) -> list[str]:
    """Give a cell that only asks for help a body: IPython refuses to call a cell magic without one."""
    return [*lines, "\n"] if len(lines) == 1 and _ASKS_FOR_HELP.match(lines[0]) else lines
