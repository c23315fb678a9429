"""Checkpoints of a training: when they are written, and which one a training resumes from."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ring_notebook.core.run_options import RunOptions, ask_for_checkpoint, of_run
from ring_notebook.errors import RingError


@pytest.fixture
def folder(hvd: ModuleType, tmp_path: Path) -> Path:
    """One of rank 0's, on all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path / "made" / "checkpoints"), name="folder"))


def names(hvd: ModuleType, folder: Path) -> list[str]:
    hvd.barrier()
    return sorted(path.name for path in folder.iterdir())


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
    saved = hvd.checkpoint(nn.Linear(2, 2), every="2 epochs", folder=folder / "epochs")
    for _ in saved.epochs(5):
        saved.step()
    assert names(hvd, folder / "epochs") == ["step-00000002.pt", "step-00000004.pt", "step-00000005.pt"]
    saved = hvd.checkpoint(nn.Linear(2, 2), every="3 epochs", keep=9, folder=folder / "epochs", resume=True)
    for _ in saved.epochs(7):
        saved.step()
    assert names(hvd, folder / "epochs")[-2:] == ["step-00000006.pt", "step-00000007.pt"]
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


@pytest.mark.parametrize("background", [False, True])
def test_a_new_checkpoint_stays_beside_the_best_of_an_earlier_training(
    hvd: ModuleType, folder: Path, background: bool
) -> None:
    """Of the same step; it takes that one's place, as it does of an ordinary one."""
    how: dict[str, Any] = {"every": "1 steps", "folder": folder, "background": background}
    earlier = hvd.checkpoint(nn.Linear(2, 2), best="loss", **how)
    earlier.step()
    hvd.log(loss=1.0)
    earlier.step()
    earlier.wait()
    end = "" if background else ".pt"
    assert names(hvd, folder) == [f"step-00000001{end}", f"step-00000002-best{end}"]
    model = nn.Linear(2, 2)
    hvd.prepare(model)
    saved = hvd.checkpoint(model, **how)
    for steps in (1, 2, 3):
        saved.step()
        saved.wait()
        assert names(hvd, folder)[:steps] == [f"step-{step:08}{end}" for step in range(1, steps + 1)]
        again = nn.Linear(2, 2)
        assert hvd.checkpoint(again, folder=folder, background=background, resume=True).steps == steps
        assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize("background", [False, True])
def test_the_best_stays_marked_when_its_step_is_written_again(hvd: ModuleType, folder: Path, background: bool) -> None:
    """As at the end of an epoch, or because the notebook asks for it; also after a resume."""
    end = "" if background else ".pt"
    how: dict[str, Any] = {"folder": folder, "best": "loss", "background": background}
    saved = hvd.checkpoint(nn.Linear(2, 2), **how)
    for _ in saved.epochs(1):
        hvd.log(loss=1.0)
        saved.step()
    assert names(hvd, folder) == [f"step-00000001-best{end}"]
    for one in (saved, hvd.checkpoint(nn.Linear(2, 2), resume=True, **how)):
        hvd.barrier()
        ask_for_checkpoint()
        one.write_when_due(0, None)
        one.wait()
        assert names(hvd, folder) == [f"step-00000001-best{end}"]
    of_run.is_checkpoint_due = False


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


@pytest.mark.parametrize(("every", "background"), [("3 steps", False), ("epoch", False), ("3 steps", True)])
def test_a_step_of_several_batches_is_kept_whole(hvd: ModuleType, folder: Path, every: str, background: bool) -> None:
    def trained(until: int, resume: bool) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        model, data = nn.Linear(6, 1), TensorDataset(torch.randn(12 * hvd.size(), 6))
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, loader = hvd.prepare(model, made, DataLoader(data, batch_size=4), accumulate=2)
        saved = hvd.checkpoint(
            *(model, optimizer, loader), every=every, keep=9, folder=folder, resume=resume, background=background
        )
        used = []
        for _ in saved.epochs(4):
            for (x,) in loader:
                used.append(saved.steps)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                saved.step()
                if saved.steps == until:
                    saved.wait()
                    return list(model.parameters()), used
        return list(model.parameters()), used

    whole, _ = trained(0, False)
    if background:  # where one that is due may have to wait for another
        assert names(hvd, folder)[0] == "step-00000004"
    else:
        assert names(hvd, folder) == [f"step-{step:08}.pt" for step in (4, 6, 10, 12)]
    hvd.barrier()
    for path in folder.iterdir() if hvd.rank() == 0 else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    trained(5, False)
    hvd.barrier()
    resumed, used = trained(0, True)
    assert used[0] == 4
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_where_a_run_of_a_notebook_resumes(hvd: ModuleType, folder: Path) -> None:
    saved = hvd.checkpoint(nn.Linear(2, 2), every="1 steps", folder=folder / "earlier")
    saved.step()
    hvd.barrier()
    try:
        of_run.begin(str(folder / "now"), str(folder / "earlier" / "step-00000001.pt"), 1, 0)
        assert of_run.is_lost("resume")
        hvd.checkpoint(nn.Linear(2, 2), resume=False)
        hvd.checkpoint(nn.Linear(2, 2), folder=folder / "empty")
        assert of_run.is_lost("resume")
        saved = hvd.checkpoint(nn.Linear(2, 2))
        assert not of_run.is_lost("resume")
    finally:
        vars(of_run).update(vars(RunOptions()))
    assert (saved.steps, saved.folder) == (1, folder / "now")


