"""What resumes bit for bit, and checkpoints that all ranks write: sharded, in the background, at URLs, failing."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import load as load_with_torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.adapted import Adapted
from ring_notebook.errors import RingError
from ring_notebook.files.checkpoint_folder import LocalFolder
from ring_notebook.files.remote_folder import RemoteFolder

SAMPLES, BATCH = 72, 12  # of all ranks together: six steps an epoch
KINDS = ["plain", "ddp", "fsdp", "tensor", "adapters"]


class Model(nn.Sequential):
    """It may draw random numbers in each step."""

    def __init__(self, adapted: bool, draws: bool) -> None:
        first: nn.Module = nn.Linear(3, 12)
        drops = nn.Dropout(0.3 * draws)
        super().__init__(Adapted(first, 2) if adapted else first, drops, nn.Tanh(), nn.Linear(12, 2))
        if adapted:
            self.peft_config = {"default": None}


@pytest.fixture
def folder(hvd: ModuleType, tmp_path: Path) -> Path:
    """One of rank 0's, on all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path / "made" / "checkpoints"), name="folder"))


def objects(hvd: ModuleType, kind: str, draws: bool = True) -> list[Any]:
    """A model, its optimizer, its schedule, and its data where each rank has a share."""
    torch.manual_seed(5)
    model: Any = Model(kind == "adapters", draws)
    inputs = torch.randn(SAMPLES, 3)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :2] * 2)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH // hvd.size(), shuffle=True)
    if kind == "tensor":
        hvd.process_group()
        mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")
        model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if kind == "tensor":
        torch.manual_seed(hvd.rank())  # random numbers of its own, as each rank drops other parts
        return [model, optimizer, schedule]
    strategy = kind if kind in ("ddp", "fsdp") else None
    return list(hvd.prepare(model, optimizer, schedule, loader, strategy=strategy))


def batches(parts: list[Any], first: int) -> Any:
    if len(parts) == 4:
        return parts[3]
    made = [torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(step)) for step in range(6)]
    return [(inputs, inputs[:, :2] * 2) for inputs in made[first:]]


def train(parts: list[Any], saved: Any, epochs: int = 3, stop: int = -1) -> None:
    """The training, until ``stop`` steps."""
    model, optimizer, schedule = parts[:3]
    for _ in saved.epochs(epochs):
        for inputs, targets in batches(parts, saved.batch):
            if stop >= 0:
                saved.wait()  # else the one that is due at step 8 may have to wait for that of step 4
            if saved.steps == stop:
                return
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            saved.step()
        schedule.step()


def whole(tensor: Any) -> Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()  # type: ignore[no-any-return]


