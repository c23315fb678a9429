"""Hints are given when they are true, name the line to change, and are silent otherwise."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path

import nbformat
import pytest

from ring_notebook.notebook.panel.hints import Hint, Lint, html, text
from ring_notebook.notebook.record.run_view import RunState, RunView
from ring_notebook.protocol.records import Ended, MetricBatch, Output, Record

LOOP = """loader = DataLoader(data, batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{wrap}
for x, y in loader:
    loss(model(x), y).backward()
    optimizer.step()
"""
WRAPPED = LOOP.format(wrap="optimizer = ring.DistributedOptimizer(optimizer)")
PREPARED = LOOP.format(wrap="model, optimizer, loader = ring.prepare(model, optimizer, loader)")


def view(size: int, *records: Record) -> RunView:
    state = RunState(size, started=0.0)
    for record in records:
        state.apply(record, 1.0)
    return state.view(2.0)


def found(source: str, seen: RunView | None = None, gpus: bool = False) -> dict[int, str]:
    return {hint.line: hint.text for hint in Lint(source, 2, gpus=gpus).hints(seen or view(2))}


def steps(rank: int, count: int) -> list[Record]:
    values = array("d", [value for step in range(count) for value in (step, step, 0.5)])
    return [MetricBatch("r", rank, ("loss",), values), Ended("r", rank, "ok", 1.0)]


MADE = "def make():\n    return model, torch.optim.SGD(model.parameters())\n\n"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(PREPARED, id="a cell that is right"),
        pytest.param("loss(model(x), y).backward()\noptimizer.step()\n", id="an optimizer of an earlier cell"),
        pytest.param(f"{MADE}def step():\n    loss.backward()\n", id="one that the caller of a function may wrap"),
        pytest.param(f"%matplotlib inline\n!ls\n{PREPARED}", id="magics in the cell"),
        pytest.param("def (", id="a cell that is no Python"),
    ],
)
def test_no_hint(source: str) -> None:
    assert found(source) == {}


def test_the_quickstart_gets_no_hint() -> None:
    """But for its exercise, which has a reader look at one."""
    notebook = nbformat.read(Path(__file__).parents[4] / "notebooks" / "01_quickstart.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.source.startswith("%%ringtrain"):
            hints = found(cell.source.partition("\n")[2])
            assert bool(hints) == ("exercise" in cell.metadata.get("tags", []))


def test_one_rank_gets_no_hint() -> None:
    assert found(LOOP.format(wrap=""), view(1)) == {}


@pytest.mark.parametrize("magic", ["", "%%time\n"])
def test_an_optimizer_that_is_not_wrapped(magic: str) -> None:
    hints = found(magic + LOOP.format(wrap=""))
    assert "never averaged" in hints[3 + bool(magic)]
    assert "whole data set" in hints[2 + bool(magic)]


def test_no_broadcast_and_a_rate_for_one_process() -> None:
    hints = found(WRAPPED)
    assert "broadcast_parameters(model.state_dict(), " in hints[4]
    assert "broadcast_parameters([w, b], " in found(WRAPPED.replace("model.parameters()", "[w, b]"))[4]
    assert "lr=0.1 * ring.size()" in hints[3]
    assert 3 not in found(
        WRAPPED.replace("DistributedOptimizer(optimizer", "DistributedOptimizer(optimizer, sync_every=50")
    )


@pytest.mark.parametrize("start", ["ring.broadcast_parameters(model.state_dict(), 0)", "torch.manual_seed(1)"])
def test_the_same_start_by_other_means(start: str) -> None:
    assert 5 not in found(f"{start}\n{WRAPPED}")


def test_a_loader_with_a_sampler_is_sharded() -> None:
    source = WRAPPED.replace("batch_size=8", "sampler=DistributedSampler(data, ring.size(), ring.rank())")
    assert 2 not in found(source)


def test_a_checkpoint_that_every_rank_writes() -> None:
    source = "if ring.rank() == 0:\n    torch.save(a, f)\nif last:\n    torch.save(b, f)\n"
    assert list(found(source)) == [5]


devices = partial(found, gpus=True)


def test_a_model_that_stays_on_the_cpu_beside_a_gpu() -> None:
    assert "model.to('cuda')" in devices(WRAPPED)[3]
    on_gpu = devices(f"model = model.to('cuda')\n{WRAPPED}")
    assert not [said for said in on_gpu.values() if "CPU" in said]
    assert found(PREPARED) == {}


def test_batches_that_stay_on_the_cpu_while_prepare_moves_the_model() -> None:
    assert devices(PREPARED) == {}, "it moves the batches of its loaders"
    source = PREPARED.replace("optimizer, loader", "optimizer")
    hints = devices(source)
    assert list(hints) == [2]
    assert "the batches stay on the CPU" in hints[2]
    assert devices(source.replace("    loss(", "    x, y = x.to('cuda'), y.to('cuda')\n    loss(")) == {}
    assert devices(f"with torch.device('cuda'):\n    data = make()\n{source}") == {}
    assert devices(source.replace("loader = DataLoader(data, batch_size=8)\n", "")) == {}  # made in an earlier cell
    assert devices(source.replace("ring.prepare(model, optimizer)", "ring.prepare(*everything)")) == {}


@pytest.mark.parametrize(
    "choice", ["torch.cuda.set_device(ring.local_rank())", "model.to(f'cuda:{ring.local_rank()}')"]
)
def test_a_gpu_chosen_among_those_that_a_rank_does_not_see(choice: str) -> None:
    assert "its own GPU as `cuda:0`" in devices(f"model.cuda()\n{choice}\n{PREPARED}")[3]


def test_other_numbers_of_steps() -> None:
    assert "rank 1 ended at step 3 and rank 0 at step 4" in found(PREPARED, view(2, *steps(0, 5), *steps(1, 4)))[2]
    assert found(PREPARED, view(2, *steps(0, 5), *steps(1, 5))) == {}


def test_a_metric_of_one_rank_says_nothing_about_steps() -> None:
    """Each call of `log` is a step of that rank."""
    more = MetricBatch("run", 0, ("only_here",), array("d", (0.0, 9, 1.0)))
    assert found(PREPARED, view(2, *steps(0, 5), *steps(1, 4), more)) == {}


def test_every_rank_prints_the_same() -> None:
    source = "for epoch in range(9):\n    print('epoch', epoch)\n"
    said = "".join(f"epoch {epoch}\n" for epoch in range(9))
    alike = [Output("r", rank, "stdout", said) for rank in range(2)]
    assert "print the same 9 lines" in found(source, view(2, *alike))[3]
    assert "print the same lines" in found(source, replace(view(2, *alike), dropped_lines=5))[3], "9 are not all"
    assert found(source, view(2, alike[0])) == {}
    assert found(source.replace("    print", "    if ring.rank() == 0: print"), view(2, *alike)) == {}


def test_the_value_of_the_last_line_is_not_printed() -> None:
    source = "print('rows')\n[[row] * 9 for row in range(9)]\n"
    printed = [Output("r", rank, "stdout", "rows\n") for rank in range(2)]
    values = [Output("r", rank, "stdout", "".join(f"[{row}]\n" for row in range(9)), block=True) for rank in range(2)]
    assert found(source, view(2, *printed, *values)) == {}
    assert "print the same 10 lines" in found(f"{source}x = 1\n", view(2, *printed, *values))[2]


def test_a_share_picked_by_hand() -> None:
    assert 2 not in found(WRAPPED.replace("(data", "(data[ring.rank() :: ring.size()]"))


def test_how_hints_look() -> None:
    hint = Hint(7, "use `a < b`")
    assert text(hint) == "Hint, line 7: use `a < b`."
    assert "<code>a &lt; b</code>" in html((hint,))
    assert text(Hint(0, "x")) == "Hint: x."


@pytest.mark.parametrize(
    "wrap",
    [
        "model = DistributedDataParallel(model)",
        "model = torch.nn.parallel.DistributedDataParallel(model)",
        "model = FSDP(model)",
        "fully_shard(model)",
        "model, optimizer = Fabric().setup(model, optimizer)",
        "model, optimizer = Accelerator().prepare(model, optimizer)",
    ],
)
def test_other_ways_to_average_are_known(wrap: str) -> None:
    assert not [one for one in found(LOOP.format(wrap=wrap)).values() if "never averaged" in one]


def test_no_hint_under_a_cell_that_failed_before_its_first_step() -> None:
    source = LOOP.format(wrap="")
    assert found(source, view(2, *(Ended("r", rank, "failed", 1.0) for rank in range(2)))) == {}
    assert found(source, view(2, *(Ended("r", rank, "ok", 1.0) for rank in range(2)))) != {}
    assert found(source, view(2, *steps(0, 3), Ended("r", 1, "failed", 1.0))) != {}


CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()"


def test_clipping_what_is_no_average() -> None:
    for source in (PREPARED, WRAPPED):
        assert 7 not in found(source.replace("    optimizer.step()", CLIP))
    for option in ("sync_every=8", "op=ring.Adasum"):
        local = PREPARED.replace("optimizer, loader)\n", f"optimizer, loader, {option})\n")
        assert "clips the gradients of each rank" in found(local.replace("    optimizer.step()", CLIP))[7]
        assert 7 not in found(local)


def test_the_batch_norm_of_the_framework() -> None:
    line = "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"
    assert "ring.SyncBatchNorm" in found(line + WRAPPED)[2]
    assert found(line + PREPARED) == {}  # `prepare` replaces it where there is no GPU
    on_gpus = Lint(line + PREPARED, 2, gpus=True).hints(view(2))
    assert [hint.line for hint in on_gpus if "ring.SyncBatchNorm" in hint.text] == [2]
    assert 2 not in found(line.replace("torch.nn.SyncBatchNorm.convert_sync_batchnorm", "ring.SyncBatchNorm") + WRAPPED)
    assert 2 not in found(line + LOOP.format(wrap="model = DDP(model)"))


def test_a_hint_uses_the_names_of_the_cell() -> None:
    source = (
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "batches = DataLoader(data)\n"
        "for x, y in batches:\n    loss(net(x), y).backward()\n    opt.step()\n"
    )
    assert "After line 3 add `net, opt, batches = ring.prepare(net, opt, batches)`" in found(source)[2]
    without_loader = source.replace("DataLoader(data)", "load()")
    assert "After this line add `net, opt = ring.prepare(net, opt)`" in found(without_loader)[2]
    no_module = source.replace("net.parameters()", "[w, b]")
    assert "add `opt = ring.DistributedOptimizer(opt)`" in found(no_module)[2]


FIT = """import keras
model.compile(optimizer={optimizer}, loss="mse")
model.fit({data}, callbacks={callbacks})
"""
DISTRIBUTED = "ring.DistributedOptimizer(keras.optimizers.SGD(0.1 * ring.size()))"
BROADCAST = "[ring.callbacks.BroadcastGlobalVariablesCallback(0)]"
SHARE = "x[ring.rank()::ring.size()]"


def fit(optimizer: str = DISTRIBUTED, data: str = SHARE, callbacks: str = BROADCAST) -> dict[int, str]:
    return found(FIT.format(optimizer=optimizer, data=data, callbacks=callbacks))


def test_a_fit_of_keras() -> None:
    assert fit() == {}
    assert found("import keras\nmodel.compile('sgd', 'mse')\nmodel.fit(ring.prepare(model, x)[1])\n") == {}
    assert found("import keras\nmodel.fit(x)\n") == {}  # an earlier cell may have compiled it
    assert "`optimizer=ring.DistributedOptimizer(keras.optimizers.get('adam'))`" in fit("'adam'")[3]
    assert "BroadcastGlobalVariablesCallback(0)" in fit(callbacks="[]")[4]
    unscaled = DISTRIBUTED.replace(" * ring.size()", "")
    assert "every rank trains on the same data" in fit(unscaled, data="x")[4]
    assert "`0.1 * ring.size()`" in fit(unscaled)[3]
