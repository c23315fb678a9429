"""Errors: each can be caught as what Horovod and Python call it."""

from __future__ import annotations

import pickle

import pytest

from ring_notebook import errors

NAMES = sorted(
    name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
)


def test_every_error_is_a_ring_error_and_a_runtime_error() -> None:
    classes = [getattr(errors, name) for name in NAMES]
    assert [cls for cls in classes if not issubclass(cls, errors.RingError) or not issubclass(cls, RuntimeError)] == []


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (errors.CollectiveMismatch, errors.HorovodInternalError),
        (errors.CollectiveAborted, errors.HorovodInternalError),
        (errors.CollectiveTimeout, errors.HorovodInternalError),
        (errors.NotInitializedError, ValueError),
        (errors.OutOfRingMemoryError, MemoryError),
        (errors.CoreMissingError, ImportError),
        (errors.MPIMissingError, ImportError),
    ],
)
def test_can_be_caught_as(error: type[Exception], base: type[Exception]) -> None:
    assert issubclass(error, base)


def test_travels_from_rank_to_kernel() -> None:
    offenders = []
    for name in NAMES:
        cls = getattr(errors, name)
        error = cls(True) if name == "HostsUpdatedInterrupt" else cls("rank 1: expected 4, got 5")
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not cls or str(copy) != str(error):
            offenders.append(name)
    assert offenders == []


def test_hosts_updated_keeps_whether_to_sync() -> None:
    assert pickle.loads(pickle.dumps(errors.HostsUpdatedInterrupt(skip_sync=True))).skip_sync is True
