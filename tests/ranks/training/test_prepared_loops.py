"""What `prepare` adds to a loop beside averages, for which see `ranks.loops`: steps in rows, torch's SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ring_notebook.torch as hvd
from ranks.values import randn
from ring_notebook.core import metrics

ROWS = 12  # of all ranks: one to four share them evenly


@pytest.fixture(autouse=True)
def generation() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(number: int) -> Tensor:
    return randn(torch.Generator().manual_seed(number), ROWS, 6)


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    value: Tensor = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
    return value


@pytest.mark.parametrize("options", [{}, {"sync_every": 2}], ids=["averages", "local steps"])
def test_rows_have_the_steps_of_the_optimizer(options: dict[str, int]) -> None:
    metrics.begin()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # warns when it steps before the optimizer
    model, optimizer, schedule = hvd.prepare(model, optimizer, schedule, accumulate=2, **options)
    for rows in metrics.track([batch(number) for number in range(6)]):
        loss(model, rows).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        metrics.log(loss=1.0)
    logged = [row[1] for rows in metrics.drain("run", 0) for row in rows.rows()]
    metrics.end()
    assert logged == [0, 0, 1, 1, 2, 2]


def test_what_reduces_no_gradients_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="accumulate"):
        hvd.prepare(model, optimizer, op=hvd.Adasum, accumulate=2)
    with pytest.raises(TypeError, match="accumulate"):
        hvd.prepare(model, optimizer, strategy="ddp", accumulate=2)
    model, _ = hvd.prepare(model, optimizer, op=hvd.Adasum)
    with pytest.raises(TypeError, match="Adasum"):
        hvd.clip_grad_norm_(model.parameters(), 1.0)


def test_torchs_sync_batch_norm_is_converted(rank: int, size: int) -> None:
    """It normalizes over all ranks' rows; an optimizer made before has its parameters still."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.SyncBatchNorm(4), nn.BatchNorm1d(4, affine=False)))
    weight = model[1][0].weight
    model, _ = hvd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(model[1][0], hvd.SyncBatchNorm)
    assert isinstance(model[1][1], nn.BatchNorm1d)
    assert model[1][0].weight is weight
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    got = model[1][0](model[0](batch(0)[rows]))
    expected = nn.BatchNorm1d(4)(model[0](batch(0))).detach()
    torch.testing.assert_close(got.detach(), expected[rows], rtol=1e-4, atol=1e-4)


def test_convert_sync_batchnorm() -> None:
    layer = nn.BatchNorm2d(3).eval()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(converted, hvd.SyncBatchNorm)
    assert converted.running_mean is layer.running_mean
    assert not converted.training
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(converted) is converted

    class Activates(nn.BatchNorm2d):  # as timm's BatchNormAct2d
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    with pytest.raises(
        ValueError, match=r"class Activates cannot be replaced by SyncBatchNorm: its own forward\(\) may"
    ):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(Activates(3)))
    own = nn.SyncBatchNorm(3)
    own.process_group = object()
    with pytest.raises(ValueError, match="process_group"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(own))
