"""Checkpoints of PyTorch: `save`, `load` and `checkpoint` for models, optimizers, schedulers and loaders."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ring_notebook.api.basics import rank, size
from ring_notebook.api.checkpoints import Checkpoint, is_url
from ring_notebook.api.objects import allgather_object, gather_objects
from ring_notebook.api.preparation import of_another
from ring_notebook.api.process_sets import global_process_set
from ring_notebook.api.rank_0_files import from_rank_0, read_on_rank_0, write_on_rank_0
from ring_notebook.core import logical_ranks, world
from ring_notebook.core.kept_state import continue_random, random_states
from ring_notebook.core.logical_ranks import logical_size
from ring_notebook.errors import RingError
from ring_notebook.files.checkpoint_folder import REST
from ring_notebook.files.remote_folder import RemoteFolder
from ring_notebook.text.error_text import cause_text
from ring_notebook.torch.optimizer.local_optimizer import LocalOptimizer
from ring_notebook.torch.optimizer.scalers_and_schedules import is_logical
from ring_notebook.torch.optimizer.wrapper import Wrapper, parameters_of
from ring_notebook.torch.process_group.run_store import keys_of_ranks
from ring_notebook.torch.tensors import is_sharded
from ring_notebook.torch.training.background_save import BackgroundSave, Part, tell, why_not_written
from ring_notebook.torch.training.kept_tensors import (
    InShards,
    gathered,
    has_adapters,
    has_sharded,
    of_adapters,
    put_back,
    renamed,
    take_out,
    taken_out,
    uncompiled_name,
)
from ring_notebook.torch.training.loaders import PreparedLoader, resumable_sampler, state_of_sampler
from ring_notebook.torch.training.prepare import scale_rates, sharded_as, unwrapped
from ring_notebook.torch.training.turn_state import continue_turns, kept_turns

if TYPE_CHECKING:
    from ring_notebook.torch.training.checkpoint_shards import Shards

_OF_PARAMETER = re.compile(r"state\.(\d+)\..*")
_RANDOM = "random"  # the name of random numbers in shards, by rank or logical rank
_NO_TURN = "none"


def save(obj: Any, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write ``obj`` (as `torch.save`) to ``path`` on rank 0; the other ranks return at once.

    The file appears complete or not at all: it is written beside ``path``, synced to disk and renamed. Removes files
    of an earlier call that was killed. A checksum at the end lets `load` detect damage; `torch.load` ignores it. With
    ``private`` only this user can read the file, and new folders, whatever the umask.

    Sharded tensors (DTensors of FSDP2 or tensor parallelism) in ``obj`` and its nested dicts and lists are written
    whole: then all ranks must call this with them, and gather one after the other. Raises ValueError on rank 0 where
    another object, such as a model, has them.
    """
    if has_sharded(obj):
        obj = gathered(obj, keep=rank() == 0)
    _save(obj, Path(path), private=private)


def _save(obj: Any, path: Path, *, private: bool) -> None:
    write_on_rank_0(path, lambda file: torch.save(obj, file, pickle_module=_WholeTensors), private=private)


