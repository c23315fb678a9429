"""Each rank's share of what `fit` takes: arrays, PyDatasets, datasets of TensorFlow and loaders of PyTorch."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ring_notebook.api.basics import rank, size
from ring_notebook.keras.chosen_keras import IS_LEGACY, keras

_shares: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""By id: arrays that are shares already, for a cell that runs again."""
_Batches: Any = keras.utils.Sequence if IS_LEGACY else keras.utils.PyDataset


def is_data(value: Any) -> bool:
    """Whether `share` takes ``value``."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(is_data(one) for one in value)
    if isinstance(value, dict):
        return bool(value) and all(is_data(one) for one in value.values())
    return isinstance(value, _Batches) or _is_dataset(value) or _is_loader(value) or _is_array(value)


def share(data: Any) -> Any:
    """This rank's share of ``data``; all shares have the same number of batches or samples.

    Arrays: every p-th row of p ranks; tuples, lists and dicts of them too. Others: every p-th batch. The last ones,
    which not all ranks would get, are left out. Raises ValueError where there is not one for every rank, and for a
    ``tf.data.Dataset`` of unknown length.
    """
    if isinstance(data, (tuple, list)):
        return type(data)(share(one) for one in data)
    if isinstance(data, dict):
        return {name: share(one) for name, one in data.items()}
    if isinstance(data, _Batches):
        return data if isinstance(data, _Share) else _Share(data)
    if _is_dataset(data):
        return _share_of_dataset(data)
    if _is_loader(data):
        return import_module("ring_notebook.torch").prepare(data)
    return _share_of_array(data)


def _is_dataset(value: Any) -> bool:
    tensorflow: Any = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(value, tensorflow.data.Dataset)


def _is_loader(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.utils.data.DataLoader)


def _is_array(value: Any) -> bool:
    return bool(getattr(value, "shape", None)) and hasattr(value, "__getitem__")


def _each(count: int, what: str) -> int:
    if count < size():
        raise ValueError(f"prepare: {count} {what} for {size()} ranks; each needs at least one")
    return count // size()


def _share_of_array(array: Any) -> Any:
    if _shares.get(id(array)) is array:
        return array
    rows = _each(array.shape[0], "samples") * size()
    own = array[rank() : rows : size()]
    if isinstance(own, np.ndarray):
        _shares[id(own)] = own
    return own


def _share_of_dataset(dataset: Any) -> Any:
    if getattr(dataset, "_ring_share", False):
        return dataset
    tf: Any = sys.modules["tensorflow"]
    count = int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        raise ValueError(
            "prepare: the number of batches of this tf.data.Dataset is not known, and all ranks need the same; pass "
            "`dataset.apply(tf.data.experimental.assert_cardinality(batches))`"
        )
    own = dataset.shard(size(), rank())
    if count != tf.data.INFINITE_CARDINALITY:
        own = own.take(_each(count, "batches"))
    own._ring_share = True
    return own


class _Share(_Batches):  # type: ignore[misc]
    """Every p-th batch of another PyDataset."""

    def __init__(self, whole: Any) -> None:
        names = () if IS_LEGACY else ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{name: getattr(whole, name) for name in names})
        self.whole = whole
        self.ranks, self.rank = size(), rank()
        self._count = _each(len(whole), "batches")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self.whole[index * self.ranks + self.rank]

    def on_epoch_begin(self) -> None:
        """Let the whole dataset shuffle, for example; all ranks must do so alike."""
        if hasattr(self.whole, "on_epoch_begin"):
            self.whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """As `on_epoch_begin`."""
        if hasattr(self.whole, "on_epoch_end"):
            self.whole.on_epoch_end()
