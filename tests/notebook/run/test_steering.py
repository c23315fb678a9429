"""Knobs change on all ranks at the same step; a pause stops all ranks there; a replay gives the same numbers."""

from __future__ import annotations

import os
import random
import re
import time
from collections import defaultdict
from pathlib import Path

import pytest

from harness.waiting import LIMIT, until
from notebook.kernel import Notebook
from ring_notebook.errors import ClusterError, KnobError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.run import Run
from ring_notebook.protocol.records import PAUSE, RESUME, SET, Change

LOOP = """
import time
from ring_notebook.api.common import knob, log, step
rate = knob("rate", 0.5, low=0.001, high=1)
turns, mode, on = knob("turns", 3), knob("mode", "slow", choices=["slow", "fast"]), knob("on", False)
end = knob("end", False)
while not end:
    log(rate=rate, double=2 * rate)
    step()
    time.sleep(0.001)
"""
TRAINING = """
import torch
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
model, optimizer = ring.prepare(model, optimizer)
data = torch.Generator().manual_seed(ring.rank())
noise = ring.knob("noise", 0.0, low=0, high=1)
for step in range(STEPS):
    x = torch.randn(16, 8, generator=data)
    loss = ((model(x) - x.sum(1, keepdim=True) - noise) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
    ring.log(loss=loss)
    WAIT
result = [p.detach().clone() for p in model.parameters()]
"""


def by_number(run: Run) -> dict[int, list[Change]]:
    """The changes of a run as all its ranks took them."""
    found = defaultdict(list)
    for one in run.log.changes():
        found[one.number].append(one)
    return found


def knobs_of(run: Run, name: str) -> None:
    until(lambda: name in run.knobs)


def test_all_ranks_take_a_change_at_the_same_step(cluster: Cluster) -> None:
    run = cluster.run(LOOP)
    knobs_of(run, "end")
    assert run.set(rate=0.25, turns=5, mode="fast", on=True) == {"rate": 0.25, "turns": 5, "mode": "fast", "on": True}
    until(lambda: len(run.changes) == 1)
    assert run.knobs == {"rate": 0.25, "turns": 5, "mode": "fast", "on": True, "end": False}
    for wrong, said in {
        "rat": "no knob 'rat'; did you mean rate",
        "rate": "takes numbers from 0.001 to 1",
        "turns": "takes whole numbers",
        "mode": "takes one of slow, fast",
        "on": "takes True or False",
    }.items():
        with pytest.raises(KnobError, match=said):
            run.set(**{wrong: 2.5})
    run.set(end=True)
    run.wait()
    changes = by_number(run)
    assert {number: len({one.point for one in each}) for number, each in changes.items()} == {1: 1, 2: 1}
    assert [len(each) for each in changes.values()] == [2, 2]
    assert all("run.set" in one.who and one.action == "set" for one in run.changes)
    # The rows of both ranks change their values after the same step.
    first = [one for one in run.metrics if one.values["double"] == 0.5]
    assert {row.values["rate"] for row in first} == {0.25}
    assert len({min(row.step for row in first if row.rank == rank) for rank in (0, 1)}) == 1
    assert run.state()["knobs"]["rate"] == 0.25
    assert run.state()["changes"][0]["values"]["mode"] == "fast"
    with pytest.raises(KnobError, match="has ended"):
        run.set(rate=1)


