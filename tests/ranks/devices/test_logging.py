"""Logging and preparing on a device: log waits for nothing, and what is drained is what the tensor was then."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.devices.pretended_gpu import PretendedGpu
from ranks.training.test_loaders import CASES, passes_of_one_process, reseed, steps_of
from ring_notebook.config import config
from ring_notebook.core import metrics

pytestmark = pytest.mark.sizes(2)


@pytest.fixture(autouse=True)
def _recording() -> Iterator[None]:
    metrics.begin()
    yield
    metrics.end()


def values(limit: float = 0.0) -> list[float]:
    return [row[-1] for batch in metrics.drain("run", 0, limit) for row in batch.rows()]


@pytest.mark.timeout(30)  # a mutant of the face waits for ever
def test_a_logged_loss_does_not_wait_for_its_device(hvd: ModuleType, device: torch.device, gpu: PretendedGpu) -> None:
    loss, more = torch.full((), 2.0, device=device), torch.full((), 3.0, device=device)
    with gpu.held():
        hvd.log(loss=loss)
        loss.copy_(more)
        hvd.log(loss=loss)
        assert values() == []
    assert values(limit=60) == [2.0, 3.0]
    assert gpu.waits == []


def test_rows_keep_their_order_while_a_number_is_on_its_way(
    hvd: ModuleType, device: torch.device, gpu: PretendedGpu
) -> None:
    two = torch.full((), 2.0, device=device)
    hvd.log(x=1.0)
    with gpu.held():
        hvd.log(x=two)
        hvd.log(x=3.0)
        assert values() == [1.0]
    assert values(limit=60) == [2.0, 3.0]


def test_rank_0_of_a_script_prints_the_last_number_that_has_arrived(
    hvd: ModuleType,
    rank: int,
    device: torch.device,
    gpu: PretendedGpu,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics.end()
    monkeypatch.setattr(metrics._recorder, "printed", 0.0)  # another test may have logged within the last second
    one, two = torch.full((), 1.0, device=device), torch.full((), 2.0, device=device)
    hvd.log(loss=one)
    gpu.driver.synchronize(gpu.current_stream().cuda_stream)
    with gpu.held():
        hvd.log(loss=two)
        assert capsys.readouterr().out == ("" if rank else "step 0  loss 1\n")
    metrics._recorder.print_last()
    assert capsys.readouterr().out == ("" if rank else "step 1  loss 2\n")
    assert gpu.waits == []


def test_a_number_that_never_comes_is_nan(hvd: ModuleType, device: torch.device, gpu: PretendedGpu) -> None:
    one = torch.ones((), device=device)
    with gpu.held():
        hvd.log(x=one, y=2.0)
        (batch,) = metrics.drain("run", 0, limit=0.01)
    (row,) = batch.rows()
    assert math.isnan(row[2])
    assert row[3] == 2.0


def test_a_captured_tensor_is_refused(hvd: ModuleType, device: torch.device, gpu: PretendedGpu) -> None:
    with gpu.capture(), pytest.raises(RuntimeError, match="log the tensor after the graph's replay"):
        hvd.log(loss=torch.ones((), device=device))


def test_a_prepared_loop_trains_as_one_process(hvd: ModuleType, rank: int, size: int, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(12 * size, 6, generator=draw), torch.randn(12 * size, 3, generator=draw))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> list[torch.Tensor]:
        where = next(model.parameters()).device
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x.to(where, non_blocking=True)), y.to(where)).backward()
                optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    def made(batch: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        torch.manual_seed(3)
        model = nn.Linear(6, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(data, batch)

    for got, want in zip(train(*hvd.prepare(*made(4))), train(*made(4 * size)), strict=True):
        torch.testing.assert_close(got, want)


def test_a_timeline_of_a_script_names_the_transport(hvd: ModuleType, device: torch.device, tmp_path: Path) -> None:
    hvd.start_timeline(str(tmp_path / "timeline.json"))
    hvd.allreduce(torch.ones(8, device=device))
    hvd.stop_timeline()
    own: Any = json.loads((tmp_path / f"timeline.rank{hvd.rank()}.json").read_text())["traceEvents"]
    said = [event["args"]["labels"] for event in own if event["name"] == "process_labels"]
    assert said == [f"GPU tensors {'by NCCL' if config().device == 'auto' else 'through CPU memory'}"]


def test_prepare_moves_the_model_and_pins_what_workers_make(hvd: ModuleType, device: torch.device) -> None:
    model = nn.Linear(6, 3)
    loader = DataLoader(TensorDataset(torch.zeros(8, 6)), batch_size=2, num_workers=1)
    same, optimizer, share = hvd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert same is model
    assert model.weight.device.type == device.type
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert share.pin_memory


class Pair(NamedTuple):
    """A part of a batch."""

    encoding: Any
    text: str


def test_prepared_batches_are_on_the_device(hvd: ModuleType, size: int, device: torch.device) -> None:
    class Encoding:
        """As tokenizers make them."""

        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def to(self, where: torch.device) -> Encoding:
            return Encoding(self.x.to(where))

    samples: Any = [torch.ones(2)] * (4 * size)

    def collate(found: list[torch.Tensor]) -> Any:
        return {"x": torch.stack(found), "pair": Pair(Encoding(found[0]), "text")}

    plain = DataLoader(samples, batch_size=2, collate_fn=collate)
    own = DataLoader(
        samples,
        2,
        sampler=torch.utils.data.distributed.DistributedSampler(samples, size, hvd.rank()),
        collate_fn=collate,
    )
    for loader in (hvd.prepare(plain), hvd.prepare(own), hvd.prepare(hvd.prepare(plain))):
        for batch in loader:
            assert batch["x"].device.type == batch["pair"].encoding.x.device.type == device.type
            assert batch["pair"].text == "text"
        assert len(loader) == 2


@pytest.mark.parametrize("name", ["subclass", "batch sampler", "own batch sampler", "iterable", "one pass without end"])
def test_batches_of_any_loader_are_on_the_device(hvd: ModuleType, size: int, device: torch.device, name: str) -> None:
    reseed(7)
    alone = passes_of_one_process(CASES[name], 4, size)
    reseed(7)
    loader = hvd.prepare(CASES[name].make(4, size))
    assert {batch.device.type for batch in loader} == {device.type}
    assert steps_of(hvd, loader) == alone[1]


def test_data_may_be_on_the_device(hvd: ModuleType, size: int, device: torch.device) -> None:
    loader = hvd.prepare(DataLoader(TensorDataset(torch.zeros(4 * size, 6).to(device)), batch_size=2))
    assert [x.device.type for (x,) in loader] == [device.type] * 2
