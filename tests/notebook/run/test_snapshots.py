"""Snapshots: variables brought back bit for bit, on other ranks, by another kernel; what is left out is told."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from notebook.kernel import Notebook
from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.cluster.snapshots import listing

FSDP = """import torch
model = torch.nn.Linear(4, 4)
model, optimizer = ring.prepare(model, torch.optim.Adam(model.parameters()), strategy="fsdp")
other = 3
"""
MODULE = """import sys
sys.path.insert(0, FOLDER)
import of_the_user
thing = of_the_user.Thing()
"""
MAKE = """%%ringtrain --setup
import random
import torch

torch.manual_seed(5 + ring.rank())
random.seed(ring.rank())
inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(5))
data = torch.utils.data.TensorDataset(inputs, inputs[:, :2])


def net():
    return torch.nn.Sequential(torch.nn.Linear(6, 200), torch.nn.Dropout(0.4), torch.nn.Linear(200, 2))


def loader(workers):
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)


first, second, third = net(), net(), net()
first, sgd, shuffled = ring.prepare(first, torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9), loader(0))
second, adam = ring.prepare(second, torch.optim.Adam(second.parameters(), lr=0.01))
local_steps = {"sync_every": ring.LocalSteps(3, fragments=2), "compression": ring.Compression.int8}
third, local = ring.prepare(third, torch.optim.SGD(third.parameters(), lr=0.05, momentum=0.9), **local_steps)
view = inputs[3:]
sees = [first, sgd]
def train():
    losses = []
    for x, y in shuffled:
        for model, optimizer in (first, sgd), (second, adam), (third, local):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    losses.append(random.random())
    return losses
losses = train()
"""
TRAIN = "%%ringtrain\nlosses = train()"
PULL = "both = [get_ipython().run_line_magic('ring', f'pull losses -t {rank}') and losses for rank in range(2)]"

SHARED = """%%ringtrain
assert sees[0] is first and sees[1] is sgd and 'later' not in globals()
assert sgd.param_groups[0]['params'][0] is first[0].weight
inputs[3, 0] = 7
assert view[0, 0] == 7
"""
UNKEEPABLE = """%%ringtrain
import threading
file = open('/etc/hostname')
holder = {'file': [file]}
again = kept = [1, 2]
draws = (n for n in kept)
if ring.rank() == 1:
    thread = threading.Thread()
