"""Commands of `%ring` and options of cells: what a line means, what completes it, and which names it had before."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import pytest
from IPython.core.error import UsageError

from ring_notebook.notebook.line_command import Command, Option
from ring_notebook.notebook.magics import commands, completion
from ring_notebook.notebook.magics.commands import GROUPS, MAGICS, RING
from ring_notebook.notebook.session.session import Session
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.line_options import count, values_of

MOST_COMMANDS = 29  # with help
# All names of the release before, with a line for each that has another one now.
BEFORE = (
    "start attach default sync status debug answer stacks trace queue interrupt set pause resume stop heal grow shrink "
    "restart snapshot restore branch snapshots push pull notify runs plot share classroom export submit doctor"
)
RENAMED = {
    "answer": ("debug", {"ask": True}),
    "interrupt": ("stop", {"runs": True}),
    "grow 3 --hosts a:3": ("resize", {"n": 3, "hosts": "a:3", "only": "grow"}),
    "shrink 2": ("resize", {"n": 2, "only": "shrink"}),
    "snapshot a": ("save", {"name": "a"}),
    "restore a -n 2": ("restore", {"name": "a", "n": 2}),
    "branch a@3 --name b": ("branch", {"name": "a@3", "called": "b"}),
    "snapshots remove a b": ("delete", {"names": ["a", "b"]}),
}


def given(magic: Command[..., Any], line: str) -> tuple[Command[..., Any], dict[str, Any]]:
    """The command of a line, and what it sets to something else than its default."""
    command, words = magic.find(magic.renamed(shlex.split(line))[0])
    values = command.parse(words)
    assert values is not None
    defaults = {one.sets: one.default for one in command.all_options}
    return command, {name: value for name, value in values.items() if value != defaults[name]}


def test_there_are_at_most_29_commands() -> None:
    assert len(RING.commands) + len(["help"]) <= MOST_COMMANDS
    assert {one.group for one in RING.commands.values()} == set(GROUPS)


def test_each_is_a_file_and_explained() -> None:
    files = {path.stem for path in Path(str(commands.__file__)).parent.glob("ring*.py")}
    assert files == {f"ring_{name}" for name in RING.commands} | (set(MAGICS) - {"ring"})
    for magic in MAGICS.values():
        for command in magic.every():
            assert command.about, command.prog
            assert all(len(one.shown.split()) <= 3 for one in command.options), "flags and at most one value"


HELLO = """
from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.session import Session


@command("runs", replaces={"hi": "hello"})
def hello(
    session: Session,
    name: Annotated[str, Option("NAME", "who")] = "you",
    loud: Annotated[bool, Option("--loud", "louder")] = False,
) -> str:
    \"\"\"Greet somebody.\"\"\"
    return f"Hello {name}{'!' * loud}"
