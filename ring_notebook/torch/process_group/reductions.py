"""all_reduce, reduce and reduce_scatter of a process group, in all their forms."""

# Torch declares overloads for callers of other kinds; its own code calls what stands here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ring_notebook.core.communicator import ReduceOp
from ring_notebook.torch.free_cores import reduces_beside_backward
from ring_notebook.torch.process_group.identity import GroupIdentity
from ring_notebook.torch.process_group.operands import caller_waits, check_on_host, moved_operand, operand
from ring_notebook.torch.process_group.ring_work import CompletedWork, RingWork, in_backward
from ring_notebook.torch.tensors import from_bytes


def _code(op: Any) -> int:
    """What `c10d.ReduceOp` says of itself in the least time: its hash is the number of the operation."""
    return hash(c10d.ReduceOp(op))


_Op: Any = c10d.ReduceOp.RedOpType
_PREMUL_SUM = int(_Op.PREMUL_SUM)
_UNSCALED = {
    _code(_Op.SUM): ReduceOp.SUM,
    _code(_Op.AVG): ReduceOp.AVERAGE,
    _code(_Op.MIN): ReduceOp.MIN,
    _code(_Op.MAX): ReduceOp.MAX,
    _code(_Op.PRODUCT): ReduceOp.PRODUCT,
}
_KINDS = {**_UNSCALED, _PREMUL_SUM: ReduceOp.SUM}
_BITS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    _code(_Op.BAND): torch.bitwise_and,
    _code(_Op.BOR): torch.bitwise_or,
    _code(_Op.BXOR): torch.bitwise_xor,
}
_DONE = CompletedWork()


def all_of(steps: Iterable[Callable[[], object] | None]) -> Callable[[], object] | None:
    """One call for all of ``steps`` that are there; None when none is."""
    there = [step for step in steps if step is not None]
    return (lambda: [step() for step in there]) if there else None


def _factor(op: Any) -> float:
    """What PREMUL_SUM multiplies each rank's values with."""
    return float(op.__getstate__()[1]) if hash(op) == _PREMUL_SUM else 1.0


def _at_once(opts: Any) -> bool:
    """Whether to complete an operation before its call returns.

    DistributedDataParallel starts its operations in the backward pass. To queue them for another thread only costs the
    way there, unless that thread has a core of its own.
    """
    return caller_waits(opts) or (in_backward() and not reduces_beside_backward())