"""
SHARED_ANEW = """%%ringtrain
losses = train()
draw = random.random()
draws = ring.allgather_object(draw)
assert len(losses) == 13 and len(set(draws)) == 3, (draws, draw, losses[-1])
step = adam.state_dict()['state'][0]['step']
assert step == 10, step
"""
MOMENT = "%%ringtrain\nmoment = [one['exp_avg'].tolist() for one in adam.state_dict()['state'].values()]"


@pytest.fixture(scope="module", autouse=True)
def before(notebook: Notebook) -> None:
    """The snapshot "before"; `trained` in the kernel has the losses of both ranks that trained on from it."""
    notebook.text(MAKE)
    text = notebook.text("%ring snapshots save before")
    assert re.search(r"Kept \d+ variables of 2 ranks as before: \d+\.\d [KM]iB in \d+\.\d s", text), text
    assert "Left out" not in text
    notebook.text(TRAIN)
    notebook.text(f"{PULL}\ntrained = both")


@pytest.mark.slow
def test_curves_continue_bit_for_bit_here_and_in_a_new_cluster(notebook: Notebook) -> None:
    notebook.text("%%ringtrain\nlater = 3\nfirst = None")
    assert "Restored" in notebook.text("%ring snapshots restore before")
    notebook.text(TRAIN)
    notebook.text(f"{PULL}\nassert both == trained and both[0] != both[1], (both, trained)")
    notebook.text(SHARED)
    notebook.text("%ring restart")
    notebook.text("%ring snapshots restore before")
    notebook.text(TRAIN)
    notebook.text(f"{PULL}\nassert both == trained, (both, trained)")
    assert "Ran 1 set-up cell again" in notebook.text("%ring restart --rerun")
    listed = notebook.text("%ring snapshots")
    assert re.search(r"^before +\d\d \w+ \d\d:\d\d +2 ", listed, re.MULTILINE), listed


def test_equal_memory_of_ranks_and_of_snapshots_is_on_disk_once(cluster: Cluster) -> None:
    cluster.run("import torch\nbig = torch.ones(1 << 18)\nown = torch.full((1 << 16,), float(ring.rank()))").wait()
    first = cluster.snapshot("one")
    blobs = {path.name: path.stat() for path in (first.path / "blobs").iterdir()}
    assert sorted(one.st_size for one in blobs.values()) == [1 << 18, 1 << 18, 1 << 20]
    assert sum(rank["written"] for rank in first.about["ranks"]) == 3 << 19
    second = cluster.snapshot("two")
    assert sum(rank["written"] for rank in second.about["ranks"]) == 0
    assert {path.stat().st_ino for path in (second.path / "blobs").iterdir()} == {one.st_ino for one in blobs.values()}
    assert {path.stat().st_mode & 0o777 for path in second.path.rglob("*")} == {0o600, 0o700}
    assert cluster.snapshot("one").path != first.path
    assert not first.path.exists()
    cluster.restore("two")
    cluster.run("assert big.sum() == 1 << 18 and own[0] == ring.rank()").wait()


def test_what_cannot_be_kept_is_told_by_name_and_rank(notebook: Notebook) -> None:
    notebook.text("%%ringtrain\n%reset -f")
    notebook.text(UNKEEPABLE)
    text = notebook.text("%ring snapshots save partial")
    assert "Left out: file, an open file (/etc/hostname)." in text
    assert "Left out: holder, dict with an open file (/etc/hostname) in it." in text
    assert "Left out: draws, a generator." in text
    assert "Left out: thread, a thread (rank 1)." in text
    notebook.text("%%ringtrain\ndel kept, again")
    assert "Not in it: thread, a thread (rank 1)." in notebook.text("%ring snapshots restore partial")
    notebook.text("%%ringtrain\nassert kept is again and kept == [1, 2] and 'file' not in globals()")
    assert "Removed partial." in notebook.text("%ring snapshots delete partial")
    assert "no snapshot 'partial'" in notebook.error("%ring snapshots restore partial")[1]


def test_a_snapshot_that_cannot_be_loaded_changes_no_rank(cluster: Cluster) -> None:
    cluster.run("%reset -f").wait()
    cluster.run("import torch\nvalue = torch.arange(1 << 15) + ring.rank()").wait()
    snapshot = cluster.snapshot("torn")
    cluster.run("value = 'present'").wait()
    [blob] = [snapshot.path / "blobs" / name for name in snapshot.about["ranks"][1]["blobs"]]
    blob.chmod(0o600)
    content = blob.read_bytes()
    blob.write_bytes(b"x" + content[1:])
    with pytest.raises(RingError, match=r"rank 1 cannot load the snapshot: .*content does not match its digest"):
        cluster.restore("torn")
    cluster.run("assert value == 'present'").wait()
    blob.write_bytes(content[:-1])
    with pytest.raises(RingError, match=r"no snapshot 'torn' in .*; there are: .*torn: .* bytes of"):
        cluster.restore("torn")
    blob.unlink()
    with pytest.raises(RingError, match=r"is missing"):
        cluster.restore("torn")
    assert "not readable" in repr(listing())
    blob.write_bytes(content)
    cluster.restore("torn")
    cluster.run("assert value[0] == ring.rank()").wait()
    snapshot.path.chmod(0o777)
    try:
        with pytest.raises(RingError, match=r"other users may write"):
            cluster.restore("torn")
    finally:
        snapshot.path.chmod(0o700)
    running = cluster.run("import time\nwhile True: time.sleep(0.01)")
    with pytest.raises(RingError, match="in progress"):
        cluster.restore("torn")
    running.stop()


def test_a_full_disk_leaves_the_last_one(cluster: Cluster, tmp_path: Path, settings: Callable[..., None]) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED with a full disk: only root can mount a small one")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path], check=True)
    settings(runs_dir=tmp_path / ".ring" / "runs")
    try:
        cluster.run("%reset -f").wait()
        cluster.run("import torch\nvalue = torch.ones(1 << 18)").wait()
        cluster.snapshot("small")
        cluster.run("more = torch.rand(1 << 20)").wait()
        with pytest.raises(RingError, match=r"no room for the snapshot in .*; those before it are kept|was given up"):
            cluster.snapshot("small")
        cluster.restore("small")
        cluster.run("assert value.sum() == 1 << 18 and 'more' not in globals()").wait()
        assert len(list((tmp_path / ".ring" / "snapshots").iterdir())) == 1
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_modules_that_have_changed_or_are_gone_and_sharded_models_are_named(cluster: Cluster, tmp_path: Path) -> None:
    module = tmp_path / "of_the_user.py"
    module.write_text("class Thing:\n    pass\n")
    cluster.run("%reset -f").wait()
    cluster.run(FSDP + MODULE.replace("FOLDER", repr(str(tmp_path)))).wait()
    left_out = cluster.snapshot("modules").about["ranks"][1]["left_out"]
    assert left_out.keys() == {"model", "optimizer"}
    assert all("sharded over ranks" in why for why in left_out.values())
    module.write_text("class Thing:\n    changed = True\n")
    assert "Changed since then: of_the_user;" in cluster.restore("modules")
    module.unlink()
    cluster.run("import sys\ndel sys.modules['of_the_user'], thing").wait()
    with pytest.raises(RingError, match="needs module 'of_the_user', which cannot be imported here"):
        cluster.restore("modules")
    cluster.run("assert other == 3").wait()


@pytest.mark.slow
def test_another_number_of_ranks(notebook: Notebook) -> None:
    notebook.text("%ring snapshots restore before -n 3")
    text = notebook.text("%ring snapshots restore before")
    assert "rank 2 has the variables of rank 0" in text
    notebook.text(MOMENT)
    notebook.text("%ring pull moment\nthree = moment")
    notebook.text(SHARED_ANEW)
    notebook.text("%ring snapshots restore before -n 2")
    notebook.text(MOMENT)
    notebook.text("%ring pull moment\nassert moment == three and len(three) == 4")
    notebook.text("%ring snapshots restore before")
    notebook.text(TRAIN)
    notebook.text(f"{PULL}\nassert both == trained, (both, trained)")


LOOP = """%%ringtrain --background --out run --name long
import pathlib, time
factor = ring.knob("factor", 1.0, low=0.0, high=2.0)
rate = torch.optim.lr_scheduler.ExponentialLR(adam, 0.99)
for epoch in range(6):
    for x, y in ring.track(shuffled):
        for model, optimizer in (first, sgd), (second, adam):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y) * float(factor)
            loss.backward()
            optimizer.step()
        rate.step()
        ring.log(loss=loss, draw=random.random(), lr=adam.param_groups[0]["lr"])
        while epoch == 2 and not pathlib.Path("go").exists():
            time.sleep(0.01)
