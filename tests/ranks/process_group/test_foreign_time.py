"""Waits for operations of Gloo count however a program waits; those of ours are left to the core, which counts them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ring_notebook.torch as hvd
from harness.waiting import until
from ring_notebook.core import other_waits
from ring_notebook.torch.process_group.foreign_time import count_foreign_time, tensors_in

pytestmark = [pytest.mark.sizes(2), pytest.mark.filterwarnings("ignore:`?torch.distributed:FutureWarning")]


def begun(group: Any) -> Any:
    return dist.all_reduce(torch.ones(4), group=group, async_op=True)


def sharded(group: Any) -> Any:
    return DTensor.from_local(torch.ones(4), DeviceMesh.from_group(group, "cpu"), [Shard(0)], run_check=False)


WAITS: dict[str, Callable[[Any], object]] = {
    "work": lambda group: begun(group).wait(),
    "future": lambda group: begun(group).get_future().wait(),
    "what_follows_a_future": lambda group: begun(group).get_future().then(lambda done: done.value()).wait(),
    "functional": lambda group: functional.all_reduce(torch.ones(4), "sum", group) + 0,
    "dtensor": lambda group: sharded(group).full_tensor(),
    "objects": lambda group: dist.all_gather_object([None, None], 3, group=group),
    "monitored_barrier": dist.monitored_barrier,
}


@pytest.mark.parametrize("name", WAITS)
def test_of_gloo(groups: tuple[Any, Any], name: str, rank: int, tmp_path: Path) -> None:
    """Rank 0 comes once it is seen that rank 1 waits."""
    seen = Path(hvd.broadcast_object(str(tmp_path))) / "seen"
    count_foreign_time()
    other_waits.begin()
    if rank == 0:
        until(seen.exists)
        WAITS[name](groups[1])
        return

    def watch() -> None:
        with suppress(AssertionError):
            until(lambda: other_waits.now() is not None, limit=10)
        seen.touch()

    watcher = Thread(target=watch)
    watcher.start()
    other_waits.keep()
    WAITS[name](groups[1])
    watcher.join()
    spans = other_waits.take()
    assert {span.phase for span in spans} == {"waiting"}
    assert all(span.what.startswith("dist.") for span in spans)
    assert other_waits.seconds().foreign > 0
    assert other_waits.now() is None


@pytest.mark.parametrize("name", [name for name in WAITS if name != "monitored_barrier"])
def test_of_ours(groups: tuple[Any, Any], name: str) -> None:
    """There is a group of Gloo too, and nothing tells by the tensor which group it comes from."""
    count_foreign_time()
    other_waits.begin()
    other_waits.keep()
    WAITS[name](groups[0])
    assert other_waits.take() == []
    assert other_waits.seconds().foreign == 0
    assert other_waits.now() is None


@dataclass
class Fields:
    inner: Any


@attrs.frozen
class Slots:
    inner: Any


class Plain:
    def __init__(self, inner: Any) -> None:
        self.inner, self.model = inner, torch.nn.Linear(1, 1)


@pytest.mark.parametrize("made", [list, tuple, dict, Fields, Slots, Plain], ids=lambda made: made.__name__)
def test_the_tensors_that_a_model_gives(made: Any) -> None:
    """Not those of a model that the output knows, which is no part of it."""
    tensor = torch.ones(1)
    inside: Any = {"inner": tensor} if made is dict else [tensor] if made in (list, tuple) else tensor
    assert [one is tensor for one in tensors_in([made(inside), 3, "text", None])] == [True]
