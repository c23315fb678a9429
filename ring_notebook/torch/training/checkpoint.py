"""Checkpoints: rank 0 writes them completely or not at all, and reads them for all ranks; and when to write them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ring_notebook.api.basics import barrier, rank, size
from ring_notebook.api.objects import broadcast_object
from ring_notebook.core import metrics
from ring_notebook.core.checkpoint_place import of_run
from ring_notebook.errors import RingError
from ring_notebook.files.checkpoint_names import CHECKPOINTS, found, name_of
from ring_notebook.files.private_files import make_private_folder, open_own
from ring_notebook.files.whole_file import is_whole, whole_file
from ring_notebook.torch.optimizer.local_optimizer import LocalOptimizer
from ring_notebook.torch.training.data import DistributedSampler, batch_size_of
from ring_notebook.torch.training.prepare import scale_rates, unwrapped

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_REST = "rest.pt"  # in the folder of a sharded model
_EVERY = re.compile(r"(\d+(?:\.\d+)?) (s|min|h|steps?)$")


def save(obj: Any, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write ``obj`` (as `torch.save`) to ``path`` on rank 0; the other ranks return at once.

    The file appears complete or not at all: it is written beside ``path``, synced to disk and renamed. Removes what an
    earlier call that was killed has left there. A checksum at its end lets `load` detect damage; `torch.load` ignores
    it. With ``private`` the file, and the folders that this makes, are readable by this user only, whatever the umask.
    """
    if rank() != 0:
        return
    target = Path(path)
    if private:
        make_private_folder(target.parent)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target, private=private) as file:
        torch.save(obj, file)


def load(path: str | os.PathLike[str], weights_only: bool = True, *, private: bool = False) -> Any:
    """Return the object that `save` wrote, on every rank, with its tensors in CPU memory; only rank 0 reads the file.

    All ranks must call this, and all raise RingError when rank 0 cannot read the file, or its checksum does not match.
    ``weights_only`` is `torch.load`'s: with False the file may run code when it is read. With ``private`` it must
    belong to this user or root, and have a checksum, which files of `torch.save` lack.
    """
    loaded: tuple[Any, str] = (None, "")
    failure: Exception | None = None
    if rank() == 0:
        try:
            with open_own(Path(path)) if private else open(path, "rb") as file:
                if is_whole(file) in ((False, None) if private else (False,)):
                    raise RingError("it is damaged: its content does not match its checksum")
                loaded = (torch.load(file, map_location="cpu", weights_only=weights_only), "")
        except Exception as error:
            failure = error
            loaded = (None, f"{type(error).__name__}: {error}")
    obj, reason = broadcast_object(loaded, name="checkpoint")
    if failure is not None:
        raise failure
    if reason:
        raise RingError(f"rank {rank()}: rank 0 cannot load {path}: {reason}")
    return obj


def checkpoint(
    *objects: Any,
    every: str = "epoch",
    keep: int = 3,
    best: str = "",
    largest: bool = False,
    folder: str | os.PathLike[str] | None = None,
    resume: bool | None = None,
) -> Checkpoint:
    """Write checkpoints of a training, and continue from the last one; all ranks call this, after `prepare`.

        saved = ring.checkpoint(model, optimizer, loader, every="5 min", keep=3, best="val_loss")
        for epoch in saved.epochs(10):
            for x, y in loader:
                ...
                optimizer.step()
                saved.step()
            ring.log(val_loss=validate(model))

    Takes models, optimizers, schedulers, loaders and whatever else has ``state_dict`` and ``load_state_dict``, in the
    same order in every run. Rank 0 writes one file with `save`. A model of ``prepare(strategy="fsdp")`` is written by
    all ranks, with torch.distributed.checkpoint, into a folder that all of them see. Both resume on any number of
    ranks.

    every: "5 min", "30 s", "2 h", "100 steps" or "epoch"; there is also one at the end of `Checkpoint.epochs`.
    keep: how many of the newest stay on disk.
    best: a metric that `log` records on rank 0: when it is smaller than ever (``largest``: larger), the checkpoint then
        stays beside them.
    folder: by default that of the run, in a script ``checkpoints``. It is made readable by this user only.
    resume: continue from the last checkpoint; by default as ``%%ringtrain --resume`` says. A script whose folder has
        none begins anew.

    With local steps (``sync_every``) one that is due is written behind the next sync, and `Checkpoint.epochs` ends with
    a sync. A loader of `prepare` resumes behind the batches that were used, in the order that it had; up to ``size() -
    1`` samples are used again where the number of ranks changes. Other loaders begin their pass again. Random numbers
    are not kept. Raises TypeError and ValueError for wrong arguments, and RingError for a checkpoint that does not fit.
    """
    for number, one in enumerate(objects, 1):
        if not isinstance(one, DataLoader) and not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(
                f"checkpoint takes what has state_dict() and load_state_dict(), and loaders; argument {number} is of "
                f"class {type(one).__name__}"
            )
    if keep < 1:
        raise ValueError(f"checkpoint: keep must be at least 1, got {keep}")
    place = Path(folder) if folder is not None else of_run.folder or Path(CHECKPOINTS)
    saved = Checkpoint(objects, _Rhythm(every), keep, best, largest, place)
    last = of_run.resume
    if folder is not None or resume is not None:
        there = found(place) if rank() == 0 and (resume or (resume is None and last)) else []
        last = broadcast_object(there[-1].path if there else None, name="checkpoint to resume")
    if last is not None:
        saved.resume(last)
    return saved