def state(parts: list[Any]) -> dict[str, Tensor]:
    """Parameters and moments."""
    model, optimizer = parts[:2]
    moments = {
        f"{number}.{name}": whole(value)
        for number, one in optimizer.state_dict()["state"].items()
        for name, value in one.items()
    }
    return moments | {name: whole(parameter) for name, parameter in model.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def names(hvd: ModuleType, folder: Path) -> list[str]:
    hvd.barrier()
    found = sorted(path.name for path in folder.iterdir())
    hvd.barrier()
    return found


@pytest.fixture
def pausing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Until it is set the disk takes nothing."""
    released, write = Event(), FileSystemWriter.write_data

    def held(writer: Any, plan: Any, planner: Any) -> Any:
        assert released.wait(60)
        return write(writer, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", held)
    yield released
    released.set()


@contextlib.contextmanager
def small_files(is_here: bool) -> Iterator[None]:
    """A disk on which no file may be larger than 256 KiB. The ranks' store is one too, a small one in memory."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("background", [True, False], ids=["background", "blocking"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sizes(1, 2, 3)
def test_a_training_resumes_bit_for_bit(hvd: ModuleType, folder: Path, kind: str, background: bool) -> None:
    """In the middle of an epoch: weights, moments, rates, samples, and random numbers where all ranks write."""
    draws = background or kind in ("fsdp", "tensor")
    expected = objects(hvd, kind, draws)
    train(expected, hvd.checkpoint(*expected, folder=folder / "whole", background=background))
    first = objects(hvd, kind, draws)
    saved = hvd.checkpoint(*first, folder=folder, every="4 steps", background=background)
    train(first, saved, stop=9)
    torch.manual_seed(100 + hvd.rank())
    again = objects(hvd, kind, draws)
    torch.manual_seed(200 + hvd.rank())
    saved = hvd.checkpoint(*again, folder=folder, resume=True, background=background)
    assert (saved.steps, saved.epoch, saved.batch) == (8, 1, 2)
    train(again, saved)
    assert_equal(state(again), state(expected))
    assert again[1].param_groups[0]["lr"] == expected[1].param_groups[0]["lr"] == 0.1 / 2
    if background and kind == "adapters":
        size_of = sum(file.stat().st_size for file in (folder / "step-00000008").glob("*.distcp"))
        assert size_of > 0
        kept = hvd.load(folder / "step-00000008" / "rest.pt", weights_only=False)["objects"][0]
        assert not [name for name in kept if "base_layer" in name]
        assert [name for name in kept if "lora_A" in name]


@pytest.mark.sizes(1, 2, 3)
def test_what_is_kept_are_the_weights_of_the_step(hvd: ModuleType, folder: Path, pausing: Event) -> None:
    """Steps change them while they are written."""
    parts = objects(hvd, "plain")
    model, optimizer = parts[:2]
    saved = hvd.checkpoint(*parts, folder=folder, every="2 steps", background=True)
    expected: dict[str, Tensor] = {}
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        if step == 2:
            expected = state(parts)
        saved.step()
    assert not [name for name in names(hvd, folder) if name.startswith("step")]  # it is not whole, and no step waited
    assert not torch.equal(state(parts)["0.weight"], expected["0.weight"])
    pausing.set()
    saved.wait()
    assert names(hvd, folder) == ["step-00000002"]
    again = objects(hvd, "plain")
    assert hvd.checkpoint(*again, folder=folder, resume=True, background=True).steps == 2
    assert_equal(state(again), expected)
    saved.step()  # the one that was due at step 4
    saved.wait()
    assert names(hvd, folder) == ["step-00000002", "step-00000005"]


@pytest.mark.parametrize("place", ["file", "local", "folder"])
def test_the_newest_and_the_best_stay(hvd: ModuleType, folder: Path, place: str) -> None:
    """Of files that rank 0 writes, in a folder of what all write, and where fsspec has the files."""
    torch.manual_seed(0)  # any rank may be the one that writes a tensor
    model = nn.Linear(20, 20)
    where = f"local://{folder}" if place == "local" else folder
    how: dict[str, Any] = {"best": "val_loss", "keep": 2, "folder": where, "background": place != "file"}
    end = ".pt" if place == "file" else ""
    saved = hvd.checkpoint(model, every="2 steps", **how)
    losses = iter([3.0, 1.0, float("nan"), 2.0])
    for step in range(1, 11):
        if step in (3, 5, 7, 9):
            hvd.log(val_loss=next(losses) if hvd.rank() == 0 else 0.0)
        saved.step()
        saved.wait()
    best = f"step-00000005{end}" if place == "local" else f"step-00000005-best{end}"
    assert names(hvd, folder) == [best, f"step-00000008{end}", f"step-00000010{end}"]
    assert place == "local" or (folder.stat().st_mode & 0o777) == 0o700
    if place == "file":
        assert hvd.load(folder / best)["best"] == 1.0
    if place == "local":
        assert (folder / best / "best").exists()
        # What was cut off there is no checkpoint.
        if hvd.rank() == 0:
            (folder / "step-00000099").mkdir()
            (folder / "step-00000099" / "__0_0.distcp").write_text("")
    hvd.barrier()
    again = nn.Linear(20, 20)
    saved = hvd.checkpoint(again, every="1 steps", resume=True, **how)
    assert saved.steps == 10
    assert torch.equal(again.weight, hvd.broadcast(model.weight.detach(), 0))
    saved.write_last()
    hvd.log(val_loss=2.0)  # one that resumes knows how good the best was
    saved.step()
    saved.wait()
    assert names(hvd, folder) == [best, *[f"step-000000{step}{end}" for step in (10, 11)]]


@pytest.mark.parametrize("place", ["local", "folder"])
def test_a_place_that_removes_nothing(
    hvd: ModuleType, folder: Path, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The new checkpoint is whole, and stays."""

    def refused(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    model = nn.Linear(20, 20)
    where = f"local://{folder}" if place == "local" else folder
    for background in (True, False) if place == "folder" else (True,):
        saved = hvd.checkpoint(model, every="1 steps", keep=1, folder=where, background=background)
        saved.step()
        saved.wait()
        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder if place == "local" else LocalFolder, "remove", refused)
            saved.step()
            saved.wait()
        kept = names(hvd, folder)
        assert [name[:13] for name in kept] == ["step-00000001", "step-00000002"]
        told = capfd.readouterr().err
        assert ("stay: " in told and "not permitted" in told) if hvd.rank() == 0 else not told
        saved.step()
        saved.wait()
        assert [name[:13] for name in names(hvd, folder)] == ["step-00000003"]
        folder = folder / "blocking"
        where = folder


def test_sharded_moments_without_their_model(hvd: ModuleType, folder: Path) -> None:
    """All ranks write them, as with the model."""
    parts = objects(hvd, "fsdp")
    train(parts, hvd.checkpoint(*parts, folder=folder), epochs=1)
    saved = hvd.checkpoint(parts[1], every="1 steps", folder=folder / "moments")
    saved.step()
    again = objects(hvd, "fsdp")
    hvd.checkpoint(again[1], folder=folder / "moments", resume=True)
    for one, other in zip(parts[1].state.values(), again[1].state.values(), strict=True):
        assert torch.equal(whole(one["exp_avg"]), whole(other["exp_avg"]))


def with_compiled(model: Any, what: str) -> Any:
    """``model``, the whole or a layer of which torch.compile compiles; its parameters have other names then."""
    if what == "layer":
        model[3] = torch.compile(model[3])
        return model
    return torch.compile(model) if what == "whole" else model


@pytest.mark.parametrize("strategy", ["file", "background", "ddp", "fsdp"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_model_and_a_plain_one_resume_each_other(hvd: ModuleType, folder: Path, strategy: str) -> None:
    background = strategy != "file"

    def made(seed: int, what: str) -> Any:
        torch.manual_seed(seed)
        model = with_compiled(Model(False, False), what if what == "layer" else "")
        model.register_buffer("seen", torch.tensor(float(seed)))
        if strategy in ("ddp", "fsdp"):
            model, _ = hvd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
        else:
            hvd.prepare(model)
        return with_compiled(model, what if what == "whole" else "")

    def values(model: Any) -> list[Tensor]:
        return [whole(one) for one in model.state_dict().values()]

    for number, what in enumerate(("", "layer", "whole")):
        model, where = made(number, what), folder / f"of {what}"
        hvd.checkpoint(model, folder=where, background=background).write_last()
        for other in ("", "layer", "whole"):
            again = made(9, other)
            hvd.checkpoint(again, folder=where, background=background, resume=True)
            torch.testing.assert_close(values(again), values(model), rtol=0, atol=0)
    # As they were written before, under the names of the compiled model.
    path = folder / "old" / "step-00000001.pt"
    old = {f"_orig_mod.{name}": whole(one) for name, one in Model(False, False).state_dict().items()}
    hvd.save({"objects": [old], "steps": 1, "epoch": 0, "batch": 0, "best": None}, path, private=True)
    hvd.barrier()
    if strategy in ("file", "background"):
        again = Model(False, False)
        hvd.checkpoint(again, folder=folder / "old", background=background, resume=True)
        torch.testing.assert_close(values(again), list(hvd.broadcast_object(list(old.values()))), rtol=0, atol=0)


def test_torch_reads_it(hvd: ModuleType, folder: Path) -> None:
    model = hvd.prepare(nn.Linear(20, 20))
    hvd.checkpoint(model, folder=folder, background=True).write_last()
    again = {"model": nn.Linear(20, 20).state_dict()}
    hvd.process_group()
    load_with_torch(again, checkpoint_id=folder / "step-00000000")
    assert torch.equal(again["model"]["weight"], model.weight)


@pytest.mark.sizes(1, 2, 3)
def test_a_part_that_cannot_be_written(hvd: ModuleType, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the background the training goes on, and is told; else all ranks raise. The one before stays."""
    model, last = nn.Sequential(*(nn.Linear(400, 400) for _ in range(hvd.size()))), hvd.size() - 1
    hvd.prepare(model)
    saved = hvd.checkpoint(model, every="1 steps", folder=folder, background=True)
    saved.step()
    saved.wait()
    with small_files(hvd.rank() == last):
        saved.step()
        saved.wait()
    assert names(hvd, folder) == ["step-00000001"]
    hvd.barrier()
    told = capfd.readouterr().err
    if hvd.rank() == 0:
        assert "the checkpoint after step 2" in told
        assert f"rank {last}: " in told
        assert "File too large" in told
        assert "step-00000001; training continues" in told
        assert told.count("the checkpoint after") == 1
    else:
        assert "checkpoint" not in told
    saved.step()
    saved.wait()
    assert names(hvd, folder) == ["step-00000001", "step-00000003"]
    saved = hvd.checkpoint(model, every="1 steps", folder=folder, resume=True, background=True)
    saved.step()
    saved.wait()
    assert names(hvd, folder)[-1] == "step-00000004"
    saved = hvd.checkpoint(model, every="9 steps", folder=folder, resume=True, background=True)
    saved.step()
    with small_files(hvd.rank() == last), pytest.raises(RingError, match=f"step 5.*rank {last}: .*File too large"):
        saved.write_last()
    assert names(hvd, folder)[-1] == "step-00000004"


@pytest.mark.parametrize("place", ["file", "folder", "background"])
def test_a_best_that_cannot_be_written_is_none(hvd: ModuleType, folder: Path, place: str) -> None:
    """The next one that is better than the best on disk is marked."""
    model, last = nn.Sequential(*(nn.Linear(400, 400) for _ in range(hvd.size()))), hvd.size() - 1
    model, _ = hvd.prepare(model, torch.optim.SGD(model.parameters()), strategy="fsdp" if place == "folder" else None)
    saved = hvd.checkpoint(model, every="9 steps", folder=folder, best="loss", background=place == "background")

    def step(loss: float) -> None:
        hvd.log(loss=loss)
        saved.step()
        saved.wait()

    end = ".pt" if place == "file" else ""
    step(3.0)
    with small_files(hvd.rank() == (0 if place == "file" else last)):
        if place == "background" or (place == "file" and hvd.rank() != 0):
            step(1.0)
        else:
            with pytest.raises((OSError, RuntimeError) if place == "file" else RingError):
                step(1.0)
    assert names(hvd, folder) == [f"step-00000001-best{end}"]
    step(4.0)
    assert names(hvd, folder) == [f"step-00000001-best{end}"]
    step(2.0)
    assert names(hvd, folder) == [f"step-00000001{end}", f"step-00000004-best{end}"]
    saved = hvd.checkpoint(model, folder=folder, best="loss", resume=True, background=place == "background")
    step(2.5)
    assert names(hvd, folder)[-1] == f"step-00000004-best{end}"


@pytest.mark.parametrize("strategy", [None, "fsdp"])
@pytest.mark.sizes(1, 3, slow=(4,))
def test_a_disk_that_is_full(
    hvd: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], strategy: str | None
) -> None:
    disk = Path(hvd.broadcast_object(str(tmp_path / "disk"), name="disk"))
    mounted = False
    if hvd.rank() == 0:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", disk]
        mounted = os.geteuid() == 0 and not subprocess.run(command, capture_output=True, check=False).returncode
    if not hvd.broadcast_object(mounted, name="mounted"):
        pytest.skip("no disk can be mounted here: that needs root")
    try:
        model: Any = nn.Linear(400, 400)  # 640 KB, of which two have room
        model, _ = hvd.prepare(model, torch.optim.SGD(model.parameters()), strategy=strategy)
        saved = hvd.checkpoint(model, every="1 steps", folder=disk / "kept", keep=3, background=True)
        for _ in range(4):
            saved.step()
            saved.wait()
        assert names(hvd, disk / "kept") == ["step-00000001", "step-00000002"]
        told = capfd.readouterr().err
        if hvd.rank() == 0:
            assert told.count("could not be written") == 2
            assert "No space left on device" in told
        assert hvd.checkpoint(model, folder=disk / "kept", resume=True).steps == 2
        with pytest.raises(RingError, match="No space left on device"):
            saved.write_last()
    finally:
        hvd.barrier()
        if hvd.rank() == 0:
            subprocess.run(["umount", disk], check=True)


@pytest.mark.sizes(1, 3)
def test_a_disk_that_does_not_answer(
    hvd: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its checkpoint is given up, and steps go on."""
    settings(checkpoint_timeout=1.0)
    released, write, last = Event(), FileSystemWriter.write_data, hvd.size() - 1
    model = nn.Linear(40, 40)
    saved = hvd.checkpoint(model, every="1 steps", folder=folder, background=True)
    saved.step()
    saved.wait()

    def held(writer: Any, plan: Any, planner: Any) -> Any:
        assert released.wait(60)
        return write(writer, plan, planner)

    if hvd.rank() == last:
        monkeypatch.setattr(FileSystemWriter, "write_data", held)
    saved.step()
    begin = time.monotonic()
    saved.wait()
    assert 0.9 < time.monotonic() - begin < 30
    told = capfd.readouterr().err
    if hvd.rank() == 0 and hvd.size() > 1:
        assert f"rank {last} has written nothing for 1 s" in told
    if hvd.rank() == last:
        assert told.count(f"rank {last}: the disk has taken nothing of a checkpoint for 1 s; training continues") == 1
    saved.step()  # nobody waits for it
    released.set()
    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    while saved._save is not None and saved._save.is_running():
        time.sleep(0.01)
    hvd.barrier()
    saved.step()
    saved.wait()
    assert names(hvd, folder)[-1] == "step-00000004"


def test_wrong_arguments(hvd: ModuleType, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"folder='nowhere://here' cannot be used: .*s3fs"):
        hvd.checkpoint(nn.Linear(2, 2), folder="nowhere://here")
    with pytest.raises(ValueError, match="every must be like '10min'"):
        hvd.checkpoint(nn.Linear(2, 2), every="0min", background=True)
    hvd.checkpoint(nn.Linear(20, 2), folder=folder, background=True).write_last()
    with pytest.raises(RingError, match=r"has model.weight of shape \[2, 20\], the model here has \[2, 30\]"):
        hvd.checkpoint(nn.Linear(30, 2), folder=folder, resume=True)
    if hvd.rank() == 0:
        (folder / "step-00000000" / ".metadata").unlink()
    hvd.barrier()
    with pytest.raises(RingError, match=r"rank 0 cannot read .*step-00000000.*metadata"):
        hvd.checkpoint(nn.Linear(20, 2), folder=folder, resume=True, background=True)


def test_memory_that_ranks_do_not_share(hvd: ModuleType) -> None:
    """Each process has a ``memory://`` of its own: a single rank may use it, as tests do."""
    saved = hvd.checkpoint(model := nn.Linear(20, 20), folder="memory://kept", background=True)
    if hvd.size() > 1:
        with pytest.raises(RingError, match=r"rank 0 does not see __\d_0.distcp, which rank \d has written"):
            saved.write_last()
        return
    saved.write_last()
    again = nn.Linear(20, 20)
    assert hvd.checkpoint(again, folder="memory://kept", resume=True).steps == 0
    assert torch.equal(again.weight, model.weight)
