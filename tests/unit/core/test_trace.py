"""A trace that grows on disk: whole JSON between additions, under both names, and gone when the disk is full."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.programs import ran
from ring_notebook.core import trace
from ring_notebook.core.trace import GrowingTrace


def numbers(path: Path) -> list[int]:
    for _ in range(100):
        with contextlib.suppress(
            ValueError
        ):  # read in the moment of an addition, of which there are a thousand a second
            return [event["n"] for event in json.loads(path.read_text())["traceEvents"]]
    raise AssertionError(path.read_text())


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "PERIOD", 0.001)


def test_what_is_there_can_be_read_at_any_time(tmp_path: Path, often: None) -> None:
    own, shown = tmp_path / "t.rank0.json", tmp_path / "t.json"
    shown.write_text("of an earlier job")
    count = 0

    def take() -> list[dict[str, Any]]:
        nonlocal count
        count += 1
        return [{"n": count, "text": "x" * (count % 7)}] if count % 3 else []

    file = GrowingTrace(own, shown, [{"n": 0}], take)
    seen = 0
    while seen < 50:
        now = numbers(shown)
        assert now == numbers(own)[: len(now)]
        seen = len(now)
    events = file.close()
    assert [event["n"] for event in events] == numbers(own) == numbers(shown)
    assert numbers(own) == [0, *(n for n in range(1, count + 1) if n % 3)]


def test_a_device_is_left_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    GrowingTrace(tmp_path / "t", pipe, [{"n": 1}], list).close()
    assert pipe.is_fifo()
    assert numbers(tmp_path / "t") == [1]


FULL = """
import resource, sys
from pathlib import Path
from ring_notebook.core import trace
trace.PERIOD = 0.01
events = [[], [{"text": "x" * 1000}], [{}]]
file = trace.GrowingTrace(Path("own"), Path("shown"), [{}], lambda: events.pop(0) if events else [])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
while events: pass
print(file.close())
"""


def test_a_full_disk_leaves_a_line_and_no_file(tmp_path: Path) -> None:
    done = ran([sys.executable, "-c", FULL], cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "the timeline own cannot be written: File too large\n")
    assert list(tmp_path.iterdir()) == []
