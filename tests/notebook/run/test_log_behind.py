"""A log that is behind its ranks: what waits to be read is not missing, whatever time that takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from harness.waiting import until
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.record.run_log import RunLog


@pytest.fixture(autouse=True)
def _slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message of each run takes the log longer than the run waits for a missing record."""
    read = RunLog._take_in

    def slowly(log: RunLog, message: bytes, now: float) -> None:
        if log.taken == 0:
            time.sleep(4)
        read(log, message, now)

    monkeypatch.setattr(RunLog, "_take_in", slowly)


@pytest.mark.slow
def test_a_run_that_ended_well_is_ok(cluster: Cluster) -> None:
    run = cluster.run("for i in range(10): ring.log(loss=i)").wait()
    assert [rank["status"] for rank in run.summary["ranks"]] == ["ok", "ok"]
    assert len(run.metrics) == 20


def test_a_rank_that_has_ended_is_not_still_running(cluster: Cluster, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    run = cluster.run(
        f"""
        import pathlib, time
        while ring.rank() == 1 and not pathlib.Path({str(ended)!r}).exists():
            time.sleep(0.01)
        if ring.rank() == 1:
            1 / 0
        """
    )
    until(lambda: [engine.state for engine in cluster.status()] == ["idle", "running"])
    ended.touch()
    with pytest.raises(ZeroDivisionError) as caught:
        run.wait()
    shown = "\n".join(caught.value._render_traceback_())  # type: ignore[attr-defined]
    assert "raised on rank 1" in shown
    assert "still running" not in shown
    assert [rank["status"] for rank in run.summary["ranks"]] == ["ok", "failed"]
