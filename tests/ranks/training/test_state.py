"""Parameters, optimizer state and objects across ranks; checkpoints; the drift check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ranks.joint_training import make_model, momentum, plain_step
from ring_notebook.errors import RingError


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 7), torch.ones(2, 3)


@pytest.mark.parametrize("form", ["state_dict", "named", "list", "generator"])
def test_broadcast_parameters(hvd: ModuleType, form: str) -> None:
    root = hvd.size() - 1
    model, expected = make_model(seed=hvd.rank()), make_model(seed=root)
    forms: dict[str, Any] = {
        "state_dict": model.state_dict(),
        "named": list(model.named_parameters()),
        "list": list(model.parameters()),
        "generator": model.parameters(),
    }
    hvd.broadcast_parameters(forms[form], root_rank=root)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_broadcast_parameters_takes_a_dict_in_any_order_and_refuses_what_is_no_tensor(hvd: ModuleType) -> None:
    named = [("a", torch.full((2,), float(hvd.rank()))), ("b", torch.full((3,), float(hvd.rank()))), ("c", None)]
    hvd.broadcast_parameters(OrderedDict(named if hvd.rank() % 2 else named[::-1]), root_rank=0)
    assert not named[0][1].any()
    assert not named[1][1].any()
    with pytest.raises(ValueError, match="'step' is a int"):
        hvd.broadcast_parameters({"step": 3}, root_rank=0)
    with pytest.raises(ValueError, match="got Tensor"):
        hvd.broadcast_parameters(torch.ones(2), root_rank=0)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LBFGS"])
def test_broadcast_optimizer_state_to_optimizers_that_have_none(hvd: ModuleType, kind: str, wrapped: bool) -> None:
    """Rank 0 comes from a checkpoint; the others are fresh and have other options."""
    model = make_model()
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1 if hvd.rank() == 0 else 0.7, **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if hvd.rank() == 0:
        optimizer.step(lambda: torch.tensor(1.0))
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    states = hvd.allgather_object(optimizer.state_dict())
    torch.testing.assert_close(states[hvd.rank()], states[0], rtol=0, atol=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) > 0


def test_objects(hvd: ModuleType) -> None:
    rank, size = hvd.rank(), hvd.size()
    shared = torch.arange(4.0)
    obj = {"rank": rank, "tensors": [shared, shared, torch.ones(2, 2).t()], "twice": lambda x: 2 * x}
    received = hvd.broadcast_object(obj, root_rank=size - 1, name="object")
    assert received["rank"] == size - 1
    assert received["twice"](4) == 8
    assert torch.equal(received["tensors"][0], shared)
    assert received["tensors"][0] is received["tensors"][1]
    assert (received is obj) is (rank == size - 1)
    assert hvd.allgather_object({"rank": rank, "text": "x" * rank}, name="objects") == [
        {"rank": r, "text": "x" * r} for r in range(size)
    ]
    planned = hvd.broadcast_object([torch.ones(3), nn.Linear(2, 5, device="meta")])
    assert torch.equal(planned[0], torch.ones(3))
    assert (planned[1].weight.shape, planned[1].weight.is_meta) == ((5, 2), True)
    parameter = hvd.broadcast_object(nn.Parameter(torch.full((2,), 3.0)))
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad


KILLED = """
import os, signal, sys
import ring_notebook.torch as ring
class Kills:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
ring.init()
ring.save([b"x" * (1 << 20), Kills()], sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.sizes(1)
def test_what_a_killed_save_has_left_goes_with_the_next(hvd: ModuleType, tmp_path: Path) -> None:
    """One that still writes keeps its file; the last to end has its way."""

    class Saves:
        def __reduce__(self) -> tuple[type[int], tuple[int]]:
            hvd.save("inner", path)
            return int, (7,)

    path = tmp_path / "model [1].pt"
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("RING_", "PMI_"))}
    for _ in range(2):
        assert (
            subprocess.run([sys.executable, "-c", KILLED, path], env=alone, check=False).returncode == -signal.SIGKILL
        )
    assert len(list(tmp_path.iterdir())) == 1
    other = tmp_path / ".model [1].pt.notes"
    other.touch()
    hvd.save([Saves()], path)
    assert hvd.load(path, weights_only=False) == [7]
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_save_and_load(hvd: ModuleType, tmp_path: Path) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    path = folder / "deep" / "state.pt"
    model = make_model(seed=hvd.rank())
    hvd.save({"model": model.state_dict(), "epoch": hvd.rank()}, path)
    loaded = hvd.load(path)
    assert loaded["epoch"] == 0
    for key, value in make_model(seed=0).state_dict().items():
        assert torch.equal(loaded["model"][key], value)
    hvd.barrier()
    assert [entry.name for entry in path.parent.iterdir()] == ["state.pt"]


def sharded(hvd: ModuleType) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model of FSDP2 after a step, its optimizer, and all weights of the model."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    model, optimizer = hvd.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), strategy="fsdp")
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    return model, optimizer, {name: one.full_tensor().cpu() for name, one in model.state_dict().items()}  # type: ignore[operator]


