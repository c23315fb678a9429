"""What a rank prints and shows is captured in order, and what nobody could have seen is left out."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import HTML, clear_output, display

from harness.programs import ran
from ring_notebook.engine import late_output
from ring_notebook.engine.capture import Capture, portable
from ring_notebook.protocol.records import Cleared, Display, Output


def html(text: str, name: str = "", update: bool = False) -> Display:
    return Display("r1", 1, {"text/html": text}, {}, name, update)


def text(said: str, stream: Any = "stdout") -> Output:
    return Output("r1", 1, stream, said)


@pytest.fixture
def capture() -> Capture:
    return Capture("r1", 1)


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_text_is_joined_up_to_a_change(capture: Capture) -> None:
    capture.write("stdout", "a")
    capture.write("stdout", "b")
    capture.write("stderr", "c")
    capture.show({"text/html": "d"}, {})
    capture.write("stderr", "e")
    assert capture.drain() == [text("ab"), text("c", "stderr"), html("d"), text("e", "stderr")]
    assert capture.drain() == []


def test_lines_of_one_print_are_a_block(capture: Capture) -> None:
    def block(said: str) -> Output:
        return Output("r1", 1, "stdout", said, block=True)

    for said in ["a", "\n", "[[1],\n [2]]", "\n", "b", "\n", "x\ny\n", "half", "1\n2", "\n", "\r10%\n\r20%"]:
        capture.write("stdout", said)
    assert capture.drain() == [
        text("a\n"),
        block("[[1],\n [2]]\n"),
        text("b\n"),
        block("x\ny\n"),
        text("half1\n2\n\r10%\n\r20%"),
    ]
    capture.write("stdout", "1\n2")
    assert capture.drain() == [text("1\n2")], "its end is still to come"


def test_what_is_only_text_is_printed_unless_it_may_be_replaced(capture: Capture) -> None:
    capture.show({"text/plain": "3"}, {})
    capture.show({}, {})
    capture.show({"text/plain": "4"}, {}, "name")
    assert capture.drain() == [text("3\n"), Display("r1", 1, {"text/plain": "4"}, {}, "name")]


def test_of_many_updates_between_two_messages_the_last_one_is_sent(capture: Capture) -> None:
    capture.show({"text/html": "0"}, {}, "x")
    for state in range(1, 100):
        capture.show({"text/html": str(state)}, {}, "x", update=True)
    assert capture.drain() == [html("0", "x"), html("99", "x", update=True)]


def test_clear_takes_back_displays_that_were_not_sent_yet_and_no_text(capture: Capture) -> None:
    capture.write("stdout", "kept on disk")
    capture.show({"text/html": "gone"}, {})
    capture.clear(wait=True)
    assert capture.drain() == [text("kept on disk"), html("gone")]
    capture.show({"text/html": "new"}, {})
    assert capture.drain() == [Cleared("r1", 1), html("new")]
    capture.show({"text/html": "gone"}, {})
    capture.clear(wait=False)
    assert capture.drain() == [Cleared("r1", 1)]


def test_logging_set_up_in_one_run_goes_on_in_the_next(
    capture: Capture, shell: InteractiveShell, capfd: pytest.CaptureFixture[str]
) -> None:
    with capture.active(shell):
        handler = logging.StreamHandler()  # keeps the stream
        handler.emit(logging.makeLogRecord({"msg": "first"}))
    handler.emit(logging.makeLogRecord({"msg": "between"}))
    later = Capture("r2", 1)
    with later.active(shell):
        handler.emit(logging.makeLogRecord({"msg": "second"}))
    assert capture.drain() == [text("first\n", "stderr")]
    assert later.drain() == [Output("r2", 1, "stderr", "second\n")]
    assert capfd.readouterr().err == "between\n"  # where an engine has its log


def test_what_a_cell_starts_writes_to_the_log(
    capture: Capture, shell: InteractiveShell, capfd: pytest.CaptureFixture[str]
) -> None:
    with capture.active(shell):
        sys.stdout.close()  # of this cell, and not of those to come
        subprocess.run(["echo", "out"], stdout=sys.stdout, stderr=sys.stderr, check=True)
        print("shown")  # noqa: T201
    assert capture.drain() == [text("shown\n")]
    assert capfd.readouterr().out == "out\n"


def test_ipython_s_own_calls_come_here_within_the_block_only(
    capture: Capture, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def _repr_html_(self) -> str:
            raise KeyError("no html")

    with capture.active(shell):
        display(HTML("<b>x</b>"))
        shown = capture.drain()
        clear_output(wait=True)
        display(Broken())
    display("afterwards")
    shown += capture.drain()
    assert isinstance(shown[0], Display)
    assert shown[0].data["text/html"] == "<b>x</b>"
    assert isinstance(shown[1], Cleared)
    assert isinstance(shown[2], Output)
    assert "KeyError" in shown[2].text
    assert shown[2].stream == "stderr"
    assert len(shown) == 4
    assert "afterwards" in capsys.readouterr().out


def test_a_widget_becomes_a_line_that_says_what_to_do() -> None:
    widget = {"text/plain": "IntSlider(value=3)", "application/vnd.jupyter.widget-view+json": {"model_id": "x"}}
    data, metadata = portable(widget, {})
    assert (list(data), metadata) == (["text/plain"], {})
    assert data["text/plain"].startswith(
        "IntSlider: widgets work in the notebook's own process only; make it in a cell"
    )


def test_a_bundle_travels_as_json() -> None:
    data, metadata = portable(
        {
            "image/png": b"\x89PNG",
            "application/x": {"a": {1, 2}},
        },
        {"image/png": {"width": 3}},
    )
    assert data == {"image/png": "iVBORw==", "application/x": {"a": "{1, 2}"}}
    assert metadata == {"image/png": {"width": 3}}


@pytest.mark.parametrize(("name", "is_left"), [("of-the-cell", True), ("ring-own", False)])
def test_a_cell_leaves_its_own_threads_only(name: str, is_left: bool) -> None:
    late_output.cell_begins()
    goes_on = threading.Event()
    thread = threading.Thread(target=goes_on.wait, name=name)
    thread.start()
    try:
        late_output.cell_ends("a run")
        late_output.cell_begins()
        assert late_output.is_left_by("a run") == is_left
    finally:
        goes_on.set()
        thread.join()
    assert not late_output.is_left_by("a run")


BELOW = """
import os, sys, threading
from pathlib import Path
from ring_notebook.engine import descriptors
from ring_notebook.engine.capture import Capture
shown = os.dup(1)
descriptors.redirect(Path("."), 0)
sys.setswitchinterval(1e-5)
capture, pieces, ended = Capture("run", 0), [], threading.Event()
def drain():
    while not ended.is_set():
        pieces.extend(capture.drain())
thread = threading.Thread(target=drain)
thread.start()
for number in range(5000):
    os.write(1, b"%d\\n" % number)
    capture.write("stdout", f"{number}\\n")
ended.set()
thread.join()
lines = "".join(piece.text for piece in [*pieces, *capture.drain()]).split()
os.write(shown, b"%d" % sum(line != str(at // 2) for at, line in enumerate(lines)))
"""


def test_what_is_written_below_python_comes_before_a_later_print(tmp_path: Path) -> None:
    """Whatever another thread sends meanwhile: it holds the lock until what it has taken is in order."""
    done = ran([sys.executable, "-c", BELOW], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "0"), done.stderr
