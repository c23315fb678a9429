"""The options of the magics: one parser for each, from which help and completion are made."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from ring_notebook.launch.launchers.hosts import parse_hosts
from ring_notebook.launch.ringrun_options import read_by
from ring_notebook.notebook.record.choices import AXES, MOST_SMOOTH
from ring_notebook.prediction import link_rate
from ring_notebook.scaling import rank_counts

_COLUMN = 26  # where the explanations begin
_MOST_RANKS = 1 << 16  # in one span, so that a typing error costs no memory


class _HelpShownError(Exception):
    """The line asked for help; it has been printed."""


class LineParser(MagicArgumentParser):
    """The parser of a magic's line, or of one of its commands. ``about`` says what the magic does."""

    def __init__(self, prog: str, about: str = "", **_: Any) -> None:
        self.about = about
        self.options: list[argparse.Action] = []
        self.commands: dict[str, LineParser] = {}
        self.see_also: list[LineParser] = []  # shown below its own help
        super().__init__(prog=prog, add_help=True)  # type: ignore[no-untyped-call]

    def add_argument(self, *names: Any, **details: Any) -> argparse.Action:
        """As in any ArgumentParser; the option also appears in help and completion."""
        action = super().add_argument(*names, **details)
        if action.dest != "help":
            self.options.append(action)
        return action

    def add_exclusive(self) -> Callable[..., argparse.Action]:
        """A function like `add_argument`; a line may have only one of the options that it adds."""
        group = self.add_mutually_exclusive_group()

        def add(*names: Any, **details: Any) -> argparse.Action:
            self.options.append(group.add_argument(*names, **details))
            return self.options[-1]

        return add

    def add_hidden_argument(self, *names: Any, **details: Any) -> None:
        """An option that neither help nor completion shows."""
        super().add_argument(*names, **details)

    def add_commands(self, **about: str) -> dict[str, LineParser]:
        """Make the first word of the line one of several commands; returns their parsers."""
        added = self.add_subparsers(dest="command", required=True, parser_class=LineParser)
        self.commands = {name: added.add_parser(name, about=text) for name, text in about.items()}
        return self.commands

    def parse(self, line: str) -> dict[str, Any] | None:
        """The options of a line by name; None when it asked for help, which is printed. Raises UsageError."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"{error}: {line}") from None
        asked = words[1].lstrip("%") if len(words) == 2 and words[0] == "help" else ""
        for other in self.see_also:
            if other.prog.lstrip("%") == asked:
                print(other.format_help(), end="")  # noqa: T201
                return None
        if self.commands and (not words or words[0] == "help"):
            words = [*words[1:], "--help"]
        try:
            return vars(self.parse_args(words))
        except _HelpShownError:
            return None
        except UsageError as error:
            raise UsageError(f"{error}{self._meant(words)}") from None

    def _meant(self, words: Sequence[str]) -> str:
        """The command or option that a wrong word of the line is most like, as a question; empty without one."""
        parser = self.commands.get(words[0], self) if words else self
        known = [name for option in parser.options for name in [*option.option_strings, *(option.choices or ())]]
        known += parser.commands
        for word in words:
            name = word.partition("=")[0]
            if name not in known and name not in self.commands and (like := get_close_matches(name, known, 1)):
                return f"; did you mean {like[0]}?"
        return ""

    def exit(self, _status: int = 0, _message: str | None = None) -> NoReturn:
        """End the parsing, after help was printed."""
        raise _HelpShownError

    def format_help(self) -> str:
        """What the magic or command does, and a line for each command and option."""
        what = " COMMAND" if self.commands else "".join(f" {_shown(one)}" for one in self.options if not _flag(one))
        lines = [f"{self.prog}{what}: {self.about}.", *self._explained("  "), ""]
        return "\n".join([*lines, *(more.format_help() for more in self.see_also)])

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
    """The commands and options that can follow or complete ``text``, the line of a magic up to the cursor."""
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
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def _number(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return seconds


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 20m or 2h, got {text!r}")
    return float(match[1]) * _UNITS[match[2] or ""]


def _ranks(text: str) -> list[int]:
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last.isdecimal() if dash else not last) or int(last or first) < int(first):
            raise argparse.ArgumentTypeError(f"expected ranks such as 0,2-3, got {text!r}")
        chosen.update(range(int(first), min(int(last or first), int(first) + _MOST_RANKS) + 1))
    return sorted(chosen)


def _hosts(text: str) -> str:
    try:
        parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= MOST_SMOOTH:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to {MOST_SMOOTH}, got {text}")
    return share


def _metrics(text: str) -> Sequence[str]:
    return [name for name in text.split(",") if name]


def _train() -> LineParser:
    parser = LineParser("%%ringtrain", "run the cell on every rank; starts a cluster when none is running")
    where = parser.add_exclusive()
    where("-n", type=_count, metavar="N", help="run on ranks 0 to N-1; by default on all")
    where("-t", "--ranks", type=_ranks, metavar="0,2-3", help="run on these ranks, which count from 0 in the run")
    parser.add_argument("--name", default="", metavar="NAME", help="name of the run")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="S", help="stop the run after S seconds")
    parser.add_argument(
        "--plot", type=_metrics, default=[], metavar="loss,acc", help="metrics to chart; loss+val_loss: both in one"
    )
    parser.add_argument(
        "--timeline", action="store_true", help="record what each rank does when, and show it at the end"
    )
    parser.add_argument("--horovod", action="store_true", help="`import horovod` means Ring Notebook in the cell")
    parser.add_argument(
        "--background", action="store_true", help="return at once; `%%ring queue` and `%%ring interrupt`"
    )
    parser.add_argument("--setup", action="store_true", help="run again by `%%ring heal` and `%%ring restart --rerun`")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint (`ring.checkpoint`)")
    parser.add_argument(
        "--replay", default="", metavar="RUN", help="make the changes of knobs of that run again, at the same steps"
    )
    parser.add_argument(
        "--snapshot",
        type=_duration,
        default=0.0,
        metavar="10min",
        help="keep all variables so often (`%%ring snapshots`)",
    )
    parser.add_argument(
        "--sync-every",
        type=_count,
        default=1,
        metavar="N",
        help="let each rank step alone, and sync the weights every N steps",
    )
    parser.add_argument("--out", default="", metavar="VAR", help="assign the run to this variable")
    # Of a cell that `%ring default on` sends to the ranks: it has no line of the magic. Not for users to type.
    parser.add_hidden_argument("--first-line", type=int, default=2)
    return parser


def _scale() -> LineParser:
    parser = LineParser("%%ringscale", "run the cell on several numbers of ranks, one after the other, and compare")
    parser.add_argument("sizes", type=read_by(rank_counts), metavar="1,2,4", help="numbers of ranks")
    parser.add_argument("--name", default="", metavar="NAME", help="name of the runs")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="S", help="stop each run after S seconds")
    parser.add_argument("--repeat", type=_count, default=1, metavar="N", help="run each size N times; show the median")
    parser.add_argument("--warmup", type=_count, default=1, metavar="N", help="steps at the beginning not to count")
    kind = parser.add_exclusive()
    kind("--strong", dest="kind", action="store_const", const="strong", help="the global batch is to stay the same")
    kind("--weak", dest="kind", action="store_const", const="weak", default="", help="it is to grow with the ranks")
    parser.add_argument("--csv", default="", metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--out", default="", metavar="VAR", help="assign the table to this variable; VAR.points")
    parser.add_argument(
        "--predict", type=read_by(rank_counts), default=[], metavar="8,64", help="sizes to predict from the others"
    )
    parser.add_argument(
        "--link", type=read_by(link_rate), metavar="25Gbit", help="rate of each host's network, to predict with"
    )
    parser.add_argument("--gpus-per-host", type=_count, metavar="N", help="ranks of each host, to predict with")
    return parser


def _add_job(parser: LineParser) -> None:
    """What is asked of a batch system."""
    parser.add_argument("-N", dest="nodes", type=_count, metavar="N", help="hosts of the job")
    parser.add_argument("--gpus", type=_number, metavar="N", help="GPUs on each host; by default a rank for each")
    parser.add_argument("--time", default="", metavar="2:00:00", help="time limit of the job")
    parser.add_argument("--queue", default="", metavar="QUEUE", help="queue, partition or QOS")
    parser.add_argument("--account", default="", metavar="ACCOUNT", help="account or project that pays")


def _ring() -> LineParser:
    parser = LineParser("%ring", "manage the cluster that %%ringtrain cells run on, and its runs")
    commands = parser.add_commands(
        start="start a cluster of engines, one per rank",
        attach="attach to a running cluster and its run, after a kernel restart or from another notebook",
        default="on: run cells without a magic on the ranks, but for those with %%%%local; off: in the notebook",
        sync="bring modules that have changed in this folder to the ranks and reload them there",
        status="list the engines and what each is doing",
        debug="look at the exception that ended the last cell on a rank, with pdb",
        answer="answer what ranks of a background run ask: input(), and commands of pdb at a breakpoint()",
        stacks="show where every rank is now, in the cell and in what it has called",
        trace="go back through the last operations of all ranks, to the first place where ranks part",
        queue="list the cells that wait for ranks which a run uses; cancel some",
        interrupt="stop the run in progress; variables and cluster are kept",
        set="change knobs of the run in progress, on all ranks at the same step; without values, list them",
        pause="have all ranks of the run in progress wait at the end of the same step",
        resume="end a pause",
        stop="stop the cluster",
        heal="start the ranks again that have died; the others keep their variables",
        grow="start more engines; the others keep their variables",
        shrink="end the last engines; the others keep their variables",
        restart="stop the cluster and start it again; all variables of ranks are lost",
        snapshot="keep the variables of all ranks, and the set-up cells, under a name",
        restore="bring a snapshot back, in this cluster or a new one",
        branch="continue the run of a snapshot from there on, as a new run",
        snapshots="list the snapshots of this folder, newest first; remove some",
        push="copy variables of this notebook to every rank",
        pull="copy variables of a rank into this notebook",
        notify="say when a long run ends, fails or logs NaN: in JupyterLab, and by a function of this notebook",
        runs="list the runs of this folder, newest first; compare, tag, note or delete some, or write what one printed",
        plot="chart metrics of the last run, or of several runs in the same charts",
        share="let others see the newest run: by a read-only link, or by a small file in a folder that they can read",
        classroom="show the runs that others share, as tiles: those that need somebody first",
        export="write the last cell and the --setup cells before it as a script for ringrun",
        submit="run the last cell, behind the --setup cells before it, as a batch job of its own",
        doctor="check everything that engines need, on all hosts, and say what to fix",
        help="show this help, or that of one command",
    )
    start = commands["start"]
    start.add_argument("-n", type=_count, metavar="N", help="number of engines; by default one per slot, GPU or core")
    start.add_argument(
        "--hosts", type=_hosts, default="", metavar="a:4,b:4", help="hosts and the number of engines on each"
    )
    start.add_argument(
        "--keep", action="store_true", help="keep the cluster when the kernel ends; `%%ring attach` finds it"
    )
    start.add_argument("--sync", action="store_true", help="before each cell do what `%%ring sync` does")
    start.add_argument("--here", action="store_true", help="also where this host is a login node")
    start.add_argument(
        "--batch",
        default="",
        metavar="SITE",
        help="in a batch job: slurm, pbs, lsf, or a site with a file in ~/.config/ring_notebook/sites; returns at once",
    )
    start.add_argument(
        "--on",
        default="",
        metavar="ENGINE",
        help="in places that it lends: ray://HOST:PORT, dask://HOST:PORT, spark, or k8s://SELECTOR",
    )
    _add_job(start)
    start.add_argument(
        "--requeue", action="store_true", help="when the job starts again, run the set-up cells and resume the last one"
    )
    start.add_argument("--idle", type=_duration, metavar="20m", help="end the job when no cell has run for so long")
    start.add_argument(
        "--signal", type=_duration, metavar="5m", help="write a checkpoint so long before the time limit; by default 5m"
    )
    start.add_argument("--dry-run", action="store_true", help="print the script of the job and start nothing")
    commands["attach"].add_argument(
        "cluster",
        nargs="?",
        default="",
        metavar="CLUSTER",
        help="its notebook, or the beginning of its id; by default this notebook's, else the one that another has kept",
    )
    commands["default"].add_argument(
        "state", nargs="?", choices=["on", "off"], help="without it: say where such cells run"
    )
    commands["set"].add_argument(
        "words",
        nargs="*",
        metavar="lr=0.05",
        help="values of knobs, behind the name of a run if there are several",
    )
    for name in ("pause", "resume"):
        commands[name].add_argument("name", nargs="?", default="", metavar="RUN", help="if there are several")
    commands["trace"].add_argument(
        "name", nargs="?", default="", metavar="RUN", help="of a run that failed; by default the last one"
    )
    debug = commands["debug"]
    debug.add_argument("-t", "--rank", type=int, metavar="RANK", help="by default the rank that failed first")
    debug.add_argument(
        "-c",
        dest="commands",
        action="append",
        default=[],
        metavar="CMD",
        help="answer this and do not ask for others",
    )
    queue = commands["queue"]
    queue.add_argument("action", nargs="?", choices=["cancel"], help="cancel cells that wait")
    queue.add_argument("cells", nargs="*", type=_count, metavar="N", help="their numbers; by default all of them")
    commands["status"].add_argument("--json", action="store_true", help="print it for tools, as JSON")
    doctor = commands["doctor"]
    doctor.add_argument(
        "--hosts", type=_hosts, default="", metavar="a:4,b:4", help="these; by default those of the cluster or the job"
    )
    doctor.add_argument("--json", action="store_true", help="print it for tools, as JSON")
    heal = commands["heal"]
    heal.add_argument(
        "-t", "--ranks", type=_ranks, metavar="0,2-3", help="start these again, dead or alive; by default all dead ones"
    )
    grow = commands["grow"]
    grow.add_argument("n", type=_count, metavar="N", help="number of engines from now on")
    grow.add_argument(
        "--hosts", type=_hosts, default="", metavar="a:4,b:4", help="hosts and the number of engines that each may have"
    )
    commands["shrink"].add_argument("n", type=_count, metavar="N", help="number of engines from now on")
    restart = commands["restart"]
    restart.add_argument("-n", type=_count, metavar="N", help="number of engines; by default as before")
    restart.add_argument(
        "--rank",
        dest="ranks",
        type=_ranks,
        metavar="0,2-3",
        help="end these alone, also in the middle of a cell, and start them again; the others keep their variables",
    )
    restart.add_argument("--rerun", action="store_true", help="run the cells with --setup again")
    commands["snapshot"].add_argument("name", metavar="NAME", help="replaces an older one of this name")
    restore = commands["restore"]
    restore.add_argument("name", metavar="NAME", help="of a snapshot; `%%ring snapshots` lists them")
    restore.add_argument("-n", type=_count, metavar="N", help="number of engines; by default as there are, or were")
    restore.add_argument("--rerun", action="store_true", help="run its set-up cells first")
    branch = commands["branch"]
    branch.add_argument("name", metavar="RUN@STEP", help="a snapshot of a run")
    branch.add_argument("-n", type=_count, metavar="N", help="number of engines; by default as there are, or were")
    branch.add_argument("--name", dest="called", default="", metavar="NAME", help="name of the new run")
    branch.add_argument("--background", action="store_true", help="return at once")
    branch.add_argument("--out", default="", metavar="VAR", help="assign the new run to this variable")
    snapshots = commands["snapshots"]
    snapshots.add_argument("action", nargs="?", choices=["remove"], help="remove snapshots")
    snapshots.add_argument("names", nargs="*", metavar="NAME", help="their names")
    commands["push"].add_argument("names", nargs="+", metavar="NAME", help="variables")
    pull = commands["pull"]
    pull.add_argument("names", nargs="+", metavar="NAME", help="variables")
    pull.add_argument("-t", "--rank", type=int, default=0, metavar="RANK", help="the rank to copy from; by default 0")
    tells = commands["notify"]
    tells.add_argument("function", nargs="?", default="", metavar="NAME", help="call it with a notice; off: no notices")
    tells.add_argument("--after", type=_seconds, metavar="S", help="of runs of S seconds or more; by default 60")
    runs = commands["runs"]
    actions = ["compare", "output", "tag", "note", "delete"]
    runs.add_argument("action", nargs="?", choices=actions, help="what to do with a run, or with several")
    runs.add_argument("names", nargs="*", metavar="RUN", help="beginning of a name or id; behind it tags, or a note")
    runs.add_argument("--all", action="store_true", dest="every", help="also short cells that logged nothing")
    runs.add_argument(
        "--sort", default="", metavar="NAME", help="by a column, metric or parameter; --sort=-NAME: smallest first"
    )
    runs.add_argument("--where", nargs="+", default=[], metavar="WORD", help="only runs with these words, or lr=0.1")
    plot = commands["plot"]
    plot.add_argument(
        "metrics",
        type=_metrics,
        metavar="loss,acc",
        help="metrics; loss+val_loss: both in one chart; 'grad/*': all of them",
    )
    plot.add_argument("runs", nargs="*", metavar="RUN", help="beginnings of names or ids; by default the last run")
    plot.add_argument("-x", choices=AXES, default="", help="the x axis")
    plot.add_argument(
        "--smooth", type=_share, default=0.0, metavar="0.9", help="average: the share of the value before"
    )
    plot.add_argument("--log", action="store_true", help="a logarithmic scale where all values are positive")
    share = commands["share"]
    share.add_argument(
        "where", nargs="?", default="", metavar="FOLDER", help="a folder instead of a link; off: share nothing more"
    )
    share.add_argument("--as", dest="name", default="", metavar="NAME", help="your name there; by default your login")
    commands["classroom"].add_argument(
        "sources", nargs="+", metavar="FOLDER|LINK", help="where they share them; off: the tiles stay as they are"
    )
    export = commands["export"]
    export.add_argument("path", metavar="FILE", help="the script to write")
    export.add_argument(
        "name", nargs="?", default="", metavar="RUN", help="export the cell of this run, not of the last one"
    )
    export.add_argument("--job", default="", metavar="SITE", help="also write FILE.sh, which runs it in a batch job")
    submit = commands["submit"]
    submit.add_argument("site", metavar="SITE", help="slurm, pbs, lsf, or a site as of `%%ring start --batch`")
    submit.add_argument(
        "name", nargs="?", default="", metavar="RUN", help="the cell of this run, instead of the last one"
    )
    submit.add_argument("-n", type=_count, metavar="N", help="ranks; by default one for each GPU, else as the run had")
    submit.add_argument("--requeue", action="store_true", help="when the job starts again, resume the cell")
    for parser_of_job in (export, submit):
        _add_job(parser_of_job)
    return parser


TRAIN, SCALE, RING = _train(), _scale(), _ring()
RING.see_also = [TRAIN, SCALE]
_PARSERS = {parser.prog: parser for parser in (TRAIN, SCALE, RING)}
