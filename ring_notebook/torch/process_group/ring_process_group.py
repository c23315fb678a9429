"""The process group of backend "ring": torch.distributed's operations on the native core, and how torch makes it."""

# Torch declares more overloads; its own code calls only the methods here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ring_notebook.core import world
from ring_notebook.core.buffers import Buffer
from ring_notebook.core.communicator import ANY, Communicator, ReduceOp, receive, send
from ring_notebook.core.work import Work
from ring_notebook.errors import RingError
from ring_notebook.torch.free_cores import reduces_beside_backward
from ring_notebook.torch.process_group.members import communicator_of, shorter_limit
from ring_notebook.torch.process_group.operands import (
    Operand,
    caller_waits,
    check_on_host,
    count,
    moved_operand,
    nbytes,
    operand,
    parts_in_place,
)
from ring_notebook.torch.process_group.ring_work import CompletedWork, RingWork, in_backward
from ring_notebook.torch.process_group.run_store import is_of_open_generation
from ring_notebook.torch.steps.plain_optimizers import guard_steps
from ring_notebook.torch.tensors import buffer_of, can_reduce, empty_in, from_bytes, moved_as, reader
from ring_notebook.torch_private import private, uncompiled

_CPU = torch.device("cpu")
_KEPT = 256
"""Number of handles of small sums to keep alive. DistributedDataParallel's ``join`` starts such a sum in the forward
pass and C++ waits for it in the backward pass: without the Python handle C++ finds no `wait` and waits forever."""


def _code(op: Any) -> int:
    """The number of the operation, which is the hash of `c10d.ReduceOp`: the fastest way to read it."""
    return hash(c10d.ReduceOp(op))


_Op: Any = c10d.ReduceOp.RedOpType
_PREMUL_SUM = int(_Op.PREMUL_SUM)
# Torch has all our operations except Adasum, by the same names, but calls the average AVG.
_UNSCALED = {_code(found): op for op in ReduceOp if (found := getattr(_Op, op.name.replace("AVERAGE", "AVG"), None))}
_KINDS = {**_UNSCALED, _PREMUL_SUM: ReduceOp.SUM}
_BITS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    _code(_Op.BAND): torch.bitwise_and,
    _code(_Op.BOR): torch.bitwise_or,
    _code(_Op.BXOR): torch.bitwise_xor,
}
_DONE = CompletedWork()


def _all_of(steps: Iterable[Callable[[], object] | None]) -> Callable[[], object] | None:
    """A function that calls all ``steps`` but None; None if there are none."""
    there = [step for step in steps if step is not None]
    return (lambda: [step() for step in there]) if there else None


def _factor(op: Any) -> float:
    """The factor of PREMUL_SUM for each rank's values; 1 for other operations."""
    return float(op.__getstate__()[1]) if hash(op) == _PREMUL_SUM else 1.0


def _at_once(opts: Any) -> bool:
    """Whether to complete an operation before its call returns.

    DistributedDataParallel starts its operations in the backward pass. Queuing them for another thread only costs time,
    unless that thread has a core of its own.
    """
    return caller_waits(opts) or (in_backward() and not reduces_beside_backward())