def test_save_gathers_what_is_sharded(hvd: ModuleType, tmp_path: Path) -> None:
    path = Path(hvd.broadcast_object(str(tmp_path))) / "sharded.pt"
    model, optimizer, expected = sharded(hvd)
    hvd.save({"model": model.state_dict(), "rest": [optimizer.state_dict(), (model.state_dict(), 3)]}, path)
    loaded = hvd.load(path)
    for state in (loaded["model"], loaded["rest"][1][0]):
        torch.testing.assert_close(dict(state), expected, rtol=0, atol=0)
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(loaded["rest"][0]["state"][0]["exp_avg"], moment.full_tensor().cpu())
    assert loaded["rest"][1][1] == 3
    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    plain.load_state_dict(loaded["model"])


def test_save_refuses_what_is_sharded_inside_another_object(hvd: ModuleType, tmp_path: Path) -> None:
    """Which only pickle can look into."""
    model, _, _ = sharded(hvd)
    one = SimpleNamespace(state=model.state_dict())
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"rank 0: save: .* is sharded .* state_dict\(\)"):
            hvd.save({"one": one}, tmp_path / "model.pt")
        assert not list(tmp_path.iterdir())
    else:
        hvd.save({"one": one}, tmp_path / "model.pt")


def test_a_broadcast_that_is_refused_changes_nothing(hvd: ModuleType) -> None:
    """Rank 0's share is not that of the others; nor has a broadcast of other entries begun."""
    model, optimizer, expected = sharded(hvd)
    parameters, state, odd = list(model.parameters()), model.state_dict(), hvd.size() - 1
    plain = torch.full((2,), float(hvd.rank()))
    for given in ({"0": plain, **state}, [plain, *parameters]):
        with pytest.raises(ValueError, match=r"broadcast_parameters: '?.*is sharded over the ranks.*before"):
            hvd.broadcast_parameters(given, root_rank=odd)
    with pytest.raises(ValueError, match=r"broadcast_optimizer_state: .*sharded over the ranks.*before"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=odd)
    for other, why in ((3, "is a int"), (torch.ones(1).expand(2), "is expanded")):
        with pytest.raises(ValueError, match=why):
            hvd.broadcast_parameters({"0": plain, "1": other}, root_rank=odd)
    kind, why = (ValueError, "is sharded") if hvd.rank() == odd else (RingError, "failed to pickle")
    with pytest.raises(kind, match=why):
        hvd.broadcast_object({"model": [state]}, root_rank=odd)
    assert plain.eq(hvd.rank()).all()
    for name, one in model.state_dict().items():
        assert torch.equal(one.full_tensor().cpu(), expected[name])


def test_an_elastic_state_refuses_what_is_sharded(hvd: ModuleType) -> None:
    """The others would take rank 0's share as theirs."""
    model, optimizer, expected = sharded(hvd)
    with pytest.raises(ValueError, match=r"TorchState: .* sharded .*ring\.checkpoint"):
        hvd.elastic.TorchState(optimizer=optimizer)
    state = hvd.elastic.TorchState(epoch=1)
    state.epoch = model.state_dict()
    for call in (state.save, state.sync, state.commit):
        with pytest.raises(ValueError, match=r"TorchState: .* sharded .*ring\.checkpoint"):
            call()
    for name, one in model.state_dict().items():
        assert torch.equal(one.full_tensor().cpu(), expected[name])


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(hvd: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    hvd.save(1, path)
    if hvd.rank() == 0:
        with pytest.raises(TypeError, match="cannot pickle"):
            hvd.save(threading.Lock(), path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["state.pt"]
    assert hvd.load(path) == 1


def test_a_checkpoint_that_cannot_be_read_raises_on_every_rank(hvd: ModuleType, tmp_path: Path) -> None:
    with pytest.raises((FileNotFoundError, RuntimeError), match=r"missing\.pt"):
        hvd.load(tmp_path / "missing.pt")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_check_passes_when_ranks_agree(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    hvd.check(model, optimizer)
    for _ in range(3):
        plain_step(model, optimizer, (batch()[0] * hvd.rank(), batch()[1]))
        hvd.check(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["parameter", "complex", "state", "count", "shape"])
def test_check_names_the_first_tensor_that_differs(hvd: ModuleType, where: str) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    from ring_notebook.errors import DriftError

    odd = hvd.rank() == hvd.size() - 1
    model: nn.Module = make_model()
    optimizer = momentum(model)
    expected = {
        "parameter": r"parameter second\.weight \(3, 13\) differs between ranks by up to 0\.25",
        "complex": r"parameter phase \(2,\) differs between ranks by up to 0\.75",
        "state": r"optimizer state momentum_buffer of first\.bias \(13,\) differs between ranks by up to 0\.5",
        "count": "different numbers of tensors",
        "shape": r"rank 0: parameter weight \(2, 3\) torch\.float32; .*rank 1",
    }
    if where != "count" or not odd:
        plain_step(model, optimizer, batch())
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))
    with torch.no_grad():
        if odd and where == "parameter":
            model.second.weight[1, 2] += 0.25
            model.second.bias[0] += 1
        if odd and where == "complex":
            model.phase[1] += 0.75j
        if odd and where == "state":
            optimizer.state[model.first.bias]["momentum_buffer"][3] += 0.5
    if where == "shape":
        model = nn.Linear(4 if odd else 3, 2)
        optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(DriftError, match=expected[where]):
        hvd.check(model, optimizer)
