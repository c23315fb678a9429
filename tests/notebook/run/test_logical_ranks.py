"""Cells that train logical ranks."""

from __future__ import annotations

from textwrap import indent

import pytest

from notebook.kernel import Notebook

LOOP = """for x in loader:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    ring.log(loss=loss)
"""
CELL = """%%ringtrain --logical 4 -n RANKS --out run_on_RANKS
import torch

torch.manual_seed(ring.rank())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.arange(96.0).reshape(24, 4) / 96, batch_size=2, shuffle=True)
model, optimizer, loader = ring.prepare(model, optimizer, loader)
"""
CELL += LOOP
COMPARED = """
def rows(run):
    rows = [(row.step, row.values) for row in run.metrics if "loss" in row.values]
    return sorted((values["logical_rank"], step, values["loss"]) for step, values in rows)

assert [row[:2] for row in rows(run_on_1)] == [(rank, step) for rank in range(4) for step in (0, 2, 4)], rows(run_on_1)
assert rows(run_on_1) == rows(run_on_2), (rows(run_on_1), rows(run_on_2))
"""

REPLAY = "print(get_ipython().run_line_magic('ring', f'runs replay {run_on_2.log.run} -n 1') or '')"


LOGGED = """
for ranks, run in (1, run_on_1), (2, run_on_2):
    view = run.view
    who = {name: list(by_rank) for name, by_rank in view.curves.items()}
    assert who == {"loss": [0, 1, 2, 3], "twice": [0, 1, 2, 3], "tested": [*range(ranks)]}, who
    steps = {name: list(view.curves[name][0].x) for name in who}
    assert steps == {"loss": [0, 2, 4], "twice": [1, 3, 5], "tested": [6]}, steps
"""


def test_losses_are_the_same_on_one_rank_and_on_two(notebook: Notebook) -> None:
    """Also in panels, where each logical rank has a curve, whatever else a turn or the loop logs."""
    cell = CELL + "    ring.log(twice=2 * loss)\nring.log(tested=1.0)\n"
    for ranks in ("1", "2"):
        said = notebook.text(cell.replace("RANKS", ranks))
        assert f"4 logical ranks on {ranks}" in said, said
        rows = [line.split()[:2] for line in said.splitlines() if line.lstrip().startswith("logical")]
        assert rows == [["logical", str(rank)] for rank in range(4)], said
    notebook.text(COMPARED)
    notebook.text(LOGGED)
    said = notebook.text("%%ringtrain --logical 4\nring.log(loss=1.0)")
    assert "--logical 4 had no effect: the cell has not called ring.prepare" in said


@pytest.mark.slow
def test_a_record_is_run_again_on_one_rank_and_compared(notebook: Notebook) -> None:
    cell = CELL.replace("RANKS", "2")
    notebook.text(cell)
    said = notebook.text(REPLAY)
    assert "Equal bit by bit: the gradients of 3 steps.\nEqual bit by bit: 12 values of loss" in said, said
    notebook.text(cell.replace("lr=0.1", "lr=0.1 + (ring.size() == 1) * 1e-3"))
    said = "".join(one.get("text", "") for one in notebook.run(REPLAY))
    assert (
        "Not equal: the gradient of 0.weight, 0.bias, 2.weight and 1 more differs first at step 1: logical ranks"
        in said
    ), said
    assert "Not equal: loss differs first at step 1 of rank 0" in said, said
    assert (
        "ran on 2 ranks with 4 logical ranks, too few for 5 ranks" in notebook.error(REPLAY.replace("-n 1", "-n 5"))[1]
    )
    in_code = cell.replace(" --logical 4", "").replace("loader)\nfor", "loader, logical=4)\nfor")
    assert in_code.count("logical") == 1
    notebook.text(in_code)
    assert "Equal bit by bit: 12 values of loss" in notebook.text(REPLAY)
    notebook.text("%%ringtrain --out plain\nring.log(loss=1.0)")
    assert "ran on 2 ranks without logical ranks" in notebook.error(REPLAY.replace("run_on_2", "plain"))[1]


