"""What pdb on a rank takes from `~/.pdbrc`, at a breakpoint and after an exception, as the user's answers show it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ring_notebook.engine import debuggers, dialogue

CELL = "def inner(x):\n    STOP\n    return x\n\ny = inner(41)\n"
Debug = Callable[..., list[str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".pdbrc"


def live(monkeypatch: pytest.MonkeyPatch, *typed: str) -> list[str]:
    """The texts that the user of a cell with a breakpoint reads before each prompt."""
    shown: list[str] = []

    def ask(prompt: str, *, text: str = "", kind: str = "input") -> str:
        assert kind == "pdb"
        shown.append(text)
        return typed[len(shown) - 1]

    monkeypatch.setattr(debuggers, "ask", ask)
    monkeypatch.setattr(sys, "breakpointhook", debuggers._on_breakpoint)
    monkeypatch.setattr(dialogue, "_send", lambda _: None)
    traced = sys.gettrace()
    try:
        exec(compile(CELL.replace("STOP", "breakpoint()"), "<cell of run r>", "exec"), {})
    finally:
        sys.settrace(traced)
    return shown


def post_mortem(_: pytest.MonkeyPatch, *typed: str) -> list[str]:
    """What the user is answered after an exception of a cell; the first answer shows the frame."""
    try:
        exec(compile(CELL.replace("STOP", "1 / 0"), "<cell of run r>", "exec"), {})
    except ZeroDivisionError as error:
        debuggers.keep_frames(error.__traceback__)
    try:
        return [debuggers.answer(command)[0] for command in ("", *typed)]
    finally:
        debuggers.forget_frames()


@pytest.mark.parametrize("debug", [live, post_mortem])
def test_aliases_of_the_home_folder(home: Path, debug: Debug, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home.write_text("# mine\n\nalias twice p 2 * %1\nlast = x + 1\n")
    elsewhere = tmp_path / "project"
    elsewhere.mkdir()
    (elsewhere / ".pdbrc").write_text("print('not mine')\n")  # somebody's who has written into the folder
    monkeypatch.chdir(elsewhere)
    shown = debug(monkeypatch, "twice x", "p last", "c")
    assert "inner(" in shown[0]
    assert "not mine" not in shown[0]
    assert shown[1].strip() == "82"
    assert shown[2].strip() == "42"


FAULTY = "\n".join(
    [
        "alias first p 'first'",
        *("c", "next", "s", "q", "exit", "up", "unt", "r", "j 1", "interact", "debug x", "run", "commands"),
        *("1 / 0", "if x:", "nonsense(", "alias", "raise SystemExit(3)", "b 999", "\x00"),
        "alias last p 'last'",
    ]
)


@pytest.mark.parametrize("debug", [live, post_mortem])
def test_a_faulty_file_neither_moves_the_prompt_nor_asks(
    home: Path, debug: Debug, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text(FAULTY)
    shown = debug(monkeypatch, "first", "last", "p x", "c")
    assert "inner(" in shown[0]
    assert "*** ~/.pdbrc: left out, it would move or ask: next" in shown[0]
    assert "ZeroDivisionError" in shown[0]
    assert [one.strip() for one in shown[1:4]] == ["'first'", "'last'", "41"]


@pytest.mark.parametrize("debug", [live, post_mortem])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.write_bytes(b"\xff\xfe\nalias z p x\n")])
def test_what_is_no_text(
    home: Path, debug: Debug, make: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(home)
    shown = debug(monkeypatch, "p x", "c")
    assert shown[1].strip() == "41"
