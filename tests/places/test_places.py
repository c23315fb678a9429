"""One job of ringrun, one function and one cell of a notebook in each place of the table, without PyTorch.

`make test` tries the corners; `make test-places` all of it, and the places that take minutes to make.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.waiting import until
from places.places import (
    COLUMNS,
    GROUP,
    LIMIT,
    NEEDED_ELSEWHERE,
    PLACES,
    PROGRAMS,
    SAYS_WHY,
    SUBSTITUTED,
    UNUSED,
    WITHOUT_PROC,
    Place,
    refusing,
    small_group,
)
from ring_notebook.machine.process_life import is_alive

pytestmark = pytest.mark.usefixtures("without_torch")

CORNERS = {("old headers", "cell"), ("ENOSYS", "run"), ("EPERM", "ringrun"), ("gVisor's /proc", "ringrun")}
"""What `make test` tries of the table."""


DEAR = "TEST_PLACES"
DEARLY = "NOT TESTED: a place that takes minutes to make; `make test-places` does"


def _cases() -> list[object]:
    cases = []
    for place in PLACES:
        for column in COLUMNS:
            corner = any(word in place.name and column == name for word, name in CORNERS)
            marks = [] if corner else [pytest.mark.slow]
            if place.dear:
                limit = pytest.mark.timeout(LIMIT + 60, func_only=True)  # not of what `made` does
                marks += [pytest.mark.skipif(DEAR not in os.environ, reason=DEARLY), limit]
            cases.append(pytest.param(place, column, marks=marks, id=f"{place.name}-{column}"))
    return cases


@pytest.fixture
def made(place: Place) -> Place:
    """The place, once it is there."""
    place.make()
    return place


@pytest.mark.parametrize(("place", "column"), _cases())
def test_a_place(made: Place, column: str, tmp_path: Path) -> None:
    """In a folder whose name has that of a variable in it, which IPython would replace."""
    tmp_path = tmp_path / "cost_$HOME"
    tmp_path.mkdir()
    with small_group(GROUP) if made.group else contextlib.nullcontext():
        made.check(column, tmp_path)


@pytest.mark.parametrize("column", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("run", "cell")), "ringrun"])
def test_a_place_without_proc(column: str, tmp_path: Path) -> None:
    """The one thing that has no substitute is named, before anything is started."""
    WITHOUT_PROC.check(column, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=["ENOSYS", "EPERM"])
@pytest.mark.parametrize("name", [*SUBSTITUTED, *UNUSED])
def test_one_call_is_refused(name: str, error: int, tmp_path: Path) -> None:
    if name == "clone3" and error == errno.EPERM:
        pytest.skip("no program starts a thread there: the C library takes EPERM for an answer")
    place = Place(name, "", wrap=refusing(error, name))
    place.check("ringrun", tmp_path)
    place.check("run", tmp_path)
    if not NEEDED_ELSEWHERE.get(name):
        place.check("cell", tmp_path)


def test_the_documentation_shows_this_table_and_these_calls() -> None:
    text = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
    table = text[text.index("| Place |") :].split("\n\n")[0].splitlines()
    assert table[0] == "| Place | What is missing, and what takes its place | How | Cell | Script |"
    rows = [place.row for place in (*PLACES, WITHOUT_PROC)]
    assert [row for row in table if row in rows] == rows, "what the tests of places expect, in their order"
    others = [row.strip("| ").split(" | ") for row in table[2:] if row not in rows]
    assert all(how.startswith("read") and (cell, script) == ("-", "-") for _, _, how, cell, script in others[1:])
    assert others[0] == OPTIONS
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert set(SUBSTITUTED) <= listed


OPTIONS = [
    "`python -O`, `-I`, `-P`, PYTHONSAFEPATH, PYTHONWARNINGS=error, the locale C with a script `größe.py`",
    "nothing. ipyparallel cannot be imported by `python -OO`",
    "options, variables: one at a time here, together in the places above",
    "runs; with `-OO` an error says why",
    "runs",
]
"""Its line in the documentation."""
FLAGS = {
    "-O": ({}, ["-O"]),
    "-OO": ({}, ["-OO"]),
    "-I": ({}, ["-I"]),
    "-P": ({}, ["-P"] if sys.version_info >= (3, 11) else []),
    "warnings": ({"PYTHONWARNINGS": "error"}, []),
    "safe path": ({"PYTHONSAFEPATH": "1"}, []),
    # The encoding is that of a terminal, which this IPython takes for its notebook.
    "locale C": (
        {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"},
        [],
    ),
}


def started(
    place: Place, column: str, variables: Mapping[str, str], options: list[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """What becomes of a column of the table in ``folder``, by a program whose name is not ASCII."""
    command, _ = COLUMNS[column]
    program = f"größe_{Path(command[-1]).name}"
    (folder / program).write_bytes((PROGRAMS / Path(command[-1]).name).read_bytes())
    words = []
    for word in [*command[:-1], program]:
        words += [word, *options] if word == sys.executable else [word]
    if words[0] != sys.executable:
        words = [sys.executable, *options, *words]
    return place.start(words, folder, **variables)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(name, column, marks=() if (name, column) == ("warnings", "ringrun") else pytest.mark.slow)
        for name in FLAGS
        for column in COLUMNS
    ],
)
def test_an_interpreter_with_options(name: str, column: str, tmp_path: Path) -> None:
    """The options and variables that change what Python does at its start, one at a time."""
    variables, options = FLAGS[name]
    folder = tmp_path / "Übung"
    folder.mkdir()
    # With -I, PYTHONPATH does not lead to the framework without PyTorch.
    environment = {**variables, **({"RING_FRAMEWORK": ""} if options == ["-I"] else {})}
    done = started(Place(name, ""), column, environment, options, folder)
    if (name, column) == ("-OO", "cell"):
        assert "ipyparallel, which `python -OO` cannot import because that removes docstrings; use -O" in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert COLUMNS[column][1] in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("place", "column"), _cases())
def test_a_place_with_all_options(made: Place, column: str, tmp_path: Path) -> None:
    """In each place all at once that can be."""
    if SAYS_WHY in (made.cell if column == "cell" else made.script):
        pytest.skip("nothing runs there")
    alike = [FLAGS[name] for name in ("-O", "safe path", "locale C")]
    variables = {name: value for given, _ in alike for name, value in given.items()}
    if not made.dear:  # there are libraries of other versions, which warn
        variables["PYTHONWARNINGS"] = "error,ignore:IPython parent"  # which IPython says without a HOME
    with small_group(GROUP) if made.group else contextlib.nullcontext():
        done = started(made, column, variables, [option for _, given in alike for option in given], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert COLUMNS[column][1] in done.stdout, done.stdout + done.stderr


def test_the_ranks_end_with_their_launcher_where_the_system_does_not_end_them(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG is refused: processes that look take its place."""
    program = (
        "import os, signal, subprocess, sys\n"
        f"sys.path[:0] = [{str(Path(__file__).parents[1])!r}]\n"
        "from places.refusing import refuse\n"
        "from ring_notebook.launch.supervisor.parent_death import wrap\n"
        "refuse(1, ['prctl'])\n"
        "code = 'import time\\nprint(1, flush=True)\\nwhile True: time.sleep(0.05)'\n"
        "child = subprocess.Popen(wrap([sys.executable, '-c', code]), stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, timeout=60, check=False
    )
    until(lambda: not is_alive(int(done.stdout)))