BUG = """    if ring.size() == 1 and ring.logical_rank() == 2 and number // 4 == 1:
        loss = loss + 1e-3 * model[2].bias.sum()
    loss.backward()
"""


def test_a_replay_stops_where_a_gradient_differs(notebook: Notebook) -> None:
    notebook.text(
        CELL.replace("RANKS", "2")
        .replace("for x in loader:", "for number, x in enumerate(loader):")
        .replace("    loss.backward()\n", BUG)
    )
    asked, said, reply = notebook.talk(
        REPLAY.replace("-n 1", "-n 1 --until 1"), "p number, ring.logical_rank()", "l", "c"
    )
    assert reply["status"] == "ok", reply
    assert asked == ["rank 0 (Pdb) "] * 3
    assert all(one in said for one in ("(4, 0)\n", "> Cell(10)<module>()", "->\t    optimizer.zero_grad()")), said
    assert (
        "Not equal: the gradient of 2.bias differs first at step 1: logical rank 2 computed other gradients." in said
    ), said
    assert "Not equal: loss differs first at step 1 of rank 2:" in said, said
    assert "Equal bit by bit" not in said, said
    assert "-> loss.backward()" in notebook.text("%ring debug -c w")
    said = notebook.text(REPLAY.replace("-n 1", "-n 2"))
    assert "Equal bit by bit: the gradients of 3 steps.\nEqual bit by bit: 12 values of loss" in said, said
    assert "Not stopped: logical ranks have made 3 steps" in notebook.text(REPLAY.replace("-n 1", "-n 2 --until 3"))


def test_sizes_are_compared_at_equal_results(notebook: Notebook) -> None:
    body = CELL.partition("\n")[2].replace("ring.log(loss=loss)", "ring.log(loss=loss, samples=len(x))")
    said = notebook.text(f"%%ringscale --logical 4 1,2\n{body}")
    assert "Equal bit by bit: 12 values of loss, 12 values of samples." in said, said
    assert (
        "--logical: expected at least 2, the greatest size, got 1"
        in notebook.error(f"%%ringscale 1,2 --logical 1\n{body}")[1]
    )


OF_ITS_OWN = CELL.replace(
    """torch.nn.Linear(4, 8), torch.nn.Dropout(0.5)""",
    """torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)""",
).replace("import torch", "import random, numpy, torch")
NOISY = LOOP.replace("model(x)", "model(x + random.random() + numpy.random.rand() * torch.rand(()))")
OF_ITS_OWN = OF_ITS_OWN.replace(LOOP, NOISY)
AGAIN = f"""%%ringtrain -n RANKS --out NAME
for _ in range(2):
{indent(NOISY, "    ")}print(ring.logical_rank(), *(list(one.flatten().tolist() for one in model.buffers())))
"""
EQUAL = """
def rows(run):
    return sorted((row.values["logical_rank"], row.step, row.values["loss"]) for row in run.metrics)

assert len(rows(there)) == LENGTH and len({row[2] for row in rows(there)}) == LENGTH, rows(there)
assert rows(there) == rows(here), (rows(there), rows(here))
"""


@pytest.mark.slow  # restores
def test_a_snapshot_goes_on_with_the_same_bits_on_another_number_of_ranks(notebook: Notebook) -> None:
    notebook.text(OF_ITS_OWN.replace("RANKS", "2"))
    assert "Not in it" not in notebook.text("%ring snapshots save logical")
    notebook.text(AGAIN.replace("RANKS", "2").replace("NAME", "there"))
    for ranks in ("2", "1", "3"):
        notebook.text(f"%ring snapshots restore logical -n {ranks}")
        notebook.text(AGAIN.replace("RANKS", ranks).replace("NAME", "here"))
        notebook.text(EQUAL.replace("LENGTH", "24"))
    for ranks in ("2", "3"):  # of a cluster that is larger or smaller than when its first ranks began
        notebook.text(f"%ring resize {ranks}\n%ring snapshots restore logical")
        notebook.text(AGAIN.replace("RANKS", ranks).replace("NAME", "here"))
        notebook.text(EQUAL.replace("LENGTH", "24"))
    notebook.text("%ring snapshots restore logical -n 2")
    again = "model, optimizer, loader = ring.prepare(model, optimizer, loader, logical=4)\n"
    prepared = AGAIN.replace("for _", f"{again}for _", 1)
    notebook.text(prepared.replace("RANKS", "2").replace("NAME", "there"))
    notebook.text("%ring snapshots restore logical -n 1")
    notebook.text(prepared.replace("RANKS", "1").replace("NAME", "here"))
    notebook.text(EQUAL.replace("LENGTH", "24"))
    notebook.text("%ring snapshots restore logical -n 2")


