"""`input()`, `getpass()` and `breakpoint()` on a rank, in a real kernel whose front end answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from notebook.kernel import ANSI, Notebook

NEXT = "%%ringtrain\nring.barrier()\nprint('all', ring.size())"


def error(reply: dict[str, object]) -> str:
    return ANSI.sub("", "\n".join(reply["traceback"]))  # type: ignore[arg-type]


def test_input_on_one_rank(notebook: Notebook) -> None:
    cell = """%%ringtrain
import getpass
name = secret = line = None
if ring.rank() == 1:
    name = input("Name? ")
    secret = getpass.getpass()
    import sys
    line = sys.stdin.readline()
ring.barrier()
"""
    asked, _, reply = notebook.talk(cell, "Ada", "s3cret", "a line")
    assert reply["status"] == "ok"
    assert asked == ["rank 1: Name? ", "rank 1: Password: ", "rank 1: "]
    assert "['Ada', 's3cret', 'a line\\n']" in notebook.text("%ring pull name secret line -t 1\n[name, secret, line]")
    assert "all 2" in notebook.text(NEXT)


def test_all_ranks_are_asked_one_after_the_other(notebook: Notebook) -> None:
    asked, _, reply = notebook.talk("%%ringtrain\na = input('a? ')\nb = input('b? ')", "1", "2", "3", "4")
    assert reply["status"] == "ok"
    assert asked == [f"rank {rank}: {name}? " for rank in (0, 1) for name in "ab"]
    assert "['1', '3']" in notebook.text("%ring pull a -t 0\nfirst = a\n%ring pull a -t 1\n[first, a]")


def test_an_interrupt_while_a_rank_asks_ends_the_cell(notebook: Notebook) -> None:
    asked, _, reply = notebook.talk("%%ringtrain\nif ring.rank() == 1:\n    input()\nring.barrier()")
    assert asked == ["rank 1: "]
    assert reply["ename"] == "KeyboardInterrupt"
    assert "all 2" in notebook.text(NEXT)


def test_a_front_end_that_cannot_ask_is_told_what_to_do(notebook: Notebook) -> None:
    name, shown = notebook.error("%%ringtrain\nif ring.rank() == 1:\n    input('Name? ')\nring.barrier()")
    assert name == "UnsupportedOperation"
    assert "rank 1: 'Name? ' has no answer: this front end cannot ask; set a variable" in shown
    assert "all 2" in notebook.text(NEXT)


def test_a_breakpoint_opens_pdb_on_its_rank_while_the_others_wait(notebook: Notebook) -> None:
    cell = """%%ringtrain --timeout 8
def inner(x):
    secret = x * 2
    breakpoint()
    return secret

if ring.rank() == 1:
    secret = inner(4)
ring.barrier()
done = True
"""
    notebook.run(NEXT)  # so that no import counts
    typed = ["p secret", "import time; time.sleep(10)", "w", "n", "s", "u", "l", "c"]
    asked, printed, reply = notebook.talk(cell, *typed)
    assert reply["status"] == "ok", error(reply)
    assert asked == ["rank 1 (Pdb) "] * len(typed)
    assert "8\n" in printed
    assert "return secret" in printed
    assert re.search(r"Cell\(8\)<module>\(\)", printed), printed
    assert "cell.py" not in printed, "the stack begins in the cell"
    assert "8" in notebook.text("%ring pull secret -t 1\nsecret")


def test_the_home_folder_has_aliases_but_asks_nothing(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / ".pdbrc").write_text("alias twice p 2 * %1\nn\ninput('Name? ')\n")
    cell = f"""%%ringtrain
import os
home, os.environ["HOME"] = os.environ["HOME"], {str(tmp_path)!r}
if ring.rank() == 1:
    x = 21
    breakpoint()
    os.environ["HOME"] = home
    1 / 0
"""
    asked, printed, _ = notebook.talk(cell, "twice x", "l", "c")
    assert asked == ["rank 1 (Pdb) "] * 3
    assert "*** ~/.pdbrc: left out, it would move or ask: n\n" in printed
    assert "can ask 'Name? '" in printed
    assert "42\n" in printed
    assert '  7  ->\t    os.environ["HOME"] = home' in printed


def test_stepping_ends_with_the_cell(notebook: Notebook) -> None:
    asked, printed, reply = notebook.talk("%%ringtrain\nbreakpoint()\nx = 1\nx + 1", *["n"] * 4)
    assert reply["status"] == "ok", error(reply)
    assert asked == ["rank 0 (Pdb) "] * 2 + ["rank 1 (Pdb) "] * 2, "one question for each line"
    assert "runner" not in printed
    assert "None" in notebook.text("%%ringtrain -n 1\nimport sys\nprint(sys.gettrace())")


def test_ranks_that_all_stop_are_stepped_one_by_one_through_a_collective(notebook: Notebook) -> None:
    asked, _, reply = notebook.talk("%%ringtrain\nbreakpoint()\nring.barrier()\nx = 1", "n", "n", "c", "c")
    assert reply["status"] == "ok", error(reply)
    # Rank 0 waits in the barrier until rank 1 has called it.
    assert asked[0] == "rank 0 (Pdb) "
    assert asked.count("rank 1 (Pdb) ") >= 1


def test_q_ends_the_cell_on_every_rank(notebook: Notebook) -> None:
    _, _, reply = notebook.talk("%%ringtrain\nif ring.rank() == 1:\n    breakpoint()\n    x = 1\nring.barrier()", "q")
    assert reply["ename"] == "KeyboardInterrupt"
    assert "variables and cluster are kept" in error(reply)
    assert "all 2" in notebook.text(NEXT)


def test_an_interrupt_at_a_breakpoint_ends_the_cell(notebook: Notebook) -> None:
    cell = "%%ringtrain\nimport pdb\nif ring.rank() == 1:\n    pdb.set_trace()\n    x = 1\nring.barrier()"
    asked, _, reply = notebook.talk(cell, "p 1")
    assert len(asked) == 2
    assert reply["ename"] == "KeyboardInterrupt"
    assert "all 2" in notebook.text(NEXT)


@pytest.mark.slow
def test_a_rank_that_dies_while_it_is_debugged_is_not_waited_for(notebook: Notebook, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    cell = f"""%%ringtrain
import os, pathlib, signal, threading, time
def die():
    while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
