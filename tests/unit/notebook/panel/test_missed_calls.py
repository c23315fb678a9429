"""A collective that a rank has left out is told at once, and no other wait is taken for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.waiting import until
from ring_notebook.notebook.panel import headline
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.protocol.records import Status, encode

SOURCE = "for batch in loader:\n    ring.allreduce(x)\nprint('done')\n"
WAITING = {"operation": "allreduce", "name": "", "sequence": 101, "seconds": 1.5, "missing": [1]}


def alarms(
    directory: Path, waiting: dict[str, Any] | None, first: dict[str, Any], second: dict[str, Any], line: int
) -> Any:
    log = RunLog(directory / "r1", "r1", "", 2, SOURCE, {"first_line": 2}, {})
    log.put(encode([Status("r1", 0, 0.0, line=3, waiting=waiting, extra=first)]))
    log.put(encode([Status("r1", 1, 0.0, line=line, extra=second)]))
    until(lambda: log.taken == 2)
    try:
        return headline.headline(log, log.view()).alarms
    finally:
        log.finish("interrupted")


def test_both_numbers_and_the_line_are_told_at_once(tmp_path: Path) -> None:
    said = alarms(tmp_path, WAITING, {"calls": 101, "statement": 0}, {"calls": 100, "statement": 1}, 4)
    assert said == (
        "101 calls on rank 0, 100 on rank 1; the last differs at line 3: ring.allreduce(x), which rank 1 has left",
    )


@pytest.mark.parametrize(
    ("waiting", "first", "second"),
    [
        pytest.param(WAITING, (101, 0), (100, 0), id="rank 1 is in the same statement"),
        pytest.param(WAITING, (101, 1), (100, 0), id="rank 1 is in an earlier one"),
        pytest.param(WAITING, (101, 0), (101, 1), id="rank 1 has called it meanwhile"),
        pytest.param({**WAITING, "seconds": 0.4}, (101, 0), (100, 1), id="rank 0 has only begun to wait"),
        pytest.param({**WAITING, "missing": []}, (101, 0), (100, 1), id="rank 0 waits for nobody"),
        pytest.param(WAITING, (101, -1), (100, 1), id="rank 0 is outside of the cell"),
    ],
)
def test_nothing_is_said_of_another_wait(
    tmp_path: Path, waiting: dict[str, Any], first: tuple[int, int], second: tuple[int, int]
) -> None:
    given = [dict(zip(("calls", "statement"), one, strict=True)) for one in (first, second)]
    assert alarms(tmp_path, waiting, *given, 4) == ()


def loop(*marks: tuple[int, int], name: str = "a") -> dict[str, Any]:
    return {"calls": marks[-1][1], "statement": 0, "loop": {"name": name, "line": 2, "marks": marks}}


def test_ranks_that_part_within_a_loop_are_told_while_they_go_on(tmp_path: Path) -> None:
    said = alarms(tmp_path, None, loop((0, 1), (8, 9), (16, 17), (24, 25)), loop((0, 1), (8, 9), (16, 16)), 3)
    assert said == ("17 calls on rank 0, 16 on rank 1 before step 16 of the loop at line 2; they part after step 8",)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(loop((0, 1), (1, 2)), loop((0, 1), (1, 2), (2, 3)), id="alike"),
        pytest.param(loop((0, 1), (4, 5)), loop((1, 9), (2, 3)), id="no step in common"),
        pytest.param(loop((0, 1), (4, 5)), loop((0, 1), (4, 9), name="b"), id="another loop"),
        pytest.param(loop((0, 1), (4, 5)), loop((0, 2), (4, 9)), id="never alike"),
        pytest.param(loop((0, 1), (4, 5)), {"calls": 1, "statement": 0, "loop": {}}, id="outside of loops"),
    ],
)
def test_loops_that_do_not_part_are_no_alarm(tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert alarms(tmp_path, None, first, second, 3) == ()
