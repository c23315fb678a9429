"""Runs of a laboratory: limits, conditions, verdicts as data, branches, and what others see of them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from harness.waiting import until
from notebook.kernel import Notebook
from ring_notebook import Lab
from ring_notebook.errors import ClusterError, RingError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.lab import handle
from ring_notebook.notebook.lab.answers import MOST_LINES, Answer, schema
from ring_notebook.notebook.lab.conditions import Condition
from ring_notebook.notebook.lab.handle import PERSON
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.run import catalogue
from ring_notebook.notebook.session.session import Session

ROOT = Path(__file__).parents[3]
TRAINING = """
import time, torch
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.Generator().manual_seed(ring.rank())
step = 0
while step < 5000:
    x = torch.randn(16, 8, generator=data)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    ring.log(loss=loss, samples=16)
    step += 1
    time.sleep(0.002)
"""
LOGGING = """
import time
from ring_notebook.api.common import log
for step in range(100000):
    log(loss=LOSS, samples=10)
    time.sleep(0.002)
"""
FAILS = """
import torch
total = torch.zeros(4)
if ring.rank() == 1:
    raise ValueError("bad batch")
ring.allreduce(total, name="total")
"""


@pytest.fixture
def lab(cluster: Cluster) -> Iterator[Lab]:
    session = Session(tell=lambda _: None)
    session.cluster = cluster
    made = Lab(session)
    yield made
    session.waiting.cancel()
    for run in session.in_progress:
        run.stop(30)


def sound(answer: Answer) -> dict[str, object]:
    """The JSON form, which its schema describes; the text is short."""
    found = answer.json()
    json.dumps(found, allow_nan=False)
    jsonschema.validate(found, schema(type(answer)))
    assert len(answer.text().splitlines()) <= MOST_LINES
    return found


def test_a_limit_of_steps_keeps_the_variables_and_branches_continue_from_there(lab: Lab) -> None:

    run = lab.run(TRAINING, steps=20, keep=True, name="base")
    assert lab.status().rows[0][3] == "base"
    waited = run.wait(timeout=60)
    assert waited.reached
    verdict = run.verdict()
    assert (verdict.status, verdict.ended_by) == ("interrupted", "its limit of 20 steps")
    assert verdict.step == 18  # of the rows from 0 on: the loop logs behind the step, where it stopped
    assert sound(waited)["reached"] is True
    branches = run.branch([{"lr": 0.05}, {"lr": 0.001}, {"lr": 0.1}], steps=30)
    assert [one.wait(timeout=90).verdict.ended_by for one in branches] == ["its limit of 30 steps"] * 3
    assert [one.run.knobs["lr"] for one in branches if one.run] == [0.05, 0.001, 0.1]
    listed = catalogue.listing()
    rows = {row[0]: dict(zip(listed.columns, row, strict=True)) for row in listed.rows}
    named = [rows[one.name] for one in (run, *branches)]
    assert [row["lr"] for row in named] == ["0.01", "0.05", "0.001", "0.1"], named
    assert len({row["optimizer"] for row in named} | {verdict.params["optimizer"]}) == 1, named
    (curve,) = branches[0].curves("loss", points=5).curves.values()
    assert curve.steps[0] > 20
    assert len(curve.values) == 5
    assert curve.steps[-1] <= 51
    sound(branches[0].curves("loss"))
    assert re.fullmatch("base@20 lr=0.05", branches[0].name)
    compared = lab.compare(*branches)
    assert compared.text().count("marks text of ranks") == 1
    settings = {row[0]: row[1:] for row in compared.differs.rows}
    assert settings["lr"] == tuple(f"0.01, then {lr} from step 20" for lr in (0.05, 0.001, 0.1))
    sound(compared)
    best = [one.verdict().metrics["loss"].last for one in branches if one.verdict().metrics]
    assert best[2] < best[0] < best[1], best


def test_branches_run_side_by_side_on_parts_of_the_cluster(lab: Lab) -> None:
    run = lab.run(TRAINING.replace("ring.log(", "ring.log(draw=torch.rand(1).item(), "), n=1, steps=10, keep=True)
    run.wait(timeout=60)
    (alone,) = run.branch([{"lr": 0.02}], steps=5, side_by_side=False)
    alone.wait(timeout=60)
    one, other, third = run.branch([{"lr": 0.05}, {"lr": 0.001}, {"lr": 0.1}], steps=150)
    until(lambda: one.run is not None and other.run is not None)
    assert one.run is not None
    assert other.run is not None
    assert (one.run.ranks, other.run.ranks) == ({0}, {1})
    assert third.status == "waiting"
    assert "base" not in third.verdict().waits_for
    assert [each.wait(timeout=60).verdict.ended_by for each in (one, other, third)] == ["its limit of 150 steps"] * 3
    assert alone.run is not None
    assert alone.run.ranks == {0}  # as many as the run had
    draws = [[row.values["draw"] for row in each.run.metrics][:4] for each in (alone, one, other) if each.run]
    assert draws[0] == draws[1] == draws[2]


def test_the_verdict_on_a_failure_names_rank_line_operation_and_the_others(lab: Lab) -> None:
    run = lab.run(FAILS)
    assert run.wait(timeout=60).why == "the run has ended: failed"
    verdict = run.verdict()
    assert verdict.error is not None
    assert (verdict.error.type, verdict.error.ranks, verdict.error.line) == ("ValueError", (1,), 5)
    assert verdict.error.message.from_ranks == "bad batch"
    assert "raise ValueError" in verdict.error.code.from_ranks
    assert "allreduce" in verdict.operation.from_ranks, verdict
    assert any(one.from_ranks.startswith("rank 0: line 6") for one in verdict.others), verdict.others
    sound(verdict)
    assert "error: ValueError on rank 1, line 5" in verdict.text()
    assert "allreduce" in run.trace().text() or "part" in run.trace().text()
    sound(run.trace())
    found = lab.find(verdict.run).verdict()
    assert found.error == verdict.error


CONDITIONS = [  # what is logged, what is waited for, and how the reason begins
    ("1 / (1 + step)", "loss < 0.1", "loss is 0.0"),
    ("abs(step - 50)", "loss has not improved for 30 steps", "loss has not improved since step 5"),
    ("float('nan') if step == 40 else 1.0", "NaN", "loss is NaN on rank"),
    ("float(step)", "step 60", "step "),
]


def test_conditions_end_a_wait_and_not_the_run(lab: Lab) -> None:
    for loss, condition, why in CONDITIONS:
        run = lab.run(LOGGING.replace("LOSS", loss))
        waited = run.wait(condition, timeout=60)
        assert waited.reached
        assert waited.why.startswith(why), waited.why
        assert not run.done
        assert run.stop(30)
        assert run.ended_by == "Lab"


def test_a_verdict_is_of_the_moment_at_which_its_condition_held(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is slow at one moment may not be so at the next, as statuses of ranks come in."""
    seen: list[int] = []

    def holds(view: RunView) -> str:
        seen.append(min(rank.step for rank in view.ranks))
        time.sleep(1.0)
        return "it held"

    monkeypatch.setattr(handle, "condition", lambda text: Condition(text, holds))
    run = lab.run(LOGGING.replace("LOSS", "1.0"))
    assert run.wait(timeout=60).verdict.step == seen[0]
    assert run.verdict().step > seen[0]
    run.stop(30)