class ReducingGroup(GroupIdentity):
    """A process group that reduces."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> RingWork:
        """Reduce each tensor over all ranks, in place."""
        opts = opts or c10d.AllreduceOptions()
        code = hash(opts.reduceOp)
        kind = _UNSCALED.get(code)
        at_once = _at_once(opts)
        if at_once and len(tensors) == 1 and kind is not None and self._reader is not None:
            tensor = tensors[0]  # the short way, where every call of a function counts
            if self.communicator.allreduce_tensors(self._reader, tensor, tensor, kind, 1.0, 1.0, "dist.all_reduce"):
                return _DONE if caller_waits(opts) else RingWork(result=tensors)
        kind = _KINDS.get(code)
        if kind in (ReduceOp.SUM, ReduceOp.AVERAGE) and all(tensor.layout is torch.sparse_coo for tensor in tensors):
            for tensor in tensors:
                self._sum_entries(tensor, _factor(opts.reduceOp) / (self.size() if kind == ReduceOp.AVERAGE else 1))
            return RingWork(result=tensors)
        work = self._allreduce("all_reduce", tensors, tensors, opts.reduceOp, at_once)
        if not at_once and tensors[0].numel() == 1:
            self._kept.append(work)
        return work

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> RingWork:
        """`allreduce` of several tensors; those of one dtype travel as one operation."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._allreduce("all_reduce_coalesced", tensors, tensors, opts.reduceOp, _at_once(opts))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> RingWork:
        """Reduce into the tensor of the root alone."""
        opts = opts or c10d.ReduceOptions()
        is_root = self.rank() == opts.rootRank
        outputs = tensors if is_root else [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        return self._allreduce("reduce", tensors, outputs, opts.reduceOp, _at_once(opts), opts.rootRank)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RingWork:
        """Reduce ``input`` and leave the part of this rank, an equal one on each, in ``output``."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> RingWork:
        """`reduce_scatter_single` of several tensors."""
        opts = opts or c10d.ReduceScatterOptions()
        check_on_host([*outputs, *inputs], self._who(), "reduce_scatter_single")
        for output, input in zip(outputs, inputs, strict=True):
            if input.numel() != self.size() * output.numel():
                raise ValueError(
                    f"rank {self._who()}: dist.reduce_scatter_single: the input must have {self.size()} times the "
                    f"elements of the output, got {input.numel()} and {output.numel()}"
                )
        if (combine := _BITS.get(hash(opts.reduceOp))) is not None:
            for output, input in zip(outputs, inputs, strict=True):
                part = self._combined(input, combine).view(self.size(), -1)[self.rank()]
                output.detach().copy_(part.view(output.shape))
            return RingWork(result=outputs)
        at_once = _at_once(opts)
        works, ends = [], []
        for output, input in zip(outputs, inputs, strict=True):
            source, _ = operand(input)
            target, copy_back = operand(output)
            works.append(
                self.communicator.reducescatter(
                    source,
                    target,
                    op=_KINDS[hash(opts.reduceOp)],
                    prescale=_factor(opts.reduceOp),
                    name="dist.reduce_scatter",
                    blocking=at_once,
                )
            )
            ends.append(copy_back)
        return self._work(works, all_of(ends), outputs, at_once)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> RingWork:
        """Reduce lists of tensors, one for each rank; their sizes may differ."""
        opts = opts or c10d.ReduceScatterOptions()
        output, parts = outputs[0], inputs[0]
        check_on_host([output, *parts], self._who(), "reduce_scatter")
        flat = torch.cat([part.reshape(-1) for part in parts])
        if all(part.numel() == output.numel() for part in parts):
            return self.reduce_scatter_single_coalesced([output.detach()], [flat], opts)
        own: Tensor = torch.split(flat, [part.numel() for part in parts])[self.rank()]
        work = self._allreduce("reduce_scatter", [flat], [flat], opts.reduceOp, _at_once(opts))
        return RingWork(
            work._works, all_of([work.wait, lambda: output.detach().copy_(own.view(output.shape))]), outputs
        )

    def _allreduce(
        self,
        operation: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        op: Any,
        at_once: bool,
        root: int = -1,
    ) -> RingWork:
        check_on_host([*inputs, *outputs], self._who(), operation)
        if (combine := _BITS.get(hash(op))) is not None:
            for input, output in zip(inputs, outputs, strict=True):
                output.detach().copy_(self._combined(input, combine))
            return RingWork(result=outputs)
        fused: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for input, output in zip(inputs, outputs, strict=True):
            fused[input.dtype].append((input, output))
        works, ends = [], []
        for pairs in fused.values():
            sources = [operand(input) for input, _ in pairs]
            # In place the copy of a strided tensor is both.
            targets = [
                source if input is output else operand(output)
                for source, (input, output) in zip(sources, pairs, strict=True)
            ]
            works.append(
                self.communicator.allreduce(
                    [source for source, _ in sources],
                    [target for target, _ in targets],
                    op=_KINDS[hash(op)],
                    prescale=_factor(op),
                    name=f"dist.{operation}",
                    blocking=at_once,
                    root=root,
                )
            )
            ends += [end for _, end in targets]
        return self._work(works, all_of(ends), outputs, at_once)

    def _sum_entries(self, tensor: Tensor, factor: float) -> None:
        """Sum sparse tensors into ``tensor``, times ``factor``: each rank gathers the entries of all and adds them."""
        own = tensor.detach().coalesce()
        rows, part = own.indices().t(), own.values()
        check_on_host([rows, part], self._who(), "all_reduce")
        gathered = []
        for entries in (rows, part):
            work = self.communicator.allgather(moved_operand(entries)[0], name="dist.all_reduce of sparse tensors")
            gathered.append(from_bytes(work.output(), entries.dtype, [-1, *entries.shape[1:]]))
        indices, values = gathered
        values = values if factor == 1.0 else values * factor
        summed = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)
        with torch.no_grad():  # entries of a detached sparse tensor are not those of the tensor
            tensor.copy_(summed.coalesce())

    def _combined(self, tensor: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The bits of all ranks' tensors combined. The core's kernels are of numbers; this is rare and small."""
        work = self.communicator.allgather(moved_operand(tensor)[0], name="dist.all_reduce of bits")
        first, *others = from_bytes(work.output(), tensor.dtype, [self.size(), *tensor.shape])
        result: Tensor = first.clone()
        for other in others:
            result = combine(result, other)
        return result
