"""Which notices a run gives, to whom, and that none of them reaches into the run."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

from harness.waiting import until
from ring_notebook.notebook.panel.waits import stuck
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunStatus
from ring_notebook.notebook.run import notifications
from ring_notebook.notebook.run.notifications import Notice, Notices, described, notify
from ring_notebook.protocol.records import Ended, MetricBatch, Status, encode


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    notify()


def lasted(directory: Path, seconds: float) -> RunLog:
    return RunLog(directory, directory.name, "digits", 1, "", {}, {}, started=time.time() - seconds)


@pytest.mark.parametrize(
    ("seconds", "status", "told"),
    [(100, "ok", "ok"), (100, "failed", "failed"), (100, "interrupted", None), (10, "ok", None), (10, "failed", None)],
)
def test_a_long_run_that_ends(tmp_path: Path, seconds: float, status: RunStatus, told: str | None) -> None:
    given: list[Notice] = []
    ended = Event()
    notify(given.append)
    log = lasted(tmp_path / "r", seconds)
    log.finish(status, "ValueError: no data" if status == "failed" else "")
    Notices(log).end("ValueError: no data" if status == "failed" else "")
    notify(lambda _: ended.set(), after=0)  # a notice that comes last
    other = lasted(tmp_path / "last", 1)
    other.finish("ok")
    Notices(other).end("")
    assert ended.wait(30)
    if told is None:
        assert given == []
        return
    until(lambda: given)
    (one,) = given
    assert (one.event, one.run, one.name, one.directory) == (told, "r", "digits", tmp_path / "r")
    assert str(one).startswith(f"{status} · digits · 1 rank · 1:40")
    assert ("ValueError: no data" in str(one)) == (status == "failed")


def test_a_loss_that_is_no_number_is_told_once_and_when_the_run_is_long(tmp_path: Path) -> None:
    given: list[Notice] = []
    notify(given.append, after=50)
    log, short = lasted(tmp_path / "r", 100), lasted(tmp_path / "s", 1)
    for one in (log, short):
        batch = MetricBatch(one.run, 0, ("loss",), array("d", (one.started, 7, float("nan"))))
        one.put(encode([batch]))
        until(lambda one=one: one.broken())
        watching = Notices(one)
        for _ in range(5):
            watching.look()
    until(lambda: given)
    assert [(one.event, one.run) for one in given] == [("NaN", "r")]
    assert "loss is NaN on rank 0 since step 7" in str(given[0])
    for one in (log, short):
        one.close()


def test_each_standstill_is_told_once(
    tmp_path: Path, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(stall_warning=60)
    monkeypatch.setattr(notifications, "_PERIOD", 0.0)
    given: list[Notice] = []
    notify(given.append, after=100)
    log = RunLog(tmp_path / "r", "r", "digits", 2, "a\nb", {}, {}, started=time.time() - 1000)
    watching = Notices(log)

    def look(idle: float, step: int) -> None:
        """Look several times while both ranks have been idle for so long, since this step."""
        now = log.now() - idle
        batches = [MetricBatch("r", rank, ("loss",), array("d", (now, step, 0.5))) for rank in range(2)]
        wait = {"operation": "allreduce", "name": "w", "missing": [1], "seconds": 1.0}
        log.put(encode([*batches, Status("r", 0, now, 2, wait), Status("r", 1, now, 1)]), now)
        until(lambda: log.taken == log.received)
        for _ in range(5):
            watching.look()

    look(0, 1)
    look(80, 2)
    assert stuck(log.view())  # the panel says it; too short for a notice
    look(120, 3)
    look(130, 3)
    look(0, 4)
    look(500, 5)
    for rank in range(2):
        log.put(encode([Ended("r", rank, "ok", 1.0)]))
    until(lambda: len(log.ended()) == 2)
    watching.look()
    log.finish("ok")
    watching.end("")
    until(lambda: len(given) == 3)
    assert [one.event for one in given] == ["stuck", "stuck", "ok"]
    first, sentence = str(given[0]).split("\n")
    assert first.startswith("stuck · digits · 2 ranks · 16:40")
    assert sentence == given[0].error
    assert sentence == "stuck for 2:00: rank 0 waits for rank 1 in allreduce 'w'; rank 1 is at line 1: a"


def test_a_callable_that_raises_is_one_line_and_none_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began, go_on = Event(), Event()

    def hangs(_: Notice) -> None:
        began.set()
        go_on.wait(30)
        raise ConnectionError("no route\nto the host")

    notify(hangs, after=0)
    log = lasted(tmp_path / "r", 1)
    log.finish("ok")
    Notices(log).end("")  # returns although the callable has not
    assert began.wait(30)
    go_on.set()
    until(lambda: not any(one.is_alive() for one in notifications._telling))
    assert capsys.readouterr().err == "notice of run r: hangs raised ConnectionError: no route\n"


def test_what_cannot_be_called_and_no_time(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a callable that takes a notice, got str"):
        notify("slack")  # type: ignore[arg-type]
    for after in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="expected seconds, 0 or more"):
            notify(after=after)


def test_it_says_whom_it_tells() -> None:
    assert described() == "No run gives a notice."  # outside of a kernel
    notify(print, after=5)
    assert described() == "A run of 5 s or more tells print when it ends, fails, logs NaN or inf, or makes no progress."