class _WholeTensors:
    """The module with which `torch.save` pickles: ``pickle``, which also refuses to write a share of a tensor."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Tensor) and is_sharded(obj):
                raise ValueError(
                    f"rank {rank()}: save: a tensor of shape {list(obj.shape)} is sharded over ranks, and rank 0 has a "
                    "share of it only; give the state_dict() of what has it to save() on all ranks, or all objects of "
                    "the training to ring.checkpoint()"
                )
            return NotImplemented


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
    resume: bool | str | os.PathLike[str] | None = None,
    background: bool = False,
) -> Checkpoint:
    """Write checkpoints of a training, and continue from the last one; all ranks call this, after `prepare`.

        saved = ring.checkpoint(model, optimizer, loader, every="10min", background=True, best="val_loss")
        for epoch in saved.epochs(10):
            for x, y in loader:
                ...
                optimizer.step()
                saved.step()
            ring.log(val_loss=validate(model))

    Takes models, optimizers, schedulers, loaders and other objects with ``state_dict`` and ``load_state_dict``, in the
    same order in every run. They must be equal on all ranks or sharded as DTensors; stages of a pipeline are neither.
    For a model of peft it keeps the adapters and other trained weights, without frozen ones; what torch.compile has
    compiled is kept under the names from before. It resumes on any number of ranks.

    Rank 0 writes one file with `save`. With ``background``, at a URL, and with sharded parameters (FSDP2, tensor
    parallelism), each rank writes its part into a folder that all ranks see, in the format of
    torch.distributed.checkpoint, with the random numbers of all ranks. Either kind of checkpoint resumes any model,
    except that a file resumes no sharded model.

    every: "10min", "2h", "100 steps", "epoch" or "5 epochs"; there is also one at the end of `Checkpoint.epochs`.
    keep: how many of the newest stay on disk.
    best: a metric that `log` records on rank 0: when it is smaller than ever (``largest``: larger), that checkpoint
        stays on disk too.
    folder: by default the run's, in a script ``checkpoints``; only this user can read it. Or a URL that fsspec knows,
        such as ``s3://bucket/run``.
    resume: True continues from the newest checkpoint, "best" from the best, a path or URL from that one; the default as
        ``%%ringtrain --resume`` says. With True a script without a checkpoint begins anew.
    background: copy the state when a checkpoint is due, and write the copy while the training continues. A checkpoint
        that is due while another is being written begins after it; if it is the ``best``, steps wait until then.
        `Checkpoint.epochs` and `Checkpoint.wait` return when it is complete.

    A checkpoint gets its name when every rank has written; a failed one leaves earlier ones as they are, also one of
    the same step. In the background rank 0 then reports which rank failed and why, and the training continues.
    Otherwise, and at the end of `Checkpoint.epochs`, all ranks raise RingError; if rank 0 writes alone, it raises
    OSError.

    A checkpoint that is due is written after the next sync with local steps (``sync_every``), and after the next step
    with ``accumulate``, unless it is the ``best``; `Checkpoint.epochs` ends with a sync. A loader of `prepare` resumes
    after the used batches, in its old order, even over an iterable data set and on another number of ranks: see its
    ``load_state_dict``. Other loaders begin their pass again, with a message. Raises TypeError and ValueError for wrong
    arguments, and RingError for a checkpoint that does not fit.
    """
    if another := of_another("checkpoint", objects, "torch"):
        if background:
            raise TypeError("checkpoint(background=True) is for PyTorch; leave it out for other frameworks")
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
    saved = TorchCheckpoint(objects, every, keep, best, largest, folder, background=background)
    saved.resume_as(resume)
    return saved


class TorchCheckpoint(Checkpoint):
    """The checkpoints of one training with PyTorch, see `checkpoint`."""

    _suffix = ".pt"
    _takes_urls = True

    def __init__(self, objects: tuple[Any, ...], *options: Any, background: bool) -> None:
        """As the base class, and ``background`` of `checkpoint`."""
        super().__init__(objects, *options)
        self._models = [one for one in objects if isinstance(one, nn.Module)]
        self._optimizers = [one for one in objects if isinstance(one, Optimizer)]
        self._loaders = [one for one in objects if isinstance(one, DataLoader)]
        tensors = [one for model in self._models for one in (*model.parameters(), *model.buffers())]
        self._is_sharded = any(map(is_sharded, tensors))
        has_shares = self._is_sharded or any(map(is_sharded, chain.from_iterable(map(parameters_of, self._optimizers))))
        in_turns = any(map(is_logical, self._optimizers))  # then each rank writes the state of its logical ranks
        self._logical = logical_ranks.current() if in_turns else None
        self._all_write = has_shares or background or isinstance(self._place, RemoteFolder) or in_turns
        self._background = background
        self._own_shards: Shards | None = None
        self._save: BackgroundSave | None = None
        self._saves = 0
        self._store: Any = None
        self._generation: world.World | None = None  # of `_store`
        self._random: tuple[bytes, int | None] | None = None
        self._of_turns: list[bytes] = []

    @property
    def _shards(self) -> Shards:
        if self._own_shards is None:
            from ring_notebook.torch.training.checkpoint_shards import (
                Shards,  # torch's checkpoints take a second to import
            )

            self._own_shards = Shards(self._place)
        return self._own_shards

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own_shards": None, "_save": None, "_store": None, "_generation": None}

    def begin_epoch(self) -> None:
        """Give loaders of `prepare` the order of this epoch."""
        for loader in self._loaders:
            if sampler := resumable_sampler(loader):
                sampler.set_epoch(self.epoch)
        self._follow_random()
        if not self._in_pass():
            self._random = None

    def _local(self) -> list[LocalOptimizer]:
        return [one for one in self._optimizers if isinstance(one, LocalOptimizer)]

    def ranks_are_equal(self) -> bool:
        """With local steps the weights of the ranks are equal only after a sync."""
        return all(one.ends_round for one in self._local())

    def is_within_step(self) -> bool:
        """Whether micro-batches of the next step were used (``accumulate``), whose gradients are not kept."""
        return any(isinstance(one, Wrapper) and one.has_begun_step for one in self._optimizers)

    def end_training(self) -> None:
        """With local steps, sync."""
        for one in self._local():
            one.sync()

    def state_of(self, one: Any) -> Any:
        """As ``state_dict``; for a loader its order and position."""
        if isinstance(one, DataLoader):
            return self._state_of_loader(one)
        if not isinstance(one, nn.Module):
            return one.state_dict()
        model = _inner(one)
        state = model.state_dict()
        return renamed(of_adapters(model, state) if has_adapters(model) else state, uncompiled_name)

    def _state_of_loader(self, loader: Any) -> dict[str, Any]:
        if isinstance(loader, PreparedLoader):
            return loader.state_dict(is_in_pass=self.batch > 0)
        if (sampler := resumable_sampler(loader)) is None:
            return {}
        return state_of_sampler(sampler) | ({} if self.batch else {"used": 0})

    def restored(self, one: Any, state: Any) -> Any:
        """The object itself."""
        if isinstance(one, nn.Module):
            self._restore_model(_inner(one), state)
        elif isinstance(one, Optimizer):
            one.load_state_dict(_sharded_as(one, state))
        elif not isinstance(one, DataLoader) or (isinstance(one, PreparedLoader) and state):
            one.load_state_dict(state)
        elif state and (sampler := resumable_sampler(one)):
            sampler.load_state_dict(state)
        return one

    def _restore_model(self, model: nn.Module, state: dict[str, Any]) -> None:
        own = model.state_dict()
        names = {uncompiled_name(name): name for name in (*own, *(f"{path}." for path, _ in model.named_modules()))}
        state = renamed(state, lambda name: names.get(uncompiled_name(name), name))
        if not has_adapters(model):
            model.load_state_dict(state)
            return
        expected = of_adapters(model, own)
        if lacking := [*(expected.keys() - state.keys()), *(state.keys() - expected.keys())]:
            raise RingError(
                f"rank {rank()}: the checkpoint was written with other adapters: {sorted(lacking)[0]} is not in both, "
                f"and {len(lacking) - 1} more; build the model with the adapters of the checkpoint"
            )
        model.load_state_dict(state, strict=False)  # without the frozen weights

    def remarks(self) -> list[str]:
        """How the passes of loaders continue, if not as without the break."""
        if not self.batch:
            return []
        return [_remark(loader) for loader in self._loaders]

    def set_content(self, content: dict[str, Any], path: Path | str) -> None:
        """As the base class, on any number of ranks."""
        logical, then = self._logical.number if self._logical else 0, content.get("logical", 0)
        if logical != then:
            raise RingError(
                f"rank {rank()}: {path} was written by a training with {_in_words(then)}, this one has "
                f"{_in_words(logical)}; " + (f"pass logical={then} to prepare()" if then else "leave logical out")
            )
        if "ranks" in content:  # the tensors are in shards
            self._read_shards(content, path)
        if "used" in content:  # in files of version 0.2: samples of the epoch, of all loaders
            place = {"used": content["used"], "epoch": content["epoch"]}
            content["objects"] = [
                state | place if isinstance(one, DataLoader) and state else state
                for one, state in zip(self._objects, content["objects"], strict=True)
            ]
        super().set_content(content, path)
        for optimizer in self._optimizers:
            if any("lr_scale" in group for group in optimizer.param_groups):  # scaled, perhaps for other ranks
                schedulers = [one for one in self._objects if isinstance(one, LRScheduler)]
                scale_rates(optimizer, schedulers, logical_size() if is_logical(optimizer) else size())
        if self._of_turns:  # after loading models, whose state has rank 0's buffers
            continue_turns(map(unwrapped, self._models), self._of_turns)
            self._of_turns = []
        self._follow_random()
        for loader in self._in_pass():
            loader.before_next_pass(self._follow_random_at_last if self._logical is None else self._logical.draw_again)

    def write(self, target: Path) -> None:
        """A file of `save`, of rank 0 alone."""
        _save(self.content(), target, private=True)

    def read(self, path: Path | str) -> dict[str, Any]:
        """With `load`; of shards, all except the tensors."""
        content: dict[str, Any]
        if not isinstance(self._place, RemoteFolder):
            file = Path(path, REST) if Path(path).is_dir() else path
            content = load(file, weights_only=False, private=True)
            return content
        place = self._place
        content, reason = from_rank_0(
            lambda: torch.load(place.rest_of(str(path)), map_location="cpu", weights_only=False), "checkpoint"
        )
        if reason:
            raise RingError(f"rank {rank()}: rank 0 cannot load {path}: {reason}")
        return content

    def check_kind(self, path: Path | str) -> None:
        """As the base class; also raises RingError if a sharded model is to resume from a file."""
        if is_url(str(path)) or Path(path).is_dir():
            return
        super().check_kind(path)
        if self._is_sharded:
            raise RingError(
                f"rank {rank()}: {path} is one file, of a model without prepare(strategy='fsdp') or other shards; "
                "resume with the model as it was, and write a checkpoint with background=True, which also a sharded "
                "model resumes"
            )

    def is_writing(self) -> bool:
        """Whether this rank's thread is writing a checkpoint; rank 0's thread ends last."""
        return self._save is not None and self._save.is_running()

    def end_writing(self) -> None:
        """Wait for this rank's thread."""
        if self._save is not None:
            self._save.join()

    def wait(self) -> None:
        """Return when no checkpoint is being written in the background; all ranks call this.

        A rank waits as long as its disk makes progress. A checkpoint that is given up is reported, without an error.
        """
        if not self._all_write:
            return
        self.end_writing()
        has_failed, _ = from_rank_0(self._has_failed, "checkpoint has ended")
        if has_failed:
            self._written = -1

    def _has_failed(self) -> bool:
        return self._save is not None and (bool(self._save.failure) or self._save.is_running())

    def _write(self, is_best: bool, is_last: bool = False) -> None:
        if not self._all_write:
            super()._write(is_best, is_last)
            return
        self._write_shards(is_best, self._background and not is_last, self._begin_writing(is_best))

    def _write_shards(self, is_best: bool, background: bool, end: Callable[[bool], None]) -> None:
        """Write this rank's part, in the background or before this returns; all ranks call it."""
        step = self.steps
        content, tensors = self._parts()
        self._shards.plan(tensors)
        rest = io.BytesIO()
        if rank() == 0:
            torch.save(content, rest)
        begun, reason = from_rank_0(lambda: self._place.begin(step), "checkpoint begins")

        def finish(parts: list[Any]) -> None:
            self._shards.finish(begun, parts)
            newest = self._place.complete(begun, step, is_best, rest.getvalue())
            end(True)
            self.tidy(newest)

        def failed(reason: str) -> str:
            end(False)
            if begun:
                self._place.discard(begun)
            last = self._place.found()[-1:]
            return (
                f"the checkpoint after step {step} in {self._place} could not be written: {reason}; "
                + (f"the last one is {last[0].path}" if last else "there is none before it")
                + ("; training continues, and the next one is tried when it is due" if background else "")
            )

        if not background:
            self._write_now(begun, reason, finish, failed)
        elif reason:
            if rank() == 0:
                tell(failed(f"rank 0: {reason}"))
        else:
            self._write_later(begun, finish, failed)

    def _write_now(
        self, begun: str, reason: str, finish: Callable[[list[Any]], None], failed: Callable[[str], str]
    ) -> None:
        part: Any = None
        if not reason:
            try:
                part, own = self._shards.write(begun), ""
            except Exception as error:  # of the disk, the network or the storage
                own = why_not_written(error)
            ended = gather_objects((part, own), "parts of a checkpoint", global_process_set)
            reason = "; ".join(f"rank {number}: {why}" for number, (_, why) in enumerate(ended) if why)
            if not reason:
                reason = from_rank_0(lambda: finish([part for part, _ in ended]), "checkpoint is whole")[1]
        if reason:
            text = from_rank_0(lambda: failed(reason), "checkpoint has failed")[0]
            raise RingError(f"rank {rank()}: {text}; fix that, and write it again or resume from the last one")

    def _write_later(self, begun: str, finish: Callable[[list[Any]], None], failed: Callable[[str], str]) -> None:
        current = world.current()
        if self._generation is not current:
            self._store, self._generation, self._saves = keys_of_ranks(), current, 0
        self._saves += 1
        lacks = ""
        if self._save is not None and self._save.is_in_part():  # given up by rank 0, but it still uses its copies
            lacks = "its part of the checkpoint before is still being written, by a disk that does not answer"
        else:
            try:
                self._shards.copy()
            except Exception as error:  # out of memory, for instance: this rank's part fails
                lacks = cause_text(error)

        def write() -> Any:
            if lacks:
                raise RingError(lacks)
            return self._shards.write(begun)

        part = Part(write, lambda: self._shards.taken)
        self._save = BackgroundSave(self._saves, self._store, part, finish, failed)

    def _parts(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """The content without tensors, and the tensors for shards, by kind and name."""
        content = self.content() | {"ranks": size(), "logical": self._logical.number if self._logical else 0}
        flat: dict[str, Tensor] = {}
        states = []
        for one, name, state in zip(self._objects, self._names(), content["objects"], strict=True):
            tensors_of_one: dict[str, Tensor] = {}
            states.append(take_out(state, name, tensors_of_one, every=isinstance(one, nn.Module)))
            alike = _alike(one, name)
            flat |= {
                part: tensor
                for part, tensor in tensors_of_one.items()
                if rank() == 0 or is_sharded(tensor) or alike is None or part in alike
            }
        content["objects"] = states
        if self._logical is None:
            own = {str(rank()): random_states()}
        else:
            own = dict(zip(self._turns(), kept_turns(self._logical, map(unwrapped, self._models)), strict=True))
            if rank() != 0:
                del own[_NO_TURN]
        tensors: dict[str, dict[str, Tensor]] = {
            _RANDOM: {name: torch.frombuffer(bytearray(state), dtype=torch.uint8) for name, state in own.items()}
        }
        for name, tensor in flat.items():
            kind, _, rest = name.partition(".")
            tensors.setdefault(kind, {})[rest] = tensor
        return content, tensors

    def _names(self) -> list[str]:
        """The objects' names in shards, as in torch.distributed.checkpoint; from the second of a kind on, numbered."""
        kinds = [
            next((name for name, kind in _KINDS if isinstance(one, kind)), type(one).__name__.lower())
            for one in self._objects
        ]
        return [f"{kind}{n if (n := kinds[: place + 1].count(kind)) > 1 else ''}" for place, kind in enumerate(kinds)]

    def _read_shards(self, content: dict[str, Any], path: Path | str) -> None:
        """Put tensors from the shards at ``path`` into ``content``; of sharded tensors each rank reads its part."""
        tensors: dict[str, Tensor | None] = {}
        for one, name, state in zip(self._objects, self._names(), content["objects"], strict=True):
            own: dict[str, Tensor] = {}
            if isinstance(one, nn.Module):
                take_out(self.state_of(one), name, own, every=True)
            for kept in taken_out(state):
                there = own.get(uncompiled_name(kept.name))
                if there is not None and tuple(there.shape) != kept.shape:
                    raise RingError(
                        f"rank {rank()}: {path} has {kept.name} of shape {list(kept.shape)}, the model here has "
                        f"{list(there.shape)}; build the model as when it was written"
                    )
                tensors[kept.name] = _like(one, name, kept) if there is None else there
        random = [f"{_RANDOM}.{one}" for one in (self._turns() if self._logical else [rank() % content["ranks"]])]
        tensors |= dict.fromkeys(random)
        filled: dict[str, Tensor] = {}
        try:
            filled, reason = self._shards.read(str(path), tensors), ""
        except Exception as error:  # of torch, the disk or the storage
            reason = cause_text(error)
        for number, why in enumerate(allgather_object(reason, name="shards were read")):
            if why:
                raise RingError(f"rank {rank()}: rank {number} cannot read {path}: {why}")
        content["objects"] = [put_back(state, filled) for state in content["objects"]]
        states = [bytes(filled[one].numpy()) for one in random]
        if self._logical is None:
            self._random = states[0], rank() if rank() >= content["ranks"] else None
        else:
            self._of_turns = states

    def _turns(self) -> list[str]:
        """The names in shards of this rank's logical ranks, and last of the state outside of turns."""
        assert self._logical is not None
        return [str(self._logical.first + turn) for turn in range(self._logical.turns)] + [_NO_TURN]

    def _in_pass(self) -> list[Any]:
        """Loaders whose next pass continues in its middle. Its begin draws random numbers again."""
        return [loader for loader in self._loaders if isinstance(loader, PreparedLoader)] if self.batch else []

    def _follow_random(self) -> None:
        """Set the random numbers of the checkpoint, again whenever a resumed training has drawn others at a begin."""
        if self._random is not None:
            continue_random(*self._random)

    def _follow_random_at_last(self) -> None:
        self._follow_random()
        self._random = None


_KINDS: tuple[tuple[str, type], ...] = (("model", nn.Module), ("optimizer", Optimizer), ("scheduler", LRScheduler))


def _inner(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and `torch.compile`, in either order; any other model itself."""
    compiled = dict(model.named_children()).get("_orig_mod")
    inner = unwrapped(model) if compiled is None else compiled
    return model if inner is model else _inner(inner)


def _alike(one: Any, name: str) -> set[str] | None:
    """The names of an object's tensors that are equal on all ranks, so that any rank may write them; None: all.

    Of other tensors, such as statistics of each rank's batches, only rank 0's are kept.
    """
    if isinstance(one, nn.Module):
        return {f"{name}.{uncompiled_name(part)}" for part, _ in _inner(one).named_parameters(remove_duplicate=False)}
    return None if isinstance(one, Optimizer) and not isinstance(one, LocalOptimizer) else set()


def _sharded_as(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """``state`` of an unsharded training, with tensors sharded as their parameters are now."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, own in state.get("state", {}).items():
        parameter = parameters[number] if isinstance(number, int) and number < len(parameters) else None
        if parameter is None or not is_sharded(parameter) or not isinstance(own, dict):
            continue
        own.update({key: sharded_as(parameter, one) for key, one in own.items()})
    return state


def _like(one: Any, name: str, kept: InShards) -> Tensor | None:
    """An empty tensor, sharded like its parameter, for a tensor of an optimizer; None if that is not sharded."""
    match = _OF_PARAMETER.fullmatch(kept.name.removeprefix(f"{name}."))
    if not isinstance(one, Optimizer) or match is None:
        return None
    parameters = [parameter for group in one.param_groups for parameter in group["params"]]
    number = int(match[1])
    parameter = parameters[number] if number < len(parameters) else None
    if parameter is None or not is_sharded(parameter) or tuple(parameter.shape) != kept.shape:
        return None
    return torch.empty_like(parameter, dtype=kept.dtype, requires_grad=False).detach()


def _in_words(logical: int) -> str:
    return f"{logical} logical ranks" if logical else "no logical ranks"


def _remark(loader: Any) -> str:
    if isinstance(loader, PreparedLoader):
        return loader.about_continuation
    return "" if resumable_sampler(loader) else f"{type(loader).__name__} begins its pass again"