done = True
"""
WAITS = """import pathlib, time
session = get_ipython().magics_manager.registry["RingMagics"]._session
while len(run.metrics) < 26: time.sleep(0.01)
run.set(factor=1.5)
"""
CURVES = """assert branch is session.run is not run and branch.log.options["branch"]["of"].startswith("long@")
rows = [sorted((r.rank, r.step, *r.values.values()) for r in one.metrics) for one in (run, branch)]
begins = min(row[1] for row in rows[1])
assert branch.log.options["branch"]["of"] == f"long@{begins}"
whole = [row for row in rows[0] if row[1] >= begins]
assert 12 < begins < 16 and len(whole) == 2 * (36 - begins), (begins, len(whole))
assert rows[1] == whole, [pair for pair in zip(*rows) if pair[0] != pair[1]][:4]
"""


def test_a_branch_begins_bit_for_bit_where_the_run_was(notebook: Notebook) -> None:
    notebook.text("%ring snapshots restore before")
    notebook.run(LOOP)
    notebook.text(WAITS)
    # The cell that asks says what was kept, however late, and not the one that trains.
    asks = "%ring snapshots save mid"
    teller = "import threading\n(teller,) = [one for one in threading.enumerate() if one.name == 'ring-kept']"
    assert "keeps its variables at its next step" in notebook.text(f"{asks}\n{teller}")
    notebook.text("pathlib.Path('go').touch()\nrun.wait(); teller.join()\nNone")
    (asked,) = [cell for cell in notebook.document.cells if cell.source.startswith(asks)]
    assert re.search(r"Kept \d+ variables of 2 ranks as mid", str(asked.outputs)), asked.outputs
    assert "Kept" not in notebook.text("print([one.text for one in run.view.output])")
    assert {"mid", "before"} <= {*notebook.complete("%ring snapshots restore ")}
    listed = notebook.text("%ring snapshots")
    assert re.search(r"^mid .* long +1[2-5]$", listed, re.MULTILINE), listed
    text = notebook.text("%ring snapshots branch mid --name fork --out branch")
    assert "Restored" in text
    assert "begins anew" not in text
    assert re.search(r"fork · branch of long@1\d", text), text
    notebook.text(CURVES)
    assert re.search(r"branch of.*\n.*^fork .* long@1\d", notebook.text("%ring runs"), re.MULTILINE | re.DOTALL)
    notebook.text("assert branch.params['factor'] == 1.5, branch.params")  # as the run was set until then
    notebook.text("%ring snapshots branch mid --name other --set lr=0.02 --out branch")
    notebook.text("assert (branch.params['factor'], branch.params['lr']) == (1.5, 0.02), branch.params")
    notebook.text("(first,) = branch.changes; assert (first.values, first.point) == ({'lr': 0.02}, 0), first")
    notebook.text("assert branch.knobs['lr'] == 0.02 and len(branch.metrics) > 0, branch.knobs")


ALONE = """%%ringtrain -n 1 --background --out run --name alone
import pathlib, time
import torch
model = torch.nn.Linear(6, 1)
model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(40):
    optimizer.zero_grad()
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    ring.log(draw=torch.rand(1).item())
    while step == 20 and not pathlib.Path("on").exists():
        time.sleep(0.01)
