"""Whatever comes in the place of a request: to a supervisor, from a rank to its user, beside a cell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from attack.fuzz.fuzz import damaged, with_other_values
from harness.waiting import LIMIT
from ring_notebook.engine import setup
from ring_notebook.launch.supervisor.engine_supervisor import make_requests, request
from ring_notebook.protocol.question import Question

VALID = b"end 1\nstart 1\nstart 99\nend 7\nend -1\nrestart 1\n"
# Each engine writes its process id; nothing of MPI or Python is in it.
ENGINE = 'echo $$ > "$0/pid-$RANK.new"; mv "$0/pid-$RANK.new" "$0/pid-$RANK"; exec sleep 600'


def pid(folder: Path, rank: int) -> int:
    """The process of a rank, once it has begun."""
    while not (folder / f"pid-{rank}").exists():
        time.sleep(0.01)
    return int((folder / f"pid-{rank}").read_text())


def lives(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of two engines, which takes requests from the pipe in ``tmp_path``."""
    make_requests(tmp_path / "requests")
    command = [sys.executable, "-m", "ring_notebook.launch.supervise", "2", "0", tmp_path / "requests", ""]
    process = subprocess.Popen([*command, "sh", "-c", ENGINE, tmp_path], stderr=subprocess.DEVNULL)
    yield process
    process.terminate()
    process.wait()


def test_the_supervisor_takes_valid_requests_after_any_others(
    supervisor: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    first = pid(tmp_path, 0)
    pid(tmp_path, 1)
    pipe = os.open(tmp_path / "requests", os.O_WRONLY)
    for data in damaged(VALID, 300, seed=3):
        if b"end 0" not in data:  # with both ranks ended there is nothing to supervise
            os.write(pipe, data)
    os.write(pipe, b"\n")
    os.close(pipe)
    for _ in range(2):
        request(tmp_path / "requests", "end", 1)
        request(tmp_path / "requests", "start", 1)
        before = pid(tmp_path, 1)
        (tmp_path / "pid-1").unlink()
        request(tmp_path / "requests", "end", 1)
        request(tmp_path / "requests", "start", 1)
        assert pid(tmp_path, 1) != before
    assert pid(tmp_path, 0) == first
    assert lives(first), "a rank that nobody named is left alone"
    assert supervisor.poll() is None
    os.kill(supervisor.pid, signal.SIGTERM)
    supervisor.wait(LIMIT)
    assert not lives(first)


def test_questions() -> None:
    """What is no question raises ValueError; what is one can be sent on."""
    question = Question(3, "Name? ", "before\n", "pdb", held=True).encode()
    for data in damaged(question.encode(), 2000, seed=5):
        with suppress(ValueError):
            Question.decode(data.decode(errors="replace")).encode()
    for other in with_other_values(json.loads(question)):
        with suppress(ValueError):
            Question.decode(json.dumps(other)).encode()


def test_calls_beside_a_cell_are_answered_whatever_they_say() -> None:
    """The answer is JSON, with the result or the error: a caller never waits for one that cannot be sent."""
    valid = {"function": "ring_notebook.text.error_text:printable", "args": ["text"]}
    assert setup._answer(valid) == {"result": "text"}
    for content in with_other_values(valid):
        assert json.loads(json.dumps(setup._answer(content))).keys() <= {"result", "error"}
    assert "error" in setup._answer({"function": "builtins:set", "args": []})
