"""The line that counts seconds leaves nothing behind."""

from __future__ import annotations

import time

import pytest

from ring_notebook.notebook.session.live_lines import ElapsedLine


def shown(written: str) -> str:
    """What a page shows of text in which each carriage return begins the line again."""
    line = ""
    for part in written.split("\r"):
        line = part + line[len(part) :]
    return line.strip()


def test_seconds_are_shown_and_the_line_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    with ElapsedLine("Starting:"):
        while not (written := capsys.readouterr().out):
            time.sleep(0.01)
    assert shown(written).startswith("Starting: 0.")
    assert shown(written + capsys.readouterr().out) == ""


def test_what_is_quick_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ElapsedLine("Starting:"):
        pass
    assert capsys.readouterr().out == ""