def test_a_run_that_is_paused_waits_and_is_not_stuck(cluster: Cluster) -> None:
    run = cluster.run(LOOP, timeout=30)
    knobs_of(run, "end")
    until(lambda: len(run.metrics) > 0)
    run.pause()
    until(lambda: run.view.paused and bool(run.changes))
    until(lambda: run.metrics[-1].step >= run.changes[0].step - 1)  # rows arrive later than the pause is told
    steps, spent = run.metrics[-1].step, [_processor(engine.pid) for engine in cluster.status()]
    time.sleep(1.0)
    assert [_processor(engine.pid) - before < 0.3 for engine, before in zip(cluster.status(), spent, strict=True)] == [
        True,
        True,
    ]
    assert run.metrics[-1].step - steps <= 1
    assert not run.view.stuck(0.1)
    assert run._watch.held
    run.set(rate=0.125)
    run.resume()
    until(lambda: len(run.changes) == 3)
    assert [one.action for one in run.changes] == ["pause", "set", "resume"]
    assert len({one.point for one in run.changes}) == 1, "what is set in a pause counts from the step behind it"
    until(lambda: not run.view.paused)
    run.pause()
    until(lambda: run.view.paused)
    assert run.stop()
    assert run.status == "interrupted"
    assert cluster.run(LOOP + "\nraise SystemExit").stop()


def test_knobs_of_an_optimizer_that_is_gone_keep_their_values(cluster: Cluster) -> None:
    """The function that trains has returned, and the run still says what it was set to."""
    run = cluster.run(
        """
def train():
    model = torch.nn.Linear(4, 1)
    model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=30.0))
    while float(optimizer.param_groups[0]["lr"]) == 30.0:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    time.sleep(1.5)  # a status, while there is the optimizer
import time, torch
train()
import gc; gc.collect()
time.sleep(1.5)
""",
        timeout=60,
    )
    until(lambda: "lr" in run.knobs)
    run.set(lr=0.5)
    run.wait()
    assert run.knobs["lr"] == 0.5


@pytest.mark.slow
def test_a_rank_that_dies_ends_a_pause(cluster: Cluster) -> None:
    run = cluster.run(LOOP)
    knobs_of(run, "end")
    run.pause()
    until(lambda: run.view.paused)
    os.kill(cluster.status()[1].pid, 9)
    with pytest.raises(ClusterError, match="rank 1"):
        run.wait()
    cluster.heal()


@pytest.mark.slow
def test_a_replay_gives_the_same_numbers(cluster: Cluster) -> None:
    """Of the optimizer's knobs with a schedule, and of one that the loss has; bit for bit."""
    run = cluster.run(TRAINING.replace("STEPS", "400").replace("WAIT", "import time; time.sleep(0.002)"), name="live")
    until(lambda: "noise" in run.knobs or run.done)
    assert not run.done, run.error
    assert {"lr", "weight_decay", "momentum", "noise"} <= run.knobs.keys()
    for values in ({"lr": 0.05}, {"noise": 0.5, "momentum": 0.5}, {"lr": 0.001, "weight_decay": 0.1}):
        before = len(run.changes)
        run.set(**values)
        until(lambda before=before: len(run.changes) > before)
    run.wait()
    losses = [row.values["loss"] for row in run.metrics if row.rank == 1]
    weights = cluster.pull("result", 1)
    again = cluster.run(TRAINING.replace("STEPS", "400").replace("WAIT", ""), options={"replay": "live"}).wait()
    assert [(one.point, one.values) for one in again.changes] == [(one.point, one.values) for one in run.changes]
    assert {one.who for one in again.changes} == {"replay of live"}
    assert [row.values["loss"] for row in again.metrics if row.rank == 1] == losses
    assert all((one == other).all() for one, other in zip(weights, cluster.pull("result", 1), strict=True))
    other = cluster.run(TRAINING.replace("STEPS", "400").replace("WAIT", "")).wait()
    assert [row.values["loss"] for row in other.metrics if row.rank == 1] != losses
    with pytest.raises(KnobError, match="nothing to replay"):
        cluster.run("pass", options={"replay": other.log.name})


