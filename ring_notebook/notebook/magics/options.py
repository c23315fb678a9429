"""What the lines of the magics may say: their parsers, and the help and the completions that are made of these."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from ring_notebook.launch.launchers.hosts import parse_hosts

__all__ = ["RING", "SCALE", "TRAIN", "LineParser", "completions"]

_COLUMN = 26  # where the explanations begin


class _HelpShownError(Exception):
    """The line asked for help, which has been printed."""


class LineParser(MagicArgumentParser):
    """The parser of a magic's line, or of one of its commands. ``about`` says what the magic does."""

    def __init__(self, prog: str, about: str = "", **_: Any) -> None:
        self.about = about
        self.options: list[argparse.Action] = []
        self.commands: dict[str, LineParser] = {}
        super().__init__(prog=prog, add_help=True)  # type: ignore[no-untyped-call]

    def add_argument(self, *names: Any, **details: Any) -> argparse.Action:
        """As that of any parser; what it adds is explained and completed too."""
        action = super().add_argument(*names, **details)
        if action.dest != "help":
            self.options.append(action)
        return action

    def add_commands(self, **about: str) -> dict[str, LineParser]:
        """Have the line begin with one of several commands; returns their parsers."""
        added = self.add_subparsers(dest="command", required=True, parser_class=LineParser)
        self.commands = {name: added.add_parser(name, about=text) for name, text in about.items()}
        return self.commands

    def parse(self, line: str) -> dict[str, Any] | None:
        """The options of a line by name; None when it asked for help, which is printed. Raises UsageError."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"{error}: {line}") from None
        if self.commands and (not words or words[0] == "help"):
            words = [*words[1:], "--help"]
        try:
            return vars(self.parse_args(words))
        except _HelpShownError:
            return None

    def exit(self, _status: int = 0, _message: str | None = None) -> NoReturn:
        """End the parsing, after help was printed."""
        raise _HelpShownError

    def format_help(self) -> str:
        """What the magic or command does, and a line for each command and option."""
        what = " COMMAND" if self.commands else "".join(f" {_shown(one)}" for one in self.options if not _flag(one))
        return "\n".join([f"{self.prog}{what}: {self.about}.", *self._explained("  "), ""])

    def _explained(self, indent: str) -> list[str]:
        lines = [_row(f"{indent}{_shown(option)}", option.help or "") for option in self.options]
        for name, command in self.commands.items():
            lines += [_row(f"{indent}{name}", command.about), *command._explained(f"{indent}    ")]
        return lines


def _row(left: str, right: str) -> str:
    return f"{left:<{_COLUMN}} {right}".replace("%%", "%")


def _flag(option: argparse.Action) -> bool:
    return bool(option.option_strings)


def _shown(option: argparse.Action) -> str:
    """An option as it is typed, with what its value is called."""
    value = "" if option.nargs == 0 else str(option.metavar or "|".join(option.choices or ()) or option.dest)
    return " ".join(filter(None, [", ".join(option.option_strings), value]))


def completions(text: str) -> list[str]:
    """The commands and options that may stand at the end of ``text``, the line of a magic up to the cursor."""
    words = text.split()
    parser = _PARSERS.get(words[0]) if words else None
    if parser is None or not (text[-1].isspace() or words[1:]):
        return []
    begun = "" if text[-1].isspace() else words.pop()
    given = words[1:]
    if parser.commands:
        if not given:
            return [name for name in parser.commands if name.startswith(begun)]
        parser = parser.commands.get(given.pop(0), LineParser(""))
    if any(given[-1:] == [name] and option.nargs != 0 for option in parser.options for name in option.option_strings):
        return []  # it is a value
    names = [max(option.option_strings, key=len) for option in parser.options if _flag(option)]
    names += [] if given else [choice for option in parser.options for choice in option.choices or ()]
    return [name for name in names if name.startswith(begun) and name not in given]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, not {text!r}")
    return int(text)


def _sizes(text: str) -> list[int]:
    try:
        return [_count(size) for size in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of ranks separated by commas, as 1,2,4") from None


def _hosts(text: str) -> str:
    try:
        parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _metrics(text: str) -> Sequence[str]:
    return [name for name in text.split(",") if name]


def _train() -> LineParser:
    parser = LineParser(
        "%%ringtrain", "run the cell on every engine of the cluster, which it starts where there is none"
    )
    parser.add_argument("-n", type=_count, metavar="N", help="ranks to run on; all engines by default")
    parser.add_argument("--name", default="", metavar="NAME", help="what to call the run")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="S", help="stop after so many seconds")
    parser.add_argument("--plot", type=_metrics, default=[], metavar="loss,acc", help="metrics to chart")
    parser.add_argument("--timeline", action="store_true", help="record what all ranks do and show it at the end")
    parser.add_argument("--background", action="store_true", help="return at once; `%%ring interrupt` stops the run")
    parser.add_argument("--setup", action="store_true", help="run again on `%%ring restart --rerun`")
    parser.add_argument("--out", default="", metavar="VAR", help="assign the run to this variable")
    return parser


def _scale() -> LineParser:
    parser = LineParser("%%ringscale", "run the cell at several sizes, one after the other, and compare")
    parser.add_argument("sizes", type=_sizes, metavar="1,2,4", help="numbers of ranks")
    parser.add_argument("--name", default="", metavar="NAME", help="what to call the runs")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="S", help="stop each after so many seconds")
    return parser


def _ring() -> LineParser:
    parser = LineParser("%ring", "the cluster that cells with %%ringtrain run on, and its runs")
    commands = parser.add_commands(
        start="start a cluster of engines, one per rank",
        attach="find a running cluster again and the run in it, after a kernel restart or from another notebook",
        status="the engines and what they are doing",
        interrupt="stop the run that is under way; variables and cluster live on",
        stop="stop the cluster",
        restart="start the cluster anew; the ranks' variables are gone",
        push="give every rank a copy of variables of this notebook",
        pull="fetch variables of a rank into this notebook",
        runs="the runs of this folder, the newest first, or the curves of several in one figure",
        export="write the last cell and the --setup cells before it as a script for ringrun",
        doctor="look at everything that engines need and say what to mend",
        help="explain this, or one command",
    )
    start = commands["start"]
    start.add_argument(
        "-n",
        type=_count,
        metavar="N",
        help="how many; by default one per slot, GPU or core",
    )
    start.add_argument(
        "--hosts",
        type=_hosts,
        default="",
        metavar="a:4,b:4",
        help="on which hosts, how many on each",
    )
    start.add_argument("--keep", action="store_true", help="outlive the kernel; `%%ring attach` finds it again")
    restart = commands["restart"]
    restart.add_argument("-n", type=_count, metavar="N", help="how many engines; by default as many as before")
    restart.add_argument("--rerun", action="store_true", help="run the cells with --setup again")
    commands["push"].add_argument("names", nargs="+", metavar="NAME", help="variables")
    pull = commands["pull"]
    pull.add_argument("names", nargs="+", metavar="NAME", help="variables")
    pull.add_argument("-t", "--rank", type=int, default=0, metavar="RANK", help="whose; rank 0 by default")
    runs = commands["runs"]
    runs.add_argument("action", nargs="?", choices=["compare"], help="lay runs over one another")
    runs.add_argument("names", nargs="*", metavar="RUN", help="beginnings of their names or ids")
    export = commands["export"]
    export.add_argument("path", metavar="FILE", help="where to")
    export.add_argument("name", nargs="?", default="", metavar="RUN", help="another run's cell instead of the last one")
    return parser


TRAIN, SCALE, RING = _train(), _scale(), _ring()
_PARSERS = {parser.prog: parser for parser in (TRAIN, SCALE, RING)}