"""
KEPT = """import pathlib, time
while len(run.metrics) < 20: time.sleep(0.01)
run.snapshot("alone-mid")
pathlib.Path("on").touch()
run.wait()
None
"""


def test_a_branch_takes_as_many_ranks_as_its_run(notebook: Notebook) -> None:
    notebook.run(ALONE)
    notebook.text(KEPT)
    text = notebook.text("%ring snapshots branch alone-mid --out branch")
    assert "The branch runs on rank 0 of 2 ranks, as run alone did; `-n 2` takes all." in text
    assert "shared anew" not in text
    notebook.text("assert {row.rank for row in branch.metrics} == {0}")
    notebook.text("draws, own = ([row.values['draw'] for row in one.metrics] for one in (run, branch))")
    notebook.text("first = draws.index(own[0])\nassert draws[first:first + 10] == own[:10], (draws, own)")
    text = notebook.text("%ring snapshots branch alone-mid -n 2 --out branch")
    assert "rank 1 has the variables of rank 0" in text
    assert "The branch runs on" not in text
    notebook.text("assert {row.rank for row in branch.metrics} == {0, 1}")


REGULARLY = """%%ringtrain --background --out run --name often --snapshot 0.4s
import time

def loop():
    for step in range(500):
        if stops:
            return
        sgd.zero_grad()
        first(inputs).sum().backward()
        sgd.step()
        ring.log(step=step, loss=step)
        time.sleep(0.01)
stops = []
loop()
"""
THREE_KEPT = """import time
from ring_notebook.files import snapshot_files
def kept():
    return [one for one in snapshot_files.found(snapshot_files.root())[0] if one.name.startswith("often@")]
deadline = time.monotonic() + 60
def wait(holds):
    while not holds():
        assert time.monotonic() < deadline, [one.text for one in run.view.output][-4:]
        time.sleep(0.02)
seen = set()
def five():
    seen.update(one.name for one in kept())
    return len(seen) == 5
wait(five)
run.pause()
wait(lambda: run.view.paused)
before = run.metrics[-1].step
run.snapshot("paused")
def paused():
    return [one for one in snapshot_files.found(snapshot_files.root())[0] if one.name == "paused"]
wait(paused)
assert run.view.paused and 0 < paused()[0].step - before <= 2  # a step is made before its row
run.stop()
assert len(kept()) == 3, kept()
"""


@pytest.mark.slow
def test_a_run_keeps_itself_regularly_and_while_it_is_paused(notebook: Notebook) -> None:
    notebook.text("%ring snapshots restore before")
    notebook.run(REGULARLY)
    notebook.text(THREE_KEPT)
    notebook.text("%%ringtrain\nstops = [1]")
    text = notebook.text("%ring snapshots branch paused")
    assert "loop() begins anew" in text
    assert re.search(r"branch of often@\d+", text), text


@pytest.mark.slow  # a kernel and a cluster of its own
def test_another_kernel_brings_it_back(notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.text("import os\nfolder = os.environ['RING_RUNS_DIR']")
    monkeypatch.setenv("RING_RUNS_DIR", notebook.text("print(folder)").strip())
    other = Notebook(tmp_path)
    try:
        other.run("%load_ext ring_notebook")
        text = other.text("%ring snapshots restore before")
        assert "Started 2 engines" in text
        assert "Restored" in text
        other.text(TRAIN)
        notebook.text(f"{PULL}\nopen(os.path.join(folder, 'whole'), 'w').write(repr(trained))")
        other.text(f"{PULL}\nimport os\nassert repr(both) == open(os.environ['RING_RUNS_DIR'] + '/whole').read()")
    finally:
        other.close()
