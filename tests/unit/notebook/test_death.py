"""Which rank the notebook names when its cluster has died."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from harness.waiting import until
from ring_notebook.analysis.job_failure import RankFailure
from ring_notebook.errors import ClusterError
from ring_notebook.files.rank_logs import cell_begins
from ring_notebook.notebook.cluster.death import explain, explain_failure, tail
from ring_notebook.notebook.cluster.death_watch import LostRanks
from ring_notebook.notebook.cluster.readiness import require_living
from ring_notebook.notebook.engines import Engine, Engines


def test_a_rank_that_others_have_aborted_is_not_named(tmp_path: Path) -> None:
    """Whatever the clocks of two hosts say: the notebook blames as ringrun does."""
    failures = [RankFailure(0, "a", 1, 1.0, aborted=True), RankFailure(3, "b", -9, 2.0)]
    output = "".join(f"\x1e{json.dumps(asdict(failure))}\x1e\n" for failure in failures)
    assert explain("engines", output, tmp_path).rank == 3


def test_the_kernel_has_killed_some_process_of_the_host_maybe_another_one() -> None:
    """Its count is of the machine, and anybody may have killed the rank."""
    killed = "rank 3 on b was killed by SIGKILL, "
    assert explain_failure(RankFailure(3, "b", -9, 2.0, out_of_memory=True)) == f"{killed}probably out of memory"
    assert explain_failure(RankFailure(3, "b", -9, 2.0, out_of_memory=False)) == f"{killed}not out of memory"
    assert "killed by SIGKILL; if nobody sent it," in explain_failure(RankFailure(3, "b", -9, 2.0))


def test_stacks_that_were_asked_for_are_no_part_of_the_log() -> None:
    asked = (
        'Stack (most recent call first):\n  File "<cell of run r>", line 1 in <module>\n  File "x.py", line 2 in f\n'
    )
    native = "Native stack (most recent call first):\n  sleep of /libc.so.6\nEnd of native stack\n"
    crash = "Fatal Python error: Aborted\n\n" + asked
    assert tail("printed\n" + asked + native + "more\n" + asked + native) == "printed\nmore"
    assert "  Cell, line 1 in <module>" in tail(asked + native + crash)


def test_a_host_that_is_lost_is_given_as_the_reason(tmp_path: Path) -> None:
    failure = RankFailure(2, "b", 1, 1.0, reason="its host is lost: it has not answered for 30 s")
    output = f"\x1e{json.dumps(asdict(failure))}\x1e\n"
    expected = "rank 2 on b failed: its host is lost: it has not answered for 30 s, and no other rank is left"
    assert explain("engines", output, tmp_path).reason == expected


def test_a_launcher_that_died_leaves_its_words_without_marks(tmp_path: Path) -> None:
    output = '\x1e{"rank": 0, "ended": false}\x1e\nprterun lost its way\n'
    assert explain("engines", output, tmp_path).log == "prterun lost its way"


def test_the_log_of_a_dead_rank_is_that_of_its_last_cell(tmp_path: Path) -> None:
    """The files have what all cells have written below Python."""
    dead = [RankFailure(0, "a", -9, 1.0)]
    output = "the ranks start\n" + "".join(f"\x1e{json.dumps(asdict(failure))}\x1e\n" for failure in dead)
    assert explain("engines", output, tmp_path).log == "the ranks start"
    for suffix in ("out", "err", "log"):
        (tmp_path / f"rank-0.{suffix}").write_text(f"an earlier cell wrote ä to {suffix}\n")
    cell_begins(tmp_path, 0)
    assert explain("engines", output, tmp_path).log == ""
    with (tmp_path / "rank-0.err").open("a") as file:
        file.write("no memory left\n")
    assert explain("engines", output, tmp_path).log == "no memory left"
    (tmp_path / "rank-0.out").write_text("after > /dev/stdout\n")
    assert explain("engines", output, tmp_path).log == "after > /dev/stdout\nno memory left"


@pytest.mark.parametrize(("dead", "advice"), [((0,), r", `%%ringtrain -t 1` runs on the others"), ((0, 1), "")])
def test_what_still_runs_where_ranks_have_died(dead: tuple[int, ...], advice: str) -> None:
    engines = Engines(None, str, lambda: dict.fromkeys(dead))
    engines.all = [Engine(rank, "here", 1) for rank in range(2)]
    with pytest.raises(ClusterError, match=rf"died; `%ring heal` starts (it|them) again{advice}$"):
        require_living(engines, [0, 1])


def test_a_kernel_that_attaches_counts_no_rank_as_dead_that_was_started_again_on_another_host(tmp_path: Path) -> None:
    """The log still has the report of the process before it. One that was not started again is dead."""
    log = tmp_path / "engines.log"
    report = [f"\x1e{json.dumps(asdict(RankFailure(rank, 'b', -9, 1.0)))}\x1e\n" for rank in range(2)]
    log.write_text("".join(report))
    lost = LostRanks(log, tmp_path)
    try:
        lost.watch([Engine(0, "b", 1, reports=1), Engine(1, "b", 1), Engine(2, "b", 1)])
        until(lambda: 1 in lost.deaths)  # it was not started again
        assert list(lost.deaths) == [1]
        with log.open("a") as file:
            file.write(report[0])
        until(lambda: 0 in lost.deaths)  # a later report is of the present process
        assert 2 not in lost.deaths
        assert all("`%ring heal` starts this one again" in str(death) for death in lost.deaths.values())
        with log.open("a") as file:
            file.write(report[0].replace('"rank": 0', '"rank": 2'))
        until(lambda: 2 in lost.deaths)
        assert all(str(death).endswith("`%ring restart` brings the cluster back.") for death in lost.deaths.values())
    finally:
        lost.close()