class _Rhythm:
    """When a checkpoint is due, as ``every`` says. Raises ValueError for what it cannot read."""

    def __init__(self, every: str) -> None:
        match = _EVERY.match(every)
        if every != "epoch" and (match is None or not float(match[1])):
            raise ValueError(
                f"checkpoint: every must be like '5 min', '30 s', '2 h', '100 steps' or 'epoch', got {every!r}"
            )
        self.seconds = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0.0
        self.steps = int(float(match[1])) if match and match[2] not in _UNITS else 0
        self._since = monotonic()

    def restart(self) -> None:
        """Begin to wait now."""
        self._since = monotonic()

    def is_due(self, steps: int, epoch_ended: bool) -> bool:
        if self.seconds and monotonic() - self._since >= self.seconds:
            self._since = monotonic()
            return True
        return bool(steps % self.steps == 0 and not epoch_ended if self.steps else epoch_ended and not self.seconds)


class Checkpoint:
    """The checkpoints of one training, see `checkpoint`. ``steps`` and ``epoch`` say where it stands."""

    def __init__(
        self, objects: tuple[Any, ...], rhythm: _Rhythm, keep: int, best: str, largest: bool, folder: Path
    ) -> None:
        self.steps = 0
        self.epoch = 0
        self.folder = folder
        self._objects = objects
        self._models = [one for one in objects if isinstance(one, nn.Module)]
        self._optimizers = [one for one in objects if isinstance(one, Optimizer)]
        self._loaders = [one for one in objects if isinstance(one, DataLoader)]
        self._used = 0  # samples of the epoch, by all ranks
        self._rhythm = rhythm
        self._is_due = self._is_best_due = False
        self._keep = keep
        self._metric, self._sign = best, -1.0 if largest else 1.0
        self._best: float | None = None
        self._written = -1  # steps of the last one
        self._sharded = any(hasattr(one, "device_mesh") for model in self._models for one in model.parameters())
        if self._sharded and len(self._models) != 1:
            raise ValueError(f"checkpoint takes one model of strategy='fsdp', got {len(self._models)} models")
        if best:
            metrics.watch(best)

    def continue_here(self) -> None:
        """Continue in another process than the one that has made it."""
        self._rhythm.restart()
        if self._metric:
            metrics.watch(self._metric)

    def step(self) -> None:
        """Count a batch that every rank has used, and write a checkpoint where one is due. All ranks call it."""
        self.steps += 1
        self._used += size() * next((batch_size_of(loader) or 0 for loader in self._loaders), 0)
        self._write_when_due(epoch_ended=False)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs of a training of ``total`` that are left, the first of them as far as it had come."""
        while self.epoch < total:
            for loader in self._loaders:
                if isinstance(loader.sampler, DistributedSampler):
                    loader.sampler.set_epoch(self.epoch)
                    loader.sampler.used = self._used
            yield self.epoch
            self.epoch += 1
            self._used = 0
            self._write_when_due(epoch_ended=True)
        for one in self._local():
            one.sync()
        if self._written != self.steps or self._is_due:
            self._write(is_best=False)

    def _write_when_due(self, epoch_ended: bool) -> None:
        if rank() != 0 and not self._sharded:
            return
        due = self._rhythm.is_due(self.steps, epoch_ended) | of_run.take_due()
        is_best = self._is_best()
        if self._sharded:  # all ranks write, when rank 0 says so
            due, is_best = broadcast_object((due, is_best), name="checkpoint is due")
        # With local steps the weights of the ranks are equal only behind a sync: until then it stays due.
        self._is_due, self._is_best_due = self._is_due or due, self._is_best_due or is_best
        if (self._is_due or self._is_best_due) and all(one.ends_round for one in self._local()):
            self._write(self._is_best_due)

    def _local(self) -> list[LocalOptimizer]:
        return [one for one in self._optimizers if isinstance(one, LocalOptimizer)]

    def _is_best(self) -> bool:
        value = metrics.take(self._metric) if self._metric and rank() == 0 else None
        if value is None or isnan(value) or (self._best is not None and self._sign * value >= self._sign * self._best):
            return False
        self._best = value
        return True

    def _write(self, is_best: bool) -> None:
        self._written = self.steps
        self._is_due = self._is_best_due = False
        target = self.folder / name_of(self.steps, is_best, self._sharded)
        if self._sharded:
            self._write_shards(target)
        else:
            save(self._content(self._objects), target, private=True)
        if rank() == 0:
            self._tidy(target, is_best)

    def _content(self, objects: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "objects": [_state_of(one) for one in objects],
            "steps": self.steps,
            "epoch": self.epoch,
            "used": self._used,
            "best": self._best,
            "position": _of_all(metrics.position(), size()),
        }

    def _write_shards(self, target: Path) -> None:
        """A folder that takes its name when every rank has written its part."""
        from torch.distributed.checkpoint.state_dict_saver import save as save_shards

        partial = target.with_name(f".{target.name}.partial")
        if rank() == 0:
            make_private_folder(self.folder)
            for left in self.folder.glob(".step-*.partial"):
                shutil.rmtree(left)
        barrier()
        save_shards(self._shards(), checkpoint_id=partial)
        if rank() == 0:
            save(self._content(self._rest()), partial / _REST, private=True)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        barrier()

    def _shards(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._models[0], self._optimizers)
        return {"model": model, "optimizer": optimizer}

    def _rest(self) -> tuple[Any, ...]:
        """What is not written in shards."""
        return tuple(one for one in self._objects if not isinstance(one, (nn.Module, Optimizer)))

    def _tidy(self, newest: Path, is_best: bool) -> None:
        """Remove what is beyond ``keep``; of the best ones only the last stays beside them."""
        for one in found(self.folder):
            if one.best and is_best and one.path != newest:
                one.path.rename(one.path.with_name(name_of(one.step, False, self._sharded)))
        there = found(self.folder)
        best = {one.step for one in there if one.best}
        others = [one for one in there if not one.best]
        for one in [*others[: -self._keep], *(one for one in others[-self._keep :] if one.step in best)]:
            shutil.rmtree(one.path) if one.path.is_dir() else one.path.unlink()

    def resume(self, path: Path) -> None:
        """Load the checkpoint at ``path``, on all ranks. Raises RingError when it is damaged, or of other objects."""
        if self._sharded != path.is_dir():
            made = "with" if path.is_dir() else "without"
            raise RingError(
                f"rank {rank()}: {path} was made {made} prepare(strategy='fsdp'); prepare the model as then"
            )
        objects = self._rest() if self._sharded else self._objects
        content = load(path / _REST if self._sharded else path, weights_only=False, private=True)
        if len(content["objects"]) != len(objects):
            raise RingError(
                f"rank {rank()}: {path} has {len(content['objects'])} objects, got {len(objects)}; pass to "
                "checkpoint() what it was made with, in the same order"
            )
        if self._sharded:
            self._load_shards(path)
        for one, state in zip(objects, content["objects"], strict=True):
            _restore(one, state)
        for optimizer in self._optimizers:
            if any("lr_scale" in group for group in optimizer.param_groups):  # perhaps by another number of ranks
                scale_rates(optimizer, [one for one in objects if isinstance(one, LRScheduler)])
        self.steps = self._written = content["steps"]
        self.epoch, self._used, self._best = content["epoch"], content["used"], content["best"]
        if "position" in content:  # not in files of version 0.2
            metrics.continue_at(_of_all(content["position"], 1 / size()))
        if rank() == 0:
            print(f"Resumed after step {self.steps}, in epoch {self.epoch}, from {path}")  # noqa: T201

    def _load_shards(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load as load_shards

        state = self._shards()
        load_shards(state, checkpoint_id=path)
        set_state_dict(
            self._models[0],
            self._optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def _of_all(position: metrics.Position, ranks: float) -> metrics.Position:
    """A position with the samples of so many ranks, each of which has as many as rank 0."""
    rows, batch, step, samples, epoch = position
    return rows, batch, step, samples * ranks, epoch


def _state_of(one: Any) -> Any:
    if isinstance(one, DataLoader):
        return {"seed": one.sampler.seed} if isinstance(one.sampler, DistributedSampler) else {}
    return unwrapped(one).state_dict() if isinstance(one, nn.Module) else one.state_dict()


def _restore(one: Any, state: Any) -> None:
    if not isinstance(one, DataLoader):
        (unwrapped(one) if isinstance(one, nn.Module) else one).load_state_dict(state)
    elif isinstance(one.sampler, DistributedSampler) and "seed" in state:
        one.sampler.seed = state["seed"]