class RingProcessGroup(c10d.ProcessGroup):
    """torch.distributed's operations on the native core, for tensors in CPU memory.

    Its own communicator keeps its operations apart from calls of `ring_notebook.torch`. All operations raise
    CollectiveMismatch on every rank when the ranks call different operations, CollectiveAborted when another rank
    failed, left or died, CollectiveTimeout after the group's ``timeout``, and KeyboardInterrupt when this process is
    interrupted while it waits.

    torch.distributed and wrapped models keep a group for longer than a run, but the core's generations end with the
    run. So the group makes a new communicator at its first use in a generation, if the ranks are the same: all members
    do so together, because they call collectives.
    """

    def __init__(self, ranks: Sequence[int], store: c10d.Store, timeout: timedelta, name: str) -> None:
        """``ranks`` are the members' ranks in the generation, including this process's."""
        current = world.current()
        self._index = list(ranks).index(current.rank)
        super().__init__(self._index, len(ranks))  # type: ignore[call-arg]  # C++ has this one too
        self._ranks = tuple(ranks)
        self._everyone = current.size
        self._store = store
        self._seconds = shorter_limit(timeout)
        self._group_name, self._description = name, "undefined"
        self._world: world.World | None = None
        self._communicator: Communicator | None = None
        self._pending: list[RingWork] | None = None
        self._kept: deque[RingWork] = deque(maxlen=_KEPT)
        self._reader = reader(flat=True)
        self._bindings = 0
        self.communicator  # noqa: B018  all members are here now

    @property
    def communicator(self) -> Communicator:
        """The core's communicator of this group in the open generation.

        Raises NotInitializedError when none is open, and RingError when the generation has other ranks than the group.
        """
        communicator = self._communicator
        if communicator is None or self._world is not world.current():
            communicator = self._bind()
        return communicator

    def _bind(self) -> Communicator:
        current = world.current()
        if self._world is not None and self._communicator is None:
            raise RingError(f"rank {current.rank}: this process group has been destroyed; make a new one")
        if current.size != self._everyone:
            raise RingError(
                f"rank {current.rank}: this process group has {self._everyone} ranks, and now there are "
                f"{current.size}; call ring.process_group(), or dist.destroy_process_group() and "
                "dist.init_process_group()"
            )
        self._bindings += 1
        self._kept.clear()
        communicator = communicator_of(current.communicator, self._ranks, self._store, f"binding {self._bindings}")
        communicator.limit_time(self._seconds)
        communicator.match_in_order()  # names are only for errors and timelines
        self._communicator, self._world = communicator, current
        return communicator

    # torch.distributed's names: some are read in Python, some are called by C++.

    def getBackendName(self) -> str:  # noqa: N802
        """The name of the backend."""
        return "ring"

    name = _get_backend_name = getBackendName

    def get_group_store(self) -> c10d.Store:
        """The store in which the members of this group find each other."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"backend 'ring' has nothing for {device}; use a group of backend 'nccl'")
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` gives memory in which operations are faster."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``size`` elements in ring memory (FSDP2 asks with ``set_allocate_memory_from_process_group_for_comm``)."""
        return empty_in(self.communicator, [size], dtype)

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        """The name under which torch.distributed knows the group."""
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description given to ``new_group``."""
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _set_sequence_number_for_group(self) -> None:
        """The core counts operations itself."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Nothing of this backend runs after an operation."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Have operations that begin from now on raise CollectiveTimeout after ``timeout``."""
        self._seconds = shorter_limit(timeout)
        self.communicator.limit_time(self._seconds)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group, once this rank's operations have ended."""
        communicator, self._communicator = self._communicator, None
        self._kept.clear()
        if communicator is not None:
            communicator.close()

    def allow_use_after_shutdown(self) -> None:
        """Let models that hold this group open it again at their next operation; all members call this."""
        self._world = None

    def abort(self) -> None:
        """End the generation: pending and later operations of all its ranks raise CollectiveAborted."""
        if self._communicator is not None:
            rank = self._communicator.ranks[self._communicator.rank]
            self._communicator.abort(f"rank {rank} aborted its process group")

    def _start_coalescing(self, device: torch.device) -> None:
        self._pending = []

    def _end_coalescing(self, device: torch.device) -> RingWork:
        pending, self._pending = self._pending or [], None
        return RingWork([work for one in pending for work in one._works], lambda: [one.wait() for one in pending])

    def _work(
        self,
        works: Iterable[Work],
        finish: Callable[[], object] | None,
        result: Sequence[Any],
        blocking: bool,
        source: Callable[[], int] | None = None,
    ) -> RingWork:
        """The handle of ``works``, completed already when they were ``blocking``."""
        work = RingWork(works, finish, result, source)
        if blocking:
            work.wait()
        elif self._pending is not None:
            self._pending.append(work)
        return work

    def _who(self) -> int:
        return self._ranks[self._index]

    # Reductions.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> RingWork:
        """Reduce each tensor over all ranks, in place."""
        opts = opts or c10d.AllreduceOptions()
        code = hash(opts.reduceOp)
        kind = _UNSCALED.get(code)
        at_once = _at_once(opts)
        if at_once and len(tensors) == 1 and kind is not None:
            tensor = tensors[0]  # the fast path: each function call costs noticeable time
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
        """`allreduce` of several tensors, in one operation per dtype."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._allreduce("all_reduce_coalesced", tensors, tensors, opts.reduceOp, _at_once(opts))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> RingWork:
        """Reduce into the tensor of the root alone."""
        opts = opts or c10d.ReduceOptions()
        is_root = self.rank() == opts.rootRank
        outputs = tensors if is_root else [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        return self._allreduce("reduce", tensors, outputs, opts.reduceOp, _at_once(opts), opts.rootRank)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RingWork:
        """Reduce ``input`` and write this rank's part to ``output``; all parts are equally large."""
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
        return self._work(works, _all_of(ends), outputs, at_once)

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
            work._works, _all_of([work.wait, lambda: output.detach().copy_(own.view(output.shape))]), outputs
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
            # In place, the contiguous copy of a strided tensor is both source and target.
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
        return self._work(works, _all_of(ends), outputs, at_once)

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
        with torch.no_grad():  # not `detach`: new entries of a detached sparse tensor do not reach the tensor
            tensor.copy_(summed.coalesce())

    def _combined(self, tensor: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Combine the bits of all ranks' tensors, in torch: rare and small, and the core has no kernel for bits."""
        work = self.communicator.allgather(moved_operand(tensor)[0], name="dist.all_reduce of bits")
        first, *others = from_bytes(work.output(), tensor.dtype, [self.size(), *tensor.shape])
        result: Tensor = first.clone()
        for other in others:
            result = combine(result, other)
        return result

    # Operations that only move data, of any dtype.

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
        return self._work(works, _all_of(ends), tensors, blocking)

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
            if len(targets) == 1:  # holds the parts of all ranks
                expected = [expected[0] // self.size()] * self.size()
            memory = moved_operand(input)[0]
            places = parts_in_place(targets, expected)
            work = self.communicator.allgather(memory, places, name=f"dist.{operation}", blocking=blocking)
            works.append(work)
            ends.append(self._sink(operation, work, targets, expected, memory.dtype.itemsize))
        flat = [tensor for some in outputs for tensor in some]
        return self._work(works, _all_of(ends), flat, blocking)

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
        """A function that copies the received parts, in rank order, into ``targets``, unless they are there already.

        ``expected`` counts the elements to receive from each rank, of ``width`` bytes.
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

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> RingWork:
        """Send a tensor to a group rank; `RingWork.wait` returns when its memory may change."""
        check_on_host(tensors, self._who(), "send")
        memory, _ = _memory(tensors[0])
        return self._work([send(self.communicator, memory, to, tag=tag, blocking=False)], None, tensors, False)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> RingWork:
        """Receive a tensor of the same size and dtype from a group rank."""
        check_on_host(tensors, self._who(), "recv")
        memory, copy_back = _memory(tensors[0])
        message = receive(self.communicator, memory, source, tag=tag, blocking=False)
        return self._work([message], copy_back, tensors, False, message.source)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> RingWork:
        """Receive the first message from any rank."""
        return self.recv(tensors, ANY, tag)

    def barrier(self, opts: Any = None) -> RingWork:
        """Complete when all ranks have called it."""
        blocking = caller_waits(opts)
        return self._work([self.communicator.barrier(name="dist.barrier", blocking=blocking)], None, [], blocking)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> RingProcessGroup | None:
        """A group of ``new_ranks`` of this group; None on ranks that are not among their ``new_ranks``.

        All ranks of this group call it, each with the part that it wants to be in.
        """
        wanted = torch.full([self.size()], -1, dtype=torch.int64, device="cpu")
        wanted[: len(new_ranks)] = torch.tensor(list(new_ranks), dtype=torch.int64, device="cpu")
        work = self.communicator.allgather(buffer_of(wanted), name="dist.split_group")
        lists = from_bytes(work.output(), torch.int64, [self.size(), self.size()]).tolist()
        parts = {tuple(rank for rank in one if rank >= 0) for one in lists}
        if not any(self.rank() in part and part == tuple(new_ranks) for part in parts):
            return None
        name = group_name or f"{self.group_name} split {'-'.join(map(str, new_ranks))}"
        limit = timeout if timeout is not None else timedelta(seconds=self._seconds)
        store = c10d.PrefixStore(f"{name}/", self._store)
        part = RingProcessGroup([self._ranks[rank] for rank in new_ranks], store, limit, name)
        part._set_group_desc(group_desc or "undefined")
        return part


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


def _memory(tensor: Tensor) -> Operand:
    """A message's tensor: as numbers if the core has its dtype, so that a mismatch of dtypes raises; else as bytes."""
    known = tensor.is_complex() or can_reduce(tensor.dtype)
    return operand(tensor) if known else moved_operand(tensor)


def create(opts: Any, options: Any) -> RingProcessGroup:
    """Make a group for torch.distributed; only its members call it.

    For the default group it opens a generation if none is open or the open one has been aborted. Raises RingError if
    torch.distributed has other ranks than this job or run, and CollectiveAborted when another rank failed since the
    ranks made the store.
    """
    guard_steps()
    is_default = not opts.global_ranks_in_group
    if is_default and (not world.is_initialized() or (world.is_aborted() and not is_of_open_generation(opts.store))):
        world.init()
    current = world.current()
    ranks = list(range(opts.group_size)) if is_default else list(opts.global_ranks_in_group)
    rank, everyone = ranks[opts.group_rank], opts.group_size if is_default else dist.get_world_size()
    if (rank, everyone) != (current.rank, current.size):
        raise RingError(
            f"backend 'ring': this process is rank {current.rank} of {current.size}, and torch.distributed was told "
            f"rank {rank} of {everyone}; start it with ringrun, or in a %%ringtrain cell, and leave rank and "
            "world_size out"
        )
    _keep_flight_recorder_out()
    return RingProcessGroup(ranks, opts.store, opts.timeout, opts.group_id)


def _keep_flight_recorder_out() -> None:
    """Have torch attach no flight recorder to the group: it would ask for a backend in C++, which the group lacks.

    It could record nothing anyway: operations of a group in Python do not pass torch's dispatcher.
    """
    if private("self_recording_backends") is None and hasattr(c10d, "FlightRecorderHook"):
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"


def _keep_compiler_out(*classes: type) -> None:
    """Keep torch.compile off methods that C++ calls while a compiled function runs, such as DDP's forward pass.

    It would compile them, but does not support attributes of process groups.
    """
    for base in {base for cls in classes for base in cls.__mro__ if base.__module__.startswith(__package__)}:
        for name, function in list(vars(base).items()):
            if isinstance(function, FunctionType):
                setattr(base, name, uncompiled(function))


_keep_compiler_out(RingProcessGroup, RingWork)
