"""The functions of ``horovod.common.util`` and ``horovod.runner.common`` that programs use; none needs ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from ring_notebook.machine.gpus import gpus

T = TypeVar("T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether ``horovod.NAME`` can be imported: "torch", "tensorflow" and "keras", where these are installed."""
    return ext_base_name in ("torch", "tensorflow", "keras") and find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether this machine has a GPU that ``horovod.NAME`` could use."""
    return extension_available(ext_base_name) and bool(gpus())


def get_env_rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks before ``init()``: (0, 1) where no launcher has told them."""
    return int(os.environ.get("HOROVOD_RANK", 0)), int(os.environ.get("HOROVOD_SIZE", 1))


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether the version ``ver`` is ``target`` or newer. Raises ValueError for anything but texts of versions."""
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions must be texts, got {ver!r} and {target!r}")
    from packaging.version import Version  # of ipykernel, which takes time to import

    return Version(ver) >= Version(target)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether ``num_rank`` ranks can run Adasum: a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[T], n: int) -> list[Sequence[T]]:
    """``n`` consecutive parts. Their lengths differ by at most one; the longer ones come first."""
    base, extra = divmod(len(items), n)
    ends = [(index + 1) * base + min(index + 1, extra) for index in range(n)]
    return [items[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set these environment variables in the block; None leaves a variable as it is."""
    wanted = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
