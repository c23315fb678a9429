"""Checkpoints of PyTorch: `save` and `load`, and what a `checkpoint` has of models, optimizers and loaders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ring_notebook.api.basics import barrier, rank, size
from ring_notebook.api.checkpoints import Checkpoint
from ring_notebook.api.preparation import of_another
from ring_notebook.api.rank_0_files import read_on_rank_0, write_on_rank_0
from ring_notebook.core.logical_ranks import logical_size
from ring_notebook.errors import RingError
from ring_notebook.files.private_files import make_private_folder
from ring_notebook.torch.optimizer.local_optimizer import LocalOptimizer
from ring_notebook.torch.optimizer.logical_optimizer import is_logical
from ring_notebook.torch.training.loaders import PreparedLoader, resumable_sampler, state_of_sampler
from ring_notebook.torch.training.prepare import scale_rates, unwrapped

_REST = "rest.pt"  # in the folder of a sharded model


def save(obj: Any, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write ``obj`` (as `torch.save`) to ``path`` on rank 0; the other ranks return at once.

    The file appears complete or not at all: it is written beside ``path``, synced to disk and renamed. Removes what an
    earlier call that was killed has left there. A checksum at its end lets `load` detect damage; `torch.load` ignores
    it. With ``private`` the file, and the folders that this makes, are readable by this user only, whatever the umask.
    """
    write_on_rank_0(Path(path), lambda file: torch.save(obj, file), private=private)


def load(path: str | os.PathLike[str], weights_only: bool = True, *, private: bool = False) -> Any:
    """Return the object that `save` wrote, on every rank, with its tensors in CPU memory; only rank 0 reads the file.

    All ranks must call this, and all raise RingError when rank 0 cannot read the file, or its checksum does not match.
    ``weights_only`` is `torch.load`'s: with False the file may run code when it is read. With ``private`` it must
    belong to this user or root, and have a checksum, which files of `torch.save` lack.
    """
    return read_on_rank_0(
        Path(path),
        lambda file: torch.load(file, map_location="cpu", weights_only=weights_only),
        private=private,
    )


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
    a sync. A loader of `prepare` resumes behind the batches that were used, in the order that it had, also one of an
    iterable data set, and on another number of ranks: see its ``load_state_dict``. Other loaders begin their pass
    again, which is said. Random numbers are not kept. Raises TypeError and ValueError for wrong arguments, and
    RingError for a checkpoint that does not fit.
    """
    if another := of_another("checkpoint", objects, "torch"):
        made: Checkpoint = another(
            *objects, every=every, keep=keep, best=best, largest=largest, folder=folder, resume=resume
        )
        return made
    for number, one in enumerate(objects, 1):
        if not isinstance(one, DataLoader) and not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(
                f"checkpoint takes what has state_dict() and load_state_dict(), and loaders; argument {number} is of "
                f"class {type(one).__name__}"
            )
    saved = TorchCheckpoint(objects, every, keep, best, largest, folder)
    saved.resume_as(resume)
    return saved


class TorchCheckpoint(Checkpoint):
    """The checkpoints of one training with PyTorch, see `checkpoint`."""

    _suffix = ".pt"

    def __init__(self, objects: tuple[Any, ...], *options: Any) -> None:
        self._models = [one for one in objects if isinstance(one, nn.Module)]
        self._optimizers = [one for one in objects if isinstance(one, Optimizer)]
        self._loaders = [one for one in objects if isinstance(one, DataLoader)]
        sharded = any(hasattr(one, "device_mesh") for model in self._models for one in model.parameters())
        if sharded and len(self._models) != 1:
            raise ValueError(f"checkpoint takes one model of strategy='fsdp', got {len(self._models)} models")
        if sharded:  # models and optimizers are written in shards
            objects = tuple(one for one in objects if not isinstance(one, (nn.Module, Optimizer)))
            self._all_write, self._suffix = True, ""
        super().__init__(objects, *options)

    def begin_epoch(self) -> None:
        """Loaders of `prepare` have the order of this epoch."""
        for loader in self._loaders:
            if sampler := resumable_sampler(loader):
                sampler.set_epoch(self.epoch)

    def _local(self) -> list[LocalOptimizer]:
        return [one for one in self._optimizers if isinstance(one, LocalOptimizer)]

    def ranks_are_equal(self) -> bool:
        """With local steps the weights of the ranks are equal only behind a sync."""
        return all(one.ends_round for one in self._local())

    def end_training(self) -> None:
        """With local steps, sync."""
        for one in self._local():
            one.sync()

    def state_of(self, one: Any) -> Any:
        """As ``state_dict``; of a loader what decides its order, and where it stands."""
        if isinstance(one, DataLoader):
            return self._state_of_loader(one)
        return unwrapped(one).state_dict() if isinstance(one, nn.Module) else one.state_dict()

    def _state_of_loader(self, loader: Any) -> dict[str, Any]:
        if isinstance(loader, PreparedLoader):
            return loader.state_dict(is_in_pass=self.batch > 0)
        if (sampler := resumable_sampler(loader)) is None:
            return {}
        return state_of_sampler(sampler) | ({} if self.batch else {"used": 0})

    def restored(self, one: Any, state: Any) -> Any:
        """The object itself."""
        if not isinstance(one, DataLoader):
            (unwrapped(one) if isinstance(one, nn.Module) else one).load_state_dict(state)
        elif isinstance(one, PreparedLoader) and state:
            one.load_state_dict(state)
        elif state and (sampler := resumable_sampler(one)):
            sampler.load_state_dict(state)
        return one

    def remarks(self) -> list[str]:
        """How the passes of loaders continue, where they are not divided as without the break."""
        if not self.batch:
            return []
        return [_remark(loader) for loader in self._loaders]

    def set_content(self, content: dict[str, Any], path: Path) -> None:
        """Also with another number of ranks."""
        if self._all_write:
            self._load_shards(path)
        if "used" in content:  # in files of version 0.2: samples of the epoch, of all loaders
            place = {"used": content["used"], "epoch": content["epoch"]}
            content["objects"] = [
                state | place if isinstance(one, DataLoader) and state else state
                for one, state in zip(self._objects, content["objects"], strict=True)
            ]
        super().set_content(content, path)
        for optimizer in self._optimizers:
            if any("lr_scale" in group for group in optimizer.param_groups):  # perhaps by another number of ranks
                schedulers = [one for one in self._objects if isinstance(one, LRScheduler)]
                scale_rates(optimizer, schedulers, logical_size() if is_logical(optimizer) else size())

    def write(self, target: Path) -> None:
        """A file of `save`, or a folder of shards."""
        if self._all_write:
            self._write_shards(target)
        else:
            save(self.content(), target, private=True)

    def read(self, path: Path) -> dict[str, Any]:
        """With `load`."""
        content: dict[str, Any] = load(path / _REST if self._all_write else path, weights_only=False, private=True)
        return content

    def check_kind(self, path: Path) -> None:
        """Also tells shards from whole files."""
        if self._all_write != path.is_dir():
            made = "with" if path.is_dir() else "without"
            raise RingError(
                f"rank {rank()}: {path} was made {made} prepare(strategy='fsdp'); prepare the model as then"
            )
        super().check_kind(path)

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
            save(self.content(), partial / _REST, private=True)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        barrier()

    def _shards(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._models[0], self._optimizers)
        return {"model": model, "optimizer": optimizer}

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


def _remark(loader: Any) -> str:
    if isinstance(loader, PreparedLoader):
        return loader.about_continuation
    return "" if resumable_sampler(loader) else f"{type(loader).__name__} begins its pass again"
