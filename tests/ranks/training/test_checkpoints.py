"""Checkpoints of a training: when they are written, which stay, and that a training resumes exactly from one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ring_notebook.core import checkpoint_place
from ring_notebook.errors import RingError

SAMPLES, BATCH = 72, 12  # of all ranks together: six steps an epoch


@pytest.fixture
def folder(hvd: ModuleType, tmp_path: Path) -> Path:
    """One of rank 0's, on all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path / "made" / "checkpoints"), name="folder"))


def objects(hvd: ModuleType, strategy: str | None = None) -> list[Any]:
    """A model, its optimizer, its schedule and its data, in the hands of `prepare`."""
    torch.manual_seed(5)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    inputs = torch.randn(SAMPLES, 3)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :2] * 2)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH // hvd.size(), shuffle=True)
    return list(hvd.prepare(model, optimizer, schedule, loader, strategy=strategy))


def train(hvd: ModuleType, parts: list[Any], saved: Any, epochs: int = 4, stop: int = -1) -> list[float]:
    """The training, until ``stop`` steps; returns the inputs that it has used."""
    model, optimizer, schedule, loader = parts
    used: list[float] = []
    for _ in saved.epochs(epochs):
        for inputs, targets in loader:
            if saved.steps == stop:
                return used
            used += [float(row[0]) for row in hvd.allgather(inputs)]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            saved.step()
        schedule.step()
    return used


def weights(model: nn.Module) -> torch.Tensor:
    values = [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter for parameter in model.parameters()
    ]
    return torch.cat([value.detach().flatten() for value in values])


def names(hvd: ModuleType, folder: Path) -> list[str]:
    hvd.barrier()
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp"])
def test_a_training_resumes_as_if_it_had_not_stopped(hvd: ModuleType, folder: Path, strategy: str | None) -> None:
    """In the middle of an epoch: weights, moments, rates, and the samples that are left in their order."""
    whole = objects(hvd, strategy)
    used = train(hvd, whole, hvd.checkpoint(*whole, folder=folder / "whole"))
    first = objects(hvd, strategy)
    before = train(hvd, first, hvd.checkpoint(*first, folder=folder, every="4 steps"), stop=9)
    torch.manual_seed(100 + hvd.rank())  # the data are shuffled as the checkpoint says
    again = objects(hvd, strategy)
    saved = hvd.checkpoint(*again, folder=folder, resume=True)
    assert (saved.steps, saved.epoch) == (8, 1)
    after = train(hvd, again, saved)
    assert before[: 8 * BATCH] + after == used
    assert torch.equal(weights(again[0]), weights(whole[0]))
    assert again[1].param_groups[0]["lr"] == whole[1].param_groups[0]["lr"] == 0.1 / 4


def test_the_newest_and_the_best_stay(hvd: ModuleType, folder: Path) -> None:
    model = nn.Linear(2, 2)
    saved = hvd.checkpoint(model, every="2 steps", keep=2, best="val_loss", folder=folder)
    checkpoint_losses = iter([3.0, 1.0, float("nan"), 2.0])
    for step in range(1, 11):
        if step in (3, 5, 7, 9):
            hvd.log(val_loss=next(checkpoint_losses) if hvd.rank() == 0 else 0.0)
        saved.step()
    assert names(hvd, folder) == ["step-00000005-best.pt", "step-00000008.pt", "step-00000010.pt"]
    best = hvd.load(folder / "step-00000005-best.pt")
    assert (best["steps"], best["best"]) == (5, 1.0)
    assert (folder.stat().st_mode & 0o777) == 0o700
    # One that resumes knows how good the best was.
    saved = hvd.checkpoint(model, best="val_loss", folder=folder, resume=True)
    assert saved.steps == 10
    hvd.log(val_loss=2.0)
    saved.step()
    assert "step-00000011-best.pt" not in names(hvd, folder)