def test_limits_of_samples_and_seconds(lab: Lab) -> None:
    run = lab.run(LOGGING.replace("LOSS", "1.0"), samples=500)
    assert run.wait(timeout=30).verdict.ended_by == "its limit of 500 samples"
    run = lab.run(LOGGING.replace("LOSS", "1.0"), seconds=0.5)
    assert run.wait(timeout=30).verdict.ended_by == "its limit of 0.5 s"
    run = lab.run(LOGGING.replace("LOSS", "1.0"), steps=50)
    assert run.wait(timeout=30).verdict.ended_by == "its limit of 50 steps"
    with pytest.raises(RingError, match="keep needs a limit of steps"):
        lab.run("pass", keep=True)


def test_runs_wait_for_one_another_and_can_be_cancelled(lab: Lab) -> None:
    long = lab.run(LOGGING.replace("LOSS", "1.0"), name="long")
    behind, never = lab.run("print('after')", name="behind"), lab.run("print('never')", name="never")
    assert behind.verdict().status == "waiting"
    assert behind.verdict().waits_for == "run long"
    assert [row[0] for row in lab.queue().rows] == ["behind", "never"]
    assert "waits for run long" in behind.verdict().text()
    never.stop()
    assert not behind.wait(timeout=0.2).reached
    long.stop()
    assert behind.wait(timeout=30).verdict.status == "ok"
    assert behind.output().text_of_ranks == ("[0-1] after",)
    until(lambda: never.status == "cancelled")
    sound(never.verdict())
    with pytest.raises(RingError, match="has not begun: cancelled"):
        never.output()


