"""The state of an elastic training with its commits, and a sampler that resumes within an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from ring_notebook.api.basics import rank, size
from ring_notebook.api.object_state import ObjectState
from ring_notebook.core import logical_ranks
from ring_notebook.errors import HostsUpdatedInterrupt
from ring_notebook.torch.training import checkpoint
from ring_notebook.torch.training.kept_tensors import has_sharded
from ring_notebook.torch.training.rank_shares import share_of
from ring_notebook.torch.training.turn_state import ElasticTurns


class ElasticSampler(Sampler[int]):
    """Splits a data set over the ranks, and the rest of an epoch over the ranks of a new generation.

    Put it into the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch, not
    at its beginning: it forgets what was recorded. ``seed`` is equal on all ranks. (Horovod: ``ElasticSampler``.)
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    @property
    def num_replicas(self) -> int:
        """The number of ranks."""
        return size()

    @property
    def rank(self) -> int:
        """This rank."""
        return rank()

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, with all samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has used a batch of ``batch_size`` samples; ``batch_idx`` is Horovod's, and unused."""
        self.processed_num += batch_size * size()

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict`, with the ranks of the present generation."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Split what is left of the epoch over the present ranks."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self._left = order[self.processed_num :]

    def __iter__(self) -> Iterator[int]:
        return share_of(self._left)

    def __len__(self) -> int:
        return -(-len(self._left) // size())


class TorchState(ObjectState):
    """The state of a training: ``model``, ``optimizer`` and other values, as attributes under their names.

    Values that have ``state_dict`` and ``load_state_dict`` (models, optimizers, schedulers, `ElasticSampler`) are kept
    by these, all others by copies; samplers split the rest of the epoch again after `sync`. Raises ValueError for a
    name that the state itself needs, and for values with sharded tensors, of which rank 0 has a share only. (Horovod:
    ``TorchState``.)
    """

    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._turns = ElasticTurns()
        super().__init__(model=model, optimizer=optimizer, **kwargs)
        self._names.append("_turns")
        self._saved["_turns"] = {}

    def content_of(self, value: Any) -> Any:
        """As `ObjectState.content_of`; raises ValueError for sharded tensors."""
        content = super().content_of(value)
        if has_sharded(content):
            named = next((repr(name) for name in self._names if getattr(self, name) is value), type(value).__name__)
            raise ValueError(
                f"rank {rank()}: TorchState: {named} has tensors that are sharded over ranks, which a commit on rank 0 "
                "cannot keep; leave it out of the state, and keep it with ring.checkpoint(), for which each rank "
                "writes its part"
            )
        return content

    def commit(self) -> None:
        """As `State.commit`; with logical ranks it does nothing before the end of a round."""
        if not _is_between():
            self._turns.keep()
            super().commit()

    def check_host_updates(self) -> None:
        """As `State.check_host_updates`; with logical ranks it does nothing before the end of a round."""
        if _is_between():
            return
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:  # on all ranks
            self._turns.keep()
            raise

    def sync(self) -> None:
        """Take rank 0's values on all ranks, and keep them; logical ranks keep their own state."""
        super().sync()
        if not self._turns.state_dict():
            self._turns.keep()
            self.save()

    def reset(self) -> None:
        """Adapt samplers and logical ranks to the present ranks."""
        self._turns.divide()
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, ElasticSampler):
                value.reset()

    def write(self) -> None:
        """Write what `save` has kept to disk, if there is a folder for commits."""
        if self._path is not None:
            checkpoint.save(self._saved, self._path, private=True)  # only rank 0 writes

    def read_on_all(self, path: Path) -> Any:
        """As `ObjectState.read_on_all`, with tensors sent without pickling."""
        return checkpoint.load(path, weights_only=False, private=True)


def _is_between() -> bool:
    logical = logical_ranks.current()
    return logical is not None and logical.is_between
