"""Processes that ranks fork while their tensors lie in ring memory: they see what a fork shows, and write to no one."""

from __future__ import annotations

import multiprocessing
import os
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ranks.allocator.test_promotion import COUNT, _one_thread, lies_in_ring, promoted

__all__ = ["_one_thread"]

pytestmark = pytest.mark.sizes(2, slow=(3,))


def in_child(look: object) -> int:
    """What ``look`` returns in a forked child, as its exit code."""
    assert callable(look)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = int(look())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_neither_process_sees_what_the_other_writes(hvd: ModuleType) -> None:
    tensor = promoted(hvd)
    told, tell = os.pipe()
    done, finish = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.read(told, 1)  # the parent has written
            before = float(tensor.min()) == float(tensor.max()) == 1.0
            tensor.fill_(7)
            os.write(finish, b"x")
            os.read(told, 1)  # the parent has reduced
            code = 0 if before and float(tensor.min()) == 7.0 and not lies_in_ring(tensor) else 2
        finally:
            os._exit(code)
    tensor.fill_(3)
    os.write(tell, b"x")
    os.read(done, 1)
    assert float(tensor.min()) == float(tensor.max()) == 3.0
    assert float(hvd.allreduce_(tensor, op=hvd.Sum).min()) == 3.0 * hvd.size()
    os.write(tell, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lies_in_ring(tensor)
    for descriptor in (told, tell, done, finish):
        os.close(descriptor)


def test_children_of_different_moments(hvd: ModuleType) -> None:
    """Each child has the content of its own moment, also where the parent wrote between two forks."""
    tensor = promoted(hvd)
    pids = []
    hold, release = os.pipe()
    for value in range(4):
        tensor.fill_(value)
        child = os.fork()
        if child == 0:
            os.close(release)
            os.read(hold, 1)
            os._exit(0 if float(tensor.min()) == float(tensor.max()) == value else 1)
        pids.append(child)
    tensor.fill_(9)
    os.close(release)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
    os.close(hold)


def test_a_child_allocates_and_forks_on(hvd: ModuleType) -> None:
    tensor, freed = promoted(hvd), promoted(hvd)
    del freed

    def look() -> int:
        tensor.add_(1)
        new = [torch.full((COUNT,), 5.0) for _ in range(3)]  # also where a promoted block was free
        grandchild = in_child(lambda: 0 if float(tensor.max()) == 2.0 and float(new[2].min()) == 5.0 else 3)
        return grandchild or (0 if not any(map(lies_in_ring, new)) else 4)

    assert in_child(look) == 0
    assert float(tensor.max()) == 1.0
    assert float(hvd.allreduce_(tensor, op=hvd.Sum).min()) == hvd.size()


class InPlace(Dataset[Tensor]):
    """Samples that are made by writing to one tensor, as augmentations do."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self.tensor.mul_(index)
        value = self.tensor[-1].clone()
        self.tensor.fill_(1)
        return value


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_write_in_place(hvd: ModuleType, method: str) -> None:
    tensor = promoted(hvd)
    loader = DataLoader(InPlace(tensor), batch_size=2, num_workers=2, multiprocessing_context=method)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    if method == "fork":  # to a spawned process torch passes the tensor itself, in shared memory
        assert float(tensor.min()) == float(tensor.max()) == 1.0
        assert lies_in_ring(tensor)
    assert float(hvd.allreduce_(tensor.fill_(1), op=hvd.Sum).min()) == hvd.size()


def _double(tensor: Tensor) -> float:
    tensor.mul_(2)
    return float(tensor.sum())


def test_multiprocessing(hvd: ModuleType) -> None:
    tensor = promoted(hvd)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_double, (torch.ones(3),)) == 6.0
    assert float(tensor.sum()) == COUNT


def test_a_program_that_is_started_without_a_fork_of_ours(hvd: ModuleType) -> None:
    tensor = promoted(hvd)
    assert os.system("exit 3") == 3 << 8
    assert lies_in_ring(tensor)
