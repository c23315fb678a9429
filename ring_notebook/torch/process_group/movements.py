"""broadcast, gathers, scatter and all_to_all of a process group: data of any dtype that moves and is not combined."""

# Torch declares overloads for callers of other kinds; its own code calls what stands here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ring_notebook.core.buffers import Buffer
from ring_notebook.core.work import Work
from ring_notebook.torch.process_group.operands import (
    caller_waits,
    check_on_host,
    count,
    moved_operand,
    nbytes,
    parts_in_place,
)
from ring_notebook.torch.process_group.reductions import ReducingGroup, all_of
from ring_notebook.torch.process_group.ring_work import RingWork
from ring_notebook.torch.tensors import from_bytes, moved_as


class MovingGroup(ReducingGroup):
    """A process group that also moves tensors as they are."""

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> RingWork:
        """Copy each tensor of the root to all ranks."""
        opts = opts or c10d.BroadcastOptions()
        check_on_host(tensors, self._who(), "broadcast")
        blocking = caller_waits(opts)
        works, ends = [], []
        for tensor in tensors:
            memory, copy_back = moved_operand(tensor)
            works.append(
                self.communicator.broadcast(memory, memory, opts.rootRank, name="dist.broadcast", blocking=blocking)
            )
            ends.append(None if self.rank() == opts.rootRank else copy_back)
        return self._work(works, all_of(ends), tensors, blocking)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> RingWork:
        """Gather each input into a list of tensors, one for each rank; their sizes may differ by rank."""
        return self._allgather("all_gather", outputs, inputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> RingWork:
        """`allgather` of several tensors: ``outputs[rank]`` are those of one rank, one for each input."""
        if len(outputs) != self.size() or any(len(some) != len(inputs) for some in outputs):
            raise ValueError(
                f"rank {self._who()}: dist.all_gather_coalesced: expected {self.size()} lists of {len(inputs)} tensors "
                f"for as many inputs, got lists of {[len(some) for some in outputs]}; make one list for each rank"
            )
        return self._allgather("all_gather_coalesced", [*zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RingWork:
        """Gather equal inputs into one tensor."""
        return self._allgather("all_gather_single", [[output]], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> RingWork:
        """`all_gather_single` of several tensors."""
        return self._allgather("all_gather_single", [[output] for output in outputs], inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> RingWork:
        """Send rows of ``input`` to every rank: equal shares, or as many as ``input_splits`` says."""
        opts = opts or c10d.AllToAllOptions()
        check_on_host([output, input], self._who(), "all_to_all_single")
        splits = _counts_for_each(input, input_splits, self.size(), self._who(), "input")
        expected = _counts_for_each(output, output_splits, self.size(), self._who(), "output")
        return self._exchange("all_to_all_single", [input], splits, [output], expected, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> RingWork:
        """Send a tensor to every rank; sizes may differ."""
        opts = opts or c10d.AllToAllOptions()
        check_on_host([*outputs, *inputs], self._who(), "all_to_all")
        splits = [count(tensor) for tensor in inputs]
        expected = [count(tensor) for tensor in outputs]
        return self._exchange("all_to_all", inputs, splits, outputs, expected, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> RingWork:
        """Gather a tensor of every rank on the root."""
        opts = opts or c10d.GatherOptions()
        check_on_host([*inputs, *(tensor for some in outputs for tensor in some)], self._who(), "gather")
        is_root = self.rank() == opts.rootRank
        splits = [count(inputs[0]) if rank == opts.rootRank else 0 for rank in range(self.size())]
        targets = outputs[0] if is_root else []
        expected = [count(target) for target in targets] or [0] * self.size()
        return self._exchange("gather", inputs, splits, targets, expected, opts, opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> RingWork:
        """Give every rank one of the root's tensors."""
        opts = opts or c10d.ScatterOptions()
        check_on_host([*outputs, *(tensor for some in inputs for tensor in some)], self._who(), "scatter")
        parts = inputs[0] if self.rank() == opts.rootRank else []
        splits = [count(part) for part in parts] or [0] * self.size()
        expected = [count(outputs[0]) if rank == opts.rootRank else 0 for rank in range(self.size())]
        return self._exchange("scatter", parts, splits, outputs, expected, opts, opts.rootRank)

    def _allgather(
        self, operation: str, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> RingWork:
        blocking = caller_waits(opts)
        check_on_host([*inputs, *(tensor for some in outputs for tensor in some)], self._who(), operation)
        works, ends = [], []
        for targets, input in zip(outputs, inputs, strict=True):
            if other := next((target.dtype for target in targets if target.dtype != input.dtype), None):
                raise ValueError(
                    f"rank {self._who()}: dist.{operation}: the outputs must be of the input's dtype, {input.dtype}, "
                    f"got {other}"
                )
            expected = [count(target) for target in targets]
            if len(targets) == 1:  # for the parts of all ranks
                expected = [expected[0] // self.size()] * self.size()
            memory = moved_operand(input)[0]
            places = parts_in_place(targets, expected)
            work = self.communicator.allgather(memory, places, name=f"dist.{operation}", blocking=blocking)
            works.append(work)
            ends.append(self._sink(operation, work, targets, expected, memory.dtype.itemsize))
        flat = [tensor for some in outputs for tensor in some]
        return self._work(works, all_of(ends), flat, blocking)

    def _exchange(
        self,
        operation: str,
        sent: Sequence[Tensor],
        splits: Sequence[int],
        targets: Sequence[Tensor],
        expected: Sequence[int],
        opts: Any,
        root: int = -1,
    ) -> RingWork:
        blocking = caller_waits(opts)
        memory = [moved_operand(tensor)[0] for tensor in sent] or [Buffer(0, (0,), moved_as(targets[0].dtype))]
        places = parts_in_place(targets, expected)
        work = self.communicator.alltoall(
            memory, splits, places, name=f"dist.{operation}", blocking=blocking, root=root
        )
        sink = self._sink(operation, work, targets, expected, memory[0].dtype.itemsize)
        return self._work([work], sink, targets, blocking)

    def _sink(
        self, operation: str, work: Work, targets: Sequence[Tensor], expected: Sequence[int], width: int
    ) -> Callable[[], object]:
        """Copies what has come, the parts of all ranks one after another, into ``targets`` if it is not there.

        ``expected`` counts the elements that have to come from each rank, of ``width`` bytes.
        """

        def finish() -> None:
            if work.placed():
                return
            data = work.output()
            if work.counts() != list(expected):
                room, came = ([width * number for number in numbers] for numbers in (expected, work.counts()))
                raise ValueError(
                    f"rank {self._who()}: dist.{operation}: the outputs have room for {room} bytes from "
                    f"ranks 0 to {self.size() - 1}, and {came} came; give outputs of the sizes of the inputs"
                )
            at = 0
            for target in targets:
                end = at + nbytes(target)
                if end > at:
                    target.detach().copy_(from_bytes(data[at:end], target.dtype, target.shape))
                at = end

        return finish


def _counts_for_each(tensor: Tensor, splits: Sequence[int], size: int, who: int, what: str) -> list[int]:
    """Elements of ``tensor`` to or from each rank; ``splits`` counts rows and is empty for equal shares."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"rank {who}: dist.all_to_all_single without splits needs a first dimension of the {what} that {size} "
                f"ranks divide, got {rows}; give input_split_sizes and output_split_sizes"
            )
        return [count(tensor) // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"rank {who}: dist.all_to_all_single: {what}_split_sizes must be {size} numbers that add up to the {rows} "
            f"rows of the {what}, got {list(splits)}"
        )
    width = count(tensor) // rows if rows else 0
    return [split * width for split in splits]