def test_a_person_s_stop_ends_a_run_and_the_branches_behind_it(lab: Lab) -> None:
    run = lab.run(TRAINING, steps=5, keep=True)
    run.wait(timeout=60)
    first, second = run.branch([{"lr": 0.1}, {"lr": 0.2}])
    first.wait("step 8", timeout=60)
    assert first.run is not None
    first.run.interrupt()  # as the Stop button does
    assert first.wait(timeout=30).verdict.ended_by == PERSON
    until(lambda: second.status == "cancelled")
    assert "a person stopped" in second.verdict().reason.from_ranks


def test_knobs_pauses_and_snapshots(lab: Lab) -> None:
    run = lab.run(TRAINING)
    run.wait("step 3", timeout=60)
    assert run.set(lr=0.5).text() == "lr = 0.5 from the next step on"
    until(lambda: (run.verdict().knobs or {})["lr"] == 0.5)
    run.pause()
    until(lambda: run.verdict().status == "paused")
    name = run.snapshot("by hand")
    assert name == "by hand"
    run.resume()
    with pytest.raises(RingError, match="is in progress"):
        run.branch([{"lr": 0.1}])
    run.stop()
    with pytest.raises(RingError, match=r"no snapshot of .* at step 7000"):
        run.branch([{}], at=7000)
    assert any("Lab" in one.who for one in (run.run.changes if run.run else []))


def test_stacks_runs_and_what_is_not_there(lab: Lab) -> None:
    run = lab.run("import time\nwhile True: time.sleep(0.01)", name="sleeper")
    until(lambda: "time.sleep" in lab.stacks().text())
    sound(lab.stacks())
    run.stop()
    names = [row[0] for row in lab.runs().rows]
    assert names[0] == "sleeper"
    sound(lab.runs())
    with pytest.raises(RingError, match="no run 'nobody'"):
        lab.find("nobody")
    with pytest.raises(RingError, match="'soon' is no condition; expected one of: end, step 500"):
        run.wait("soon")
    with pytest.raises(ClusterError, match="expected 1 to 2 ranks"):
        lab.run("pass", n=9)
    with pytest.raises(RingError, match="Cell, line 1"):
        lab.run("x = = 1")


@pytest.mark.slow
def test_the_program_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    cell = TRAINING.replace("ring.log(loss", "ring.log(val_loss=loss * 0 + step % 7, epoch=step // 20, loss")
    exec(program, {"cell": cell})
    said = capsys.readouterr().out
    assert re.search(r"differs: lr; .* 0.3 from step 200; .* 0.1 from step 200; .* 0.03 from step 200", said), said
    assert "ended by Lab" in said


def test_a_laboratory_starts_and_ends_its_cluster() -> None:
    began = time.monotonic()
    with Lab.start(n=1) as lab:
        cluster = lab.cluster
        assert lab.run("print(6 * 7)").wait(timeout=60).verdict.output[0].from_ranks == "[0] 42"
    assert not cluster.running
    assert lab.status().note == "there is no cluster"
    assert time.monotonic() - began < 100


def test_a_rank_that_was_healed_runs_the_set_up_cells(lab: Lab) -> None:
    assert lab.run("value = 5", setup=True).wait(timeout=60).verdict.status == "ok"
    died = "import os, signal\nif ring.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\nring.barrier()"
    assert lab.run(died).wait(timeout=60).verdict.status == "failed"
    assert "Ran 1 set-up cell on rank 1." in lab.heal().text()
    assert lab.run("assert value == 5").wait(timeout=60).verdict.status == "ok"


def test_a_laboratory_of_a_notebook_shares_its_cluster_and_queue(notebook: Notebook) -> None:
    """A cell waits for a run of the laboratory, as for a cell; the cluster stays when the laboratory is closed."""
    begin = """
from ring_notebook import Lab
with Lab.attach() as lab:
    slow = lab.run("import time; time.sleep(3); print('first')", name="of-lab")
print(slow.status)
"""
    assert notebook.text(begin) == "running\n"
    notebook.text("%%ringtrain\nprint('second')")
    assert notebook.text("print(slow.status, slow.output())").startswith("ok ")
    newest = "with Lab.attach() as lab:\n    print(lab.find().output())"
    assert "second" in notebook.text(newest), "a later run of the notebook"
    after = notebook.text("%ring runs --all")
    assert after.index("of-lab") > 0