@pytest.mark.parametrize("place", ["file", "folder", "url"])
def test_which_checkpoint_resumes(hvd: ModuleType, folder: Path, place: str) -> None:
    where: Any = f"local://{folder}" if place == "url" else folder
    how: dict[str, Any] = {"folder": where, "background": place == "folder"}
    saved = hvd.checkpoint(nn.Linear(2, 2), every="1 steps", best="loss", **how)
    for loss in (2.0, 1.0, 3.0):
        hvd.log(loss=loss)
        saved.step()
        saved.wait()
    there = names(hvd, folder)

    def steps(resume: Any, **others: Any) -> int:
        hvd.barrier()
        found: int = hvd.checkpoint(nn.Linear(2, 2), resume=resume, **(how | others)).steps
        return found

    assert (steps(None), steps(False), steps(True), steps("best")) == (0, 0, 3, 2)
    for name in there:
        named = f"{where}/{name}" if place == "url" else folder / name
        assert steps(str(named)) == int(name[5:13])
        if place != "url":
            assert steps(named, folder=folder / "new") == int(name[5:13])
    with pytest.raises(RingError, match=r"rank \d: .*resume='last'.* no checkpoint; pass True .*'best'.*step-00000003"):
        steps("last")
    with pytest.raises(RingError, match=r"no checkpoint"):
        steps(where if place == "url" else folder)
    with pytest.raises(RingError, match=r"resume='best'\): .*/new has none"):
        steps("best", folder=f"{where}/new" if place == "url" else folder / "new")
    with pytest.raises(RingError, match=r"pass folder="):
        steps("s3://bucket/run/step-00000001")
    for wrong in (3, 1, "", 2.5, [folder]):
        with pytest.raises(TypeError, match=r"checkpoint: resume must be .* got"):
            steps(wrong)


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
    model = nn.Linear(2, 2)
    sharded, _ = hvd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="fsdp")
    with pytest.raises(RingError, match=r"is one file, of a model without prepare\(strategy='fsdp'\)"):
        hvd.checkpoint(sharded, folder=folder, resume=True)


def test_a_checkpoint_that_a_notebook_asks_for_is_written_at_the_next_step(hvd: ModuleType, folder: Path) -> None:
    """As some minutes before the time limit of a batch job."""
    saved = hvd.checkpoint(nn.Linear(2, 2), every="5 h", folder=folder)
    saved.step()
    ask_for_checkpoint()
    saved.step()
    saved.step()
    assert names(hvd, folder) == ["step-00000002.pt"]
    of_run.is_checkpoint_due = False


def test_the_best_value_of_another_metric_is_forgotten(hvd: ModuleType, folder: Path) -> None:
    saved = hvd.checkpoint(nn.Linear(2, 2), every="1 steps", folder=folder, best="loss")
    hvd.log(loss=0.1)
    saved.step()
    first = folder / names(hvd, folder)[0]
    for best, largest, value in (("accuracy", True, 0.05), ("loss", True, 0.05), ("loss", False, 0.5)):
        where = folder / f"{best}-{largest}"
        again = hvd.checkpoint(nn.Linear(2, 2), every="1 steps", folder=where, best=best, largest=largest)
        again.resume(first)
        hvd.log(**{best: value})
        again.step()
        is_best = "best" in "".join(names(hvd, where))
        assert is_best == ((best, largest) != ("loss", False)), (best, largest)