if ring.rank() == 1:
    threading.Thread(target=die).start()
    breakpoint()
    x = 1
ring.barrier()
"""
    asked: list[str] = []

    def never(message: dict[str, dict[str, str]]) -> None:
        asked.append(message["content"]["prompt"])
        seen.touch()

    reply = notebook.loop.run_until_complete(
        notebook.client.kc._async_execute_interactive(cell, allow_stdin=True, stdin_hook=never, timeout=60)
    )
    assert asked == ["rank 1 (Pdb) "]
    assert reply["content"]["ename"] == "ClusterError"
    notebook.run("%ring restart")
    assert "all 2" in notebook.text(NEXT)


def test_the_state_of_a_run_is_plain_data_and_says_who_asks(notebook: Notebook) -> None:
    notebook.run("%ring start -n 2")
    cell = """%%ringtrain --background --out run
import time
print("asked soon")
ring.log(loss=float("nan"), step=3)
if ring.rank() == 1:
    input("Name? ")
ring.barrier()
"""
    notebook.run(cell)
    shown = notebook.text(
        "import json, time\nfor _ in range(600):\n    state = run.state()\n"
        "    if state['ranks'][1]['asks'] and state['ranks'][1]['line'] == 6 and state['ranks'][0]['waiting']: break\n"
        "    time.sleep(0.1)\nprint(json.dumps(state, allow_nan=False))"
    )
    state = json.loads(shown)
    assert (state["status"], state["size"], state["metrics"]) == ("running", 2, ["loss"])
    assert [rank["asks"] for rank in state["ranks"]] == [False, True]
    assert state["ranks"][0]["waiting"]["operation"] == "barrier"
    assert state["ranks"][1]["line"] == 6
    assert state["ranks"][0]["last"] == {"loss": None}
    assert state["output"] == [{"ranks": [0, 1], "stream": "stdout", "text": "asked soon"}]
    asked, _, reply = notebook.talk("run.wait()", "Ada")
    assert (asked, reply["status"]) == (["rank 1: Name? "], "ok")
    assert "ok ['ok', 'ok']" in notebook.text(
        "state = run.state()\nprint(state['status'], [rank['status'] for rank in state['ranks']])"
    )


BACKGROUND = """%%ringtrain --background --out run
if ring.rank() == 1:
    name = input("Name? ")
    breakpoint()
    name += "!"
ring.barrier()
"""


def until_asked(notebook: Notebook) -> None:
    notebook.run("import time\nwhile not run.asking: time.sleep(0.05)")


def test_a_background_run_is_answered_when_the_user_wants(notebook: Notebook) -> None:
    notebook.run(BACKGROUND)
    until_asked(notebook)
    assert "rank 1 asks 'Name?': `%ring debug` answers." in notebook.text("print(run.asks())")
    assert "waits for an answer (`%ring debug`)" in notebook.error("%ring pull name")[1], "the ranks are busy"
    asked, printed, reply = notebook.talk("%ring debug", "Ada", "p name", "c")
    assert reply["status"] == "ok", error(reply)
    assert asked == ["rank 1: Name? ", "rank 1 (Pdb) ", "rank 1 (Pdb) "]
    assert "'Ada'" in printed
    assert "'Ada!'" in notebook.text("run.wait()\n%ring pull name -t 1\nname")
    renamed = "`%ring answer` is `%ring debug --ask` now; the next release does not know the old name.\n"
    assert notebook.text("%ring answer") == f"{renamed}No rank asks anything.\n"
    assert notebook.text("%ring answer") == "No rank asks anything.\n", "it is said once"


def test_an_interrupt_instead_of_an_answer_stops_the_background_run(notebook: Notebook) -> None:
    notebook.run(BACKGROUND)
    until_asked(notebook)
    _, _, reply = notebook.talk("%ring debug")
    assert reply["ename"] == "KeyboardInterrupt"
    assert notebook.error("run.wait()")[0] == "KeyboardInterrupt"
    assert "all 2" in notebook.text(NEXT)


@pytest.mark.slow
def test_time_limits_of_collectives_stand_still_while_a_rank_is_debugged(notebook: Notebook) -> None:
    notebook.run("%ring stop\nimport os\nos.environ['RING_TIMEOUT'] = '6'\n%ring start -n 2")
    notebook.run(NEXT)
    cell = "%%ringtrain\nif ring.rank() == 1: breakpoint()\nring.barrier()"
    _, _, reply = notebook.talk(cell, "import time; time.sleep(8)", "c")
    assert reply["status"] == "ok", error(reply)
    name, shown = notebook.error("%%ringtrain\nimport time\nif ring.rank() == 1: time.sleep(30)\nring.barrier()")
    assert (name, "timed out" in shown) == ("CollectiveTimeout", True), "they count again"
    notebook.run("%ring stop\ndel os.environ['RING_TIMEOUT']")