"""


def test_a_new_command_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ring_hello.py").write_text(HELLO)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    ring = commands.declared()["ring"]
    command, set_to = given(ring, "hi Ada --loud")
    assert command(Session(), **set_to) == "Hello Ada!"
    assert "  hello                    greet somebody\n      NAME                 who\n" in ring(Session())
    assert ring.complete([], "he", Session())[0] == ["heal", "hello"]
    assert command.complete([], "--", Session())[0] == ["--loud"]


def test_names_of_the_release_before_mean_the_same() -> None:
    for line, (name, values) in RENAMED.items():
        command, set_to = given(RING, line)
        assert (command.name, set_to) == (name, values)
        assert RING.renamed(line.split())[1].startswith(f"`%ring {line.split()[0]}")
    renamed = {line.split()[0] for line in RENAMED}
    assert set(BEFORE.split()) - renamed <= set(RING.commands)
    assert RING.renamed(["runs", "delete", "a"]) == (["runs", "delete", "a"], "")


def test_a_former_name_is_completed_as_the_one_of_now() -> None:
    for former, now in (("restore", "snapshots restore"), ("branch", "snapshots branch"), ("grow", "resize")):
        before, after = (completion._words(f"%ring {name} ", "", Session()) for name in (former, now))
        assert before == after
        assert before[0]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("start", {}),
        ("start -n 2 --keep", {"n": 2, "keep": True}),
        ("start --batch slurm -N 1 --idle 20m", {"batch": "slurm", "nodes": 1, "idle": 1200.0}),
        ("runs --where a b --sort=-loss", {"where": ["a", "b"], "sort": "-loss"}),
        ("runs tag a x y", {"name": "a", "tags": ["x", "y"]}),
        ("queue cancel 2 3", {"cells": [2, 3]}),
        ("plot loss,acc a b -x time", {"metrics": ["loss", "acc"], "runs": ["a", "b"], "x": "time"}),
        ("debug -c where -c 'p x'", {"commands": ["where", "p x"]}),
        ("stop a", {"names": ["a"]}),
        ("set lr=0.1", {"words": ["lr=0.1"]}),
        ("default on", {"state": "on"}),
        ("doctor --json", {"json": True}),
    ],
)
def test_what_a_line_means(line: str, values: dict[str, Any]) -> None:
    assert given(RING, line)[1] == values


def test_options_of_a_cell_are_fields() -> None:
    line = "-t 0,2-3 --plot loss --snapshot 10min --sync-every 50 --timeline --out run"
    command, values = given(MAGICS["ringtrain"], line)
    assert values.pop("out") == "run"
    made = CellOptions(**values)
    assert (made.ranks, made.plot, made.snapshot, made.sync_every) == ([0, 2, 3], ["loss"], 600.0, 50)
    assert CellOptions.of(made.kept()) == made
    kept = json.dumps(CellOptions(ranks=range(1, 3)).kept())  # as of a sweep side by side
    assert CellOptions.of(json.loads(kept)).ranks == [1, 2]
    assert {one.sets for one in command.options} - {"out", "sweep"} <= set(CellOptions.__dataclass_fields__)


def test_each_option_of_a_cell_has_an_effect() -> None:
    """Some file of the package reads the field; its declaration alone does nothing."""
    package = Path(str(commands.__file__)).parents[3]
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    named = r"""\b(?:options|given|own)(?:\.{0}\b|(?:\.get\(|\[)["']{0}["'])"""
    unread = {name for name in CellOptions.__dataclass_fields__ if not re.search(named.format(name), text)}
    assert unread == set(), "carry them out: a rank in engine/runner.py, the kernel in notebook/run/send_cell.py"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("start --keeep", "unrecognized arguments: --keeep; did you mean --keep?"),
        ("start 4", "unrecognized arguments: 4; did you mean -n 4?"),
        ("strat", "unrecognized arguments: strat; did you mean start?"),
        ("''", "unrecognized arguments: "),
        ("profiler", "unrecognized arguments: profiler; %ring knows attach, doctor, "),
        ("runs profiler", "unrecognized arguments: profiler; %ring runs knows compare, "),
        ("snapshots sav a", "unrecognized arguments: sav a; did you mean save?"),
        ("plot loss -x tim", "argument -x: invalid choice: 'tim'"),
        ("plot loss --smooth 2", "argument --smooth: expected a share from 0 to 0.99, got 2"),
        ("resize", "the following arguments are required: N"),
        ("share a b", "unrecognized arguments: b"),
    ],
)
def test_a_wrong_line_is_explained(line: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        given(RING, line)
    assert said in str(caught.value)


def test_no_option_is_offered_that_stands_there() -> None:
    for line in ("start -n 0", "start -n 2 --nodes 3"):
        with pytest.raises(UsageError) as caught:
            given(RING, line)
        assert "did you mean -n" not in str(caught.value)


@pytest.mark.parametrize("name", ["1x", "for", "a.b"])
def test_what_is_no_name_of_a_variable(name: str) -> None:
    with pytest.raises(UsageError, match="argument --out: expected the name of a variable, got"):
        given(MAGICS["ringtrain"], f"--out {name}")


def of_session(session: Session, _begun: str) -> list[str]:
    return list(session.variables)


def action(
    session: Session,
    one: Annotated[str, Option("ONE", "first", complete=of_session)],
    more: Annotated[list[int], Option("MORE", "others", count, many=True)] = (),  # type: ignore[assignment]
    way: Annotated[str, Option("-w, --way WAY", "how", choices=("up", "down"))] = "",
    fast: Annotated[bool, Option("--fast", "soon")] = False,
    hidden: Annotated[bool, Option("--hidden")] = False,
) -> None:
    """Do it. And more.

    Details.
    """


COMMAND = Command("%ring act", action)


@COMMAND.command
def sub(session: Session) -> None:
    """Do a part."""


@pytest.mark.parametrize(
    ("words", "begun", "found"),
    [
        ([], "", ["sub", "--way", "--fast", "apple", "avocado"]),
        ([], "a", ["apple", "avocado"]),
        ([], "--", ["--way", "--fast"]),
        (["apple"], "", ["--way", "--fast"]),
        (["apple", "--fast"], "-", ["--way"]),
        (["--way"], "", ["up", "down"]),
        (["--way"], "d", ["down"]),
        (["--way", "up"], "ap", ["apple"]),
        (["--fast"], "av", ["avocado"]),
        (["apple", "3"], "", ["--way", "--fast"]),
    ],
)
def test_completion(words: list[str], begun: str, found: list[str]) -> None:
    session = Session({"apple": 1, "avocado": 2})
    assert COMMAND.complete(words, begun, session)[0] == found


def test_help_is_made_of_docstring_and_annotations() -> None:
    assert COMMAND.help() == (
        "%ring act ONE [MORE]: do it. And more.\n"
        "  ONE                      first\n"
        "  MORE                     others\n"
        "  -w, --way WAY            how\n"
        "  --fast                   soon\n"
        "  sub                      do a part\n"
    )
    assert given(COMMAND, "x 1 2 -w up --hidden")[1] == {"one": "x", "more": [1, 2], "way": "up", "hidden": True}


def test_values_of_a_sweep() -> None:
    assert values_of("lr=0.1,1e-2,0.1") == ("lr", [0.1, 0.01])
    assert values_of("seed=0..3") == ("seed", [0, 1, 2, 3])
    assert values_of("shift=-2..1") == ("shift", [-2, -1, 0, 1])
    assert values_of("norm=layer,batch,True,None") == ("norm", ["layer", "batch", True, None])
    assert values_of("\u00b5=1,True,1.0") == ("\u03bc", [1, True, 1.0]), "spelled as Python reads it"
    wrong = dict.fromkeys(("lr", "lr=", "0=1", "lr 0.1", "seed=3..0", "class=1"), "expected a name and values such as")
    wrong |= dict.fromkeys(("lr=0.1,1e400", "lr=-inf", "lr=nan"), "expected finite numbers")
    for text, why in (wrong | {"seed=0..1000": "at most 1000 values"}).items():
        with pytest.raises(ValueError, match=why):
            values_of(text)