def test_a_run_pauses_at_the_steps_that_it_was_given(cluster: Cluster) -> None:
    """However late somebody comes: behind them it takes what was set, and a replay of it does not pause."""
    loop = LOOP.replace("while not end:", "for _ in range(30):")
    run = cluster.run(loop, options={"pause_at": [20, 10]}, name="stops")
    for point, values in ((10, {"rate": 0.75}), (20, {"rate": 0.25})):
        until(lambda point=point: run.view.paused and run.view.ranks[0].step == point - 1)
        run.set(**values)
        run.resume()
    run.wait()
    assert [(one.action, one.point, one.who.endswith("--pause-at")) for one in run.changes if one.action != SET] == [
        (PAUSE, 10, True),
        (RESUME, 10, False),
        (PAUSE, 20, True),
        (RESUME, 20, False),
    ]
    assert [one.step for one in run.changes if one.action == SET] == [10, 20], "the first with the new value"
    rates = [row.values["rate"] for row in run.metrics if row.rank == 1]
    assert rates == [0.5] * 10 + [0.75] * 10 + [0.25] * 10
    again = cluster.run(loop, options={"replay": "stops"}).wait()
    assert [row.values["rate"] for row in again.metrics if row.rank == 1] == rates


def test_the_magics_set_list_and_pause(notebook: Notebook) -> None:
    notebook.run("%%ringtrain --background --out run --name steered\n" + LOOP)
    until(lambda: "rate" in notebook.text("%ring set"))
    said = notebook.text("%ring set rate=0.75 mode=fast")
    assert "rate = 0.75, mode = fast from the next step of all ranks of run steered on" in said
    until(lambda: "step" in notebook.text("%ring set"))
    assert re.search(r"rate +0.75 +numbers from 0.001 to 1 +.*%ring set, step \d+", notebook.text("%ring set"))
    assert "did you mean rate" in notebook.error("%ring set rat=1")[1]
    assert "no run 'other' is in progress: steered" in notebook.error("%ring set other rate=1")[1]
    assert "pauses" in notebook.text("%ring pause")
    until(lambda: notebook.text("print(run.view.paused)") == "True\n")
    assert "continues" in notebook.text("%ring resume")
    notebook.text("%ring set end=yes\nrun.wait()")
    assert (
        "no run is in progress: one without --background blocks the notebook while it runs"
        in notebook.error("%ring pause")[1]
    )
    notebook.text("%%ringtrain --replay steered --timeout 60\n" + LOOP)


def _processor(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_random_changes_are_taken_at_one_step_everywhere(cluster: Cluster) -> None:
    """Changes of a random knob at random moments, some in bursts: each is taken at one step everywhere, in order."""
    draw, changes = random.Random(0), 200
    run = cluster.run(LOOP)
    knobs_of(run, "end")
    for _ in range(changes):
        run.set(
            **draw.choice(
                [{"rate": draw.uniform(0.001, 1)}, {"turns": draw.randrange(100)}, {"on": draw.random() < 0.5}]
            )
        )
        if draw.random() < 0.3:
            time.sleep(draw.uniform(0, 0.01))
    run.set(end=True)
    run.wait()
    found = by_number(run)
    assert list(found) == list(range(1, changes + 2))
    assert all(sorted(one.rank for one in each) == list(range(cluster.n)) for each in found.values())
    assert all(len({(one.point, str(one.values)) for one in each}) == 1 for each in found.values())
    assert not run.view.parted


def test_a_knob_that_comes_before_the_first_step_is_waited_for(cluster: Cluster) -> None:
    cell = """
import time
from ring_notebook.api.common import knob, step
first = knob("first", 0.0)
time.sleep(0.5)
late = knob("late", 0.0)
while not late.value:
    step()
"""
    run = cluster.run(cell)
    assert run.set(late=1) == {"late": 1.0}
    run.wait()
    assert run.status == "ok"


def test_a_change_of_a_run_without_steps_says_what_makes_them(cluster: Cluster) -> None:
    """Its loop logs, and has neither an optimizer that is prepared nor calls of `ring.step`."""
    run = cluster.run("import time\nring.knob('a', 1.0)\nwhile True: time.sleep(0.1); ring.log(x=1)")
    run.set(a=2.0)
    run.stop(LIMIT)
    said = "".join(one.text for one in run.view.output)
    assert "The run ended without a step of all ranks (an optimizer of `ring.prepare` makes them" in said
    assert "not taken are a=2.0" in said
