"""What an elastic training keeps and can go back to: the state with its commits, and where a sampler stands."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from ring_notebook.api.basics import rank, size
from ring_notebook.api.elastic_training import State
from ring_notebook.api.objects import broadcast_object
from ring_notebook.error_text import error_text
from ring_notebook.errors import HorovodInternalError, RingError
from ring_notebook.torch.training import checkpoint
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


class TorchState(State):
    """The state of a training: ``model``, ``optimizer`` and whatever else is given, as attributes of those names.

    Values that have ``state_dict`` and ``load_state_dict`` (models, optimizers, schedulers, `ElasticSampler`) are kept
    by these, all others by copies. Raises ValueError for a name that the state itself needs. (Horovod: ``TorchState``.)
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        taken = [name for name in kwargs if name.startswith("_") or hasattr(self, name)]
        if taken:
            raise ValueError(f"a TorchState needs {', '.join(taken)} itself; choose another name")
        self.model = model
        self.optimizer = optimizer
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._names = ["model", "optimizer", *kwargs]
        self._path: Path | None = None
        self.save()

    def save(self) -> None:
        """Keep the present values in memory, as those to go back to."""
        self._saved = {name: copy.deepcopy(_content(getattr(self, name))) for name in self._names}

    def restore(self) -> None:
        """Go back to the values that were kept last."""
        self._load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take rank 0's values on all ranks, and keep them; samplers split the rest of the epoch again."""
        own = {name: _content(getattr(self, name)) for name in self._names}
        # The commits too: a rank may have made one that another, which a death kept from it, has not.
        contents, self.commits = broadcast_object((own, self.commits), name="elastic state")
        if rank() != 0:
            self._load(contents)
        self._split_samplers()
        self.save()

    def write(self) -> None:
        """Put what `save` has kept on disk too, where there is a folder for commits."""
        if self._path is not None:
            checkpoint.save(self._saved, self._path, private=True)

    def reset(self) -> None:
        """Have samplers read again which ranks there are."""
        self._split_samplers()

    def _split_samplers(self) -> None:
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, ElasticSampler):
                value.reset()

    def keep_on_disk(self, path: Path, load: bool = True) -> bool:
        """Put commits into ``path`` too. True when rank 0 found one there to ``load``, which now holds on all ranks.

        Raises RingError on all ranks when it is damaged, and when another user wrote it: a pickle runs code when it is
        loaded.
        """
        self._path = path
        found = load and broadcast_object(path.exists(), name="elastic resume")
        if found:
            try:
                self._load(checkpoint.load(path, weights_only=False, private=True))
            except HorovodInternalError:  # of another rank
                raise
            except Exception as error:
                raise RingError(
                    f"rank {rank()}: the commit {path} cannot be used: {type(error).__name__}: {error_text(error)}; "
                    "remove it, or set RING_COMMIT_DIR to another folder of your own, and the training begins anew"
                ) from error
            self.save()
        return bool(found)

    def remove_from_disk(self) -> None:
        """Take the commit on disk away: the training has ended."""
        if self._path is not None and rank() == 0:
            self._path.unlink(missing_ok=True)

    def _load(self, contents: dict[str, Any]) -> None:
        for name, content in contents.items():
            value = getattr(self, name)
            if _is_stateful(value):
                value.load_state_dict(content)
            else:
                setattr(self, name, content)


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _content(value: Any) -> Any:
    return value.state_dict() if _is_stateful(value) else value
