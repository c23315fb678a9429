"""`%ring`, `%%ringtrain` and `%%ringscale`: parse their lines, then delegate."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser

from ring_notebook.errors import RingError
from ring_notebook.notebook import completion, history
from ring_notebook.notebook.failures import brief
from ring_notebook.notebook.session import Session

__all__ = ["RingMagics", "register"]

F = TypeVar("F", bound=Callable[..., Any])


def _train_parser() -> MagicArgumentParser:
    parser = MagicArgumentParser(prog="%%ringtrain", add_help=False)
    parser.add_argument("-n", type=int, help="ranks to run on; all engines by default")
    parser.add_argument("--name", default="", help="what to call the run")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="S", help="stop after so many seconds")
    parser.add_argument("--plot", default="", metavar="loss,acc", help="metrics to chart")
    parser.add_argument("--timeline", action="store_true", help="record what all ranks do and show it at the end")
    parser.add_argument("--background", action="store_true", help="return at once")
    parser.add_argument("--setup", action="store_true", help="run again on `%%ring restart --rerun`")
    parser.add_argument("--out", default="", metavar="VAR", help="assign the run to this variable")
    return parser


def _scale_parser() -> MagicArgumentParser:
    parser = MagicArgumentParser(prog="%%ringscale", add_help=False)
    parser.add_argument("sizes", help="numbers of ranks, separated by commas")
    parser.add_argument("--name", default="", help="what to call the runs")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="S", help="stop each after so many seconds")
    return parser


def _ring_parser() -> MagicArgumentParser:
    parser = MagicArgumentParser(prog="%ring", add_help=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=MagicArgumentParser)
    start = commands.add_parser("start", add_help=False)
    start.add_argument("-n", type=int)
    start.add_argument("--hosts", default="")
    start.add_argument("--keep", action="store_true")
    commands.add_parser("attach", add_help=False)
    commands.add_parser("status", add_help=False)
    commands.add_parser("stop", add_help=False)
    commands.add_parser("doctor", add_help=False)
    restart = commands.add_parser("restart", add_help=False)
    restart.add_argument("-n", type=int)
    restart.add_argument("--rerun", action="store_true")
    push = commands.add_parser("push", add_help=False)
    push.add_argument("names", nargs="+", metavar="NAME")
    pull = commands.add_parser("pull", add_help=False)
    pull.add_argument("names", nargs="+", metavar="NAME")
    pull.add_argument("-t", "--rank", type=int, default=0)
    export = commands.add_parser("export", add_help=False)
    export.add_argument("path", metavar="FILE")
    export.add_argument("name", nargs="?", default="", metavar="RUN")
    runs = commands.add_parser("runs", add_help=False)
    runs.add_argument("action", nargs="?", choices=["compare"])
    runs.add_argument("names", nargs="*", metavar="RUN")
    return parser


def _one_line(method: F) -> F:
    """Show our own errors as one line instead of a traceback through this package."""

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RingError as error:
            if not hasattr(error, "_render_traceback_"):
                brief(error, f"{type(error).__name__}: {error}")
            raise

    return wrapped  # type: ignore[return-value]


@magics_class
class RingMagics(Magics):
    """The magics of one notebook."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self._session = session
        self._train = _train_parser()
        self._scale = _scale_parser()
        self._ring = _ring_parser()

    @cell_magic
    @_one_line
    def ringtrain(self, line: str, cell: str) -> None:
        """Run the cell on every engine of the cluster: ``%%ringtrain [-n N] [--name NAME] [--timeout S]
        [--plot loss,acc] [--timeline] [--background] [--setup] [--out VAR]``.
        """
        options = vars(self._train.parse_args(shlex.split(line)))
        options["plot"] = [name for name in options["plot"].split(",") if name]
        out = options.pop("out")
        try:
            self._session.train(cell, **options, cell_id=self._cell_id())
        finally:
            if out:
                self.shell.user_ns[out] = self._session.run

    def _cell_id(self) -> str:
        """The id of the cell that is executed, where the notebook tells its kernel; empty elsewhere."""
        parent: dict[str, Any] = getattr(self.shell, "get_parent", dict)()
        return str(parent.get("metadata", {}).get("cellId", ""))

    @cell_magic
    @_one_line
    def ringscale(self, line: str, cell: str) -> Any:
        """Run the cell at several sizes and compare: ``%%ringscale 1,2,4 [--name NAME] [--timeout S]``."""
        options = vars(self._scale.parse_args(shlex.split(line)))
        sizes = options.pop("sizes")
        if not all(size.isdigit() and int(size) > 0 for size in sizes.split(",")):
            raise UsageError(f"{sizes!r}: expected numbers of ranks separated by commas, as 1,2,4")
        return self._session.scale(cell, [int(size) for size in sizes.split(",")], **options)

    @line_magic
    @_one_line
    def ring(self, line: str) -> Any:
        """The cluster: ``%ring start [-n N] [--hosts a:4,b:4] [--keep]``, ``attach``, ``status``, ``stop``,
        ``restart [-n N] [--rerun]``, ``push NAME...``, ``pull NAME... [-t RANK]``, ``runs``,
        ``runs compare RUN RUN...``, ``export FILE [RUN]``, ``doctor``.
        """
        options = vars(self._ring.parse_args(shlex.split(line)))
        return getattr(self, f"_{options.pop('command')}")(**options)

    def _start(self, n: int | None, hosts: str, keep: bool) -> None:
        print(self._session.start(n, hosts, keep))  # noqa: T201

    def _attach(self) -> None:
        print(self._session.attach())  # noqa: T201

    def _stop(self) -> None:
        print(self._session.stop())  # noqa: T201

    def _doctor(self) -> None:
        from ring_notebook.launch import doctor

        print(doctor.render(doctor.diagnose()))  # noqa: T201

    def _restart(self, n: int | None, rerun: bool) -> None:
        print(self._session.restart(n, rerun))  # noqa: T201

    def _status(self) -> Any:
        return self._session.status()

    def _push(self, names: list[str]) -> None:
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"no variable {', '.join(missing)} in this notebook")
        self._session.require().push({name: self.shell.user_ns[name] for name in names})

    def _pull(self, names: list[str], rank: int) -> Any:
        values, table = self._session.pull(names, rank)
        self.shell.user_ns.update(values)
        return table

    def _export(self, path: str, name: str) -> None:
        print(self._session.export(path, name))  # noqa: T201

    def _runs(self, action: str | None, names: list[str]) -> Any:
        if action == "compare":
            return history.compare(names)
        return history.listing()


def register(shell: InteractiveShell) -> None:
    """Register the magics in ``shell``, once."""
    if "ringtrain" not in shell.magics_manager.magics["cell"]:
        session = Session()
        shell.register_magics(RingMagics(shell, session))
        completion.register(shell, session)