def test_every_epoch_and_the_end(hvd: ModuleType, folder: Path) -> None:
    saved = hvd.checkpoint(nn.Linear(2, 2), folder=folder)
    for _ in saved.epochs(2):
        saved.step()
        saved.step()
    assert names(hvd, folder) == ["step-00000002.pt", "step-00000004.pt"]
    saved = hvd.checkpoint(nn.Linear(2, 2), every="5 h", folder=folder / "timed")
    for _ in saved.epochs(2):
        saved.step()
    assert names(hvd, folder / "timed") == ["step-00000002.pt"]
    saved = hvd.checkpoint(nn.Linear(2, 2), every="0.000001 s", folder=folder / "often")
    saved.step()
    saved.step()
    assert names(hvd, folder / "often") == ["step-00000001.pt", "step-00000002.pt"]


def test_an_older_training_in_the_folder_is_not_taken_for_the_newest(hvd: ModuleType, folder: Path) -> None:
    saved = hvd.checkpoint(nn.Linear(2, 2), every="50 steps", folder=folder)
    for _ in range(100):
        saved.step()
    saved = hvd.checkpoint(nn.Linear(2, 2), every="1 steps", folder=folder)
    saved.step()
    hvd.barrier()
    assert hvd.checkpoint(nn.Linear(2, 2), folder=folder, resume=True).steps == 1


def test_rates_that_grow_with_the_ranks_do_so_after_another_number_has_trained(hvd: ModuleType, folder: Path) -> None:
    def scaled() -> Any:
        model = nn.Linear(2, 2)
        return hvd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), scale_lr=True)

    model, optimizer = scaled()
    optimizer.param_groups[0].update(lr=0.3, lr_scale=3)  # as three ranks have it
    hvd.checkpoint(model, optimizer, every="1 steps", folder=folder).step()
    hvd.barrier()
    model, optimizer = scaled()
    hvd.checkpoint(model, optimizer, folder=folder, resume=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * hvd.size())


def test_where_a_run_of_a_notebook_resumes(hvd: ModuleType, folder: Path) -> None:
    saved = hvd.checkpoint(nn.Linear(2, 2), every="1 steps", folder=folder / "earlier")
    saved.step()
    hvd.barrier()
    try:
        checkpoint_place.begin(str(folder / "now"), str(folder / "earlier" / "step-00000001.pt"))
        saved = hvd.checkpoint(nn.Linear(2, 2))
    finally:
        checkpoint_place.of_run.folder = checkpoint_place.of_run.resume = None
    assert (saved.steps, saved.folder) == (1, folder / "now")


def test_wrong_arguments(hvd: ModuleType, folder: Path) -> None:
    with pytest.raises(TypeError, match="argument 2 is of class int"):
        hvd.checkpoint(nn.Linear(2, 2), 3)
    with pytest.raises(ValueError, match=r"every must be like '10min'.* got '5 minutes'"):
        hvd.checkpoint(nn.Linear(2, 2), every="5 minutes")
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        hvd.checkpoint(nn.Linear(2, 2), keep=0)
    hvd.checkpoint(nn.Linear(2, 2), every="1 steps", folder=folder).step()
    hvd.barrier()
    with pytest.raises(RingError, match="has 1 objects, got 2; pass to checkpoint"):
        hvd.checkpoint(nn.Linear(2, 2), nn.Linear(2, 2), folder=folder, resume=True)
    sharded = objects(hvd, "fsdp")
    with pytest.raises(RingError, match=r"is one file, of a model without prepare\(strategy='fsdp'\)"):
        hvd.checkpoint(sharded[0], folder=folder, resume=True)


def test_a_checkpoint_that_a_notebook_asks_for_is_written_at_the_next_step(hvd: ModuleType, folder: Path) -> None:
    """As some minutes before the time limit of a batch job."""
    saved = hvd.checkpoint(nn.Linear(2, 2), every="5 h", folder=folder)
    saved.step()
    checkpoint_place.ask()
    saved.step()
    saved.step()
    assert names(hvd, folder) == ["step-00000002.pt"]
    checkpoint_place.of_run.take_due()
