"""A sampler that resumes an epoch after a failure, with the samples that have not been used."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from ring_notebook.api.basics import size
from ring_notebook.torch.training.data import share_of


class ElasticSampler(Sampler[int]):
    """Splits a data set over the ranks, and what is left of an epoch over the ranks of a new group.

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

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, with all samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Say that every rank has used a batch of ``batch_size`` samples; ``batch_idx`` is Horovod's, without use."""
        self.processed_num += batch_size * size()

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict` was taken, with the ranks of the present epoch."""
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