OF_PASSES = f"""for epoch in range(BEGIN, 3):
{indent(NOISY, "    ")}        while epoch == 1 and not pathlib.Path("go").exists():
            time.sleep(0.01)
"""
MIDST = OF_ITS_OWN.replace(NOISY, OF_PASSES.replace("BEGIN", "0")).replace(
    "import random", "import pathlib, time, random"
)
ASKS = """import pathlib, time, threading
while len(there.metrics) < 14: time.sleep(0.01)
get_ipython().run_line_magic("ring", "snapshots save mid")
(teller,) = [one for one in threading.enumerate() if one.name == "ring-kept"]
pathlib.Path("go").touch()
there.wait(); teller.join()
"""
FROM_THERE = """
def rows(run, first):
    found = [row for row in run.metrics if row.step >= first]
    return sorted((row.values["logical_rank"], row.step - first, row.values["loss"]) for row in found)

assert len(rows(there, 4)) == 20, rows(there, 0)
assert rows(there, 4) == rows(here, FIRST), (rows(there, 4), rows(here, FIRST))
"""


@pytest.mark.slow  # restores
def test_a_snapshot_in_the_middle_of_a_pass_goes_on_and_branches(notebook: Notebook) -> None:
    cell = MIDST.replace("RANKS", "2").replace("--out run_on_2", "--out there --name mid --background")
    notebook.text(cell)
    notebook.text(ASKS)
    notebook.text("%ring snapshots branch mid --name fork --out here")
    notebook.text(FROM_THERE.replace("FIRST", "4"))
    for ranks in ("1", "2"):
        notebook.text(f"%ring snapshots restore mid -n {ranks}")
        notebook.text(f"%%ringtrain --out here\n{OF_PASSES.replace('BEGIN', '1')}")
        notebook.text(FROM_THERE.replace("FIRST", "0"))
    notebook.text("pathlib.Path('go').unlink()")


CONTINUES = CELL.replace(
    "loader)\nfor x in loader:",
    """loader)
saved = ring.checkpoint(model, optimizer, loader, every="1 steps")
for x in (x for _ in saved.epochs(4) for x in loader):""",
).replace(
    "    ring.log(loss=loss)",
    """    ring.log(loss=loss)
    saved.step()
    if saved.steps == 7 and ring.rank() == 1 and not again:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)""",
)
LAST = """
def last(run):
    return sorted((row.step, row.values["logical_rank"], row.values["loss"]) for row in run.metrics if row.step > 8)

assert len(last(run_on_1)) == 12 and last(run_on_1) == last(run_on_2), (last(run_on_1), last(run_on_2))
"""


@pytest.mark.slow  # heals
def test_a_training_whose_rank_has_died_goes_on_with_the_same_bits(notebook: Notebook) -> None:
    cell = CONTINUES.replace("RANKS", "1").replace("import torch", "import torch; again = True", 1)
    notebook.text(cell)
    cell = CONTINUES.replace("RANKS", "2")
    notebook.text("%%ringtrain\nagain = False")
    assert "rank 1" in notebook.error(cell)[1]
    notebook.text("%ring heal")
    notebook.text("%%ringtrain\nagain = True")
    assert "Resumed after step 7" in notebook.text(cell.replace("%%ringtrain", "%%ringtrain --resume"))
    notebook.text(LAST)
