"""The collectives of one group of ranks, messages between two ranks, and the ranks' present activity."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import ref

from ring_notebook.config import config
from ring_notebook.core import other_waits
from ring_notebook.core.buffers import Buffer, Device, device_of, from_memoryview, targets_of
from ring_notebook.core.native import core, knows_transport
from ring_notebook.core.partition import layout_hash
from ring_notebook.core.work import Call, HeldWorks, Work
from ring_notebook.errors import CollectiveMismatch

if TYPE_CHECKING:
    from ring_notebook import _core

_CARD = struct.Struct("=QQqQ")  # what `MemberGroup.card` gives, and a hash of the members


ReduceOp: TypeAlias = core.ReduceOp


class Guard(Protocol):
    """What `Communicator.commit` sets."""

    held: bool
    agreed: int


_NO_REDUCTION = (int(ReduceOp.SUM), 1.0, 1.0, 0)  # op, factors and layout of an operation that only moves


class Communicator:
    """The collectives of one group.

    With ``blocking`` (the default) an operation has completed when the method returns; otherwise it is queued and
    `Work.wait` waits for it. Operations match by order of issue, and the ranks compare their headers. Queued operations
    with a ``name`` match by name instead, in any order; small sums that are ready together are fused. ValueError while
    another operation of that name is under way.

    Every method raises CollectiveMismatch on every rank when the ranks do not call the same operation,
    CollectiveAborted when another rank failed, left or died, CollectiveTimeout after ``RING_TIMEOUT``, ValueError for
    invalid arguments, and KeyboardInterrupt when this process is interrupted while it waits.
    """

    def __init__(self, native: _core.Communicator, ring_memory: _core.RingMemory) -> None:
        self._native = native
        self._ring_memory = ring_memory
        self._timeout = config().timeout
        self._held = HeldWorks()
        self._reader: _core.TensorReader | None = None  # the reader that `_bind` was called with
        self._knows_transport = False  # whether the transport of tensors on devices is known
        self._process = os.getpid()
        self._children: list[ref[Communicator]] = []
        self.rank: int = native.index
        """Index of this process in the group."""
        self.size: int = native.size
        self.ranks: tuple[int, ...] = tuple(native.ranks)
        """Global ranks of the members, in group order."""

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # at the end of Python modules are gone
        if self._process == getpid():  # in a forked process the operations belong to the parent
            self._held.end(self._native, f"rank {self.ranks[self.rank]} dropped a communicator")

    def _work(
        self, native: _core.Work, blocking: bool, first: Any = None, *others: Any, call: Call | None = None
    ) -> Work:
        on_device = isinstance(first, Buffer) and first.device is Device.CUDA
        work = Work(native, (first, *others), first.stream if on_device else None)
        if call is not None:
            call.started(native)
        if not blocking or on_device:
            self._held.hold(work)
        if blocking and on_device:
            work.wait()
        if on_device and not self._knows_transport:
            self._knows_transport = knows_transport(self.device_transport(), self.rank)
        return work

    def _start(
        self,
        operation: str,
        pieces: list[tuple[int, int, int]],
        shape: tuple[int, ...],
        buffers: Sequence[Buffer],
        name: str,
        blocking: bool,
        call: Call | None,
        *more: Any,
    ) -> Work:
        """Start ``operation`` on ``buffers``, the inputs first; ``more``: the last arguments of the core's `start`."""
        # By position: arguments by name take a microsecond longer.
        place = (1, None) if call is None else call.place()
        dtype, device = buffers[0].dtype, device_of(*buffers)
        native = self._native.start(
            operation, pieces, shape, dtype, device, name, blocking, self._timeout, place, *more
        )
        return self._work(native, blocking, *buffers, call=call)

    def allreduce(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        *,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        blocking: bool = True,
        call: Call | None = None,
        root: int = -1,
    ) -> Work:
        """Reduce each input over all ranks into the output of the same index (in place when they are the same).

        All inputs have one dtype and form one fused operation, which is part of ``call``. A ``root``, the only group
        rank that needs the result, is compared across ranks.
        """
        pieces = [(i.address, o.address, i.count) for i, o in zip(inputs, outputs, strict=True)]
        shape = inputs[0].shape if len(inputs) == 1 else ()
        layout = layout_hash(tuple([buffer.shape for buffer in inputs])) if len(inputs) > 1 else 0
        more = root, op, prescale, postscale, layout
        return self._start("allreduce", pieces, shape, (*inputs, *outputs), name, blocking, call, *more)

    def allreduce_tensors(
        self,
        reader: _core.TensorReader,
        tensors: Any,
        outputs: Any,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        name: str,
    ) -> bool:
        """`allreduce` of a framework's tensor, or of a list of one dtype, without the cost of Buffers and a handle.

        Returns False and does nothing for tensors that ``reader`` cannot read and for long lists: use `allreduce`.
        """
        if reader is not self._reader:
            self._bind(reader)
        return self._allreduce_tensors(tensors, outputs, op, prescale, postscale, name, self._timeout)

    def know_allreduce(
        self, spec: str, op: ReduceOp, prescale: float, postscale: float, name: str, commits: bool
    ) -> None:
        """Have the native core carry out, without Python, allreduces of foreign runtimes with the text ``spec``."""
        core.know_allreduce(spec, self._native, op, prescale, postscale, name, commits, self._timeout)

    def start_tensors(
        self, reader: _core.TensorReader, tensors: Any, op: ReduceOp, prescale: float, postscale: float, name: str
    ) -> _core.TensorWork | None:
        """Start `allreduce_tensors` in place; None for tensors that need `allreduce`.

        ``wait`` of the handle returns ``tensors``. Until then their memory is kept, even if the handle is dropped.
        """
        if reader is not self._reader:
            self._bind(reader)
        held = self._held
        works = held.works
        work = self._start_tensors(tensors, tensors, op, prescale, postscale, name, self._timeout, works)
        if len(works) > held.most:  # many handles were not waited for
            held.prune()
        return work

    def _bind(self, reader: _core.TensorReader) -> None:
        self._allreduce_tensors, self._start_tensors = reader.calls(self._native)
        self._reader = reader

    def reducescatter(
        self,
        input: Buffer,
        output: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        blocking: bool = True,
        call: Call | None = None,
    ) -> Work:
        """Reduce ``input`` and write this rank's rows to ``output``: `partition.row_split` has their numbers."""
        pieces, more = [(input.address, output.address, input.count)], (-1, op, prescale, postscale)
        return self._start("reducescatter", pieces, input.shape, (input, output), name, blocking, call, *more)

    def allgather(
        self,
        input: Buffer,
        outputs: Sequence[Buffer] = (),
        *,
        name: str = "",
        blocking: bool = True,
        call: Call | None = None,
    ) -> Work:
        """Concatenate the inputs of all ranks along the first dimension (which may differ by rank).

        With ``outputs``, one for each rank, the part of each rank is written there if all have exactly the right sizes
        (`Work.placed`); this rank's own may be ``input``. Tensors on devices are never placed.
        """
        pieces, more = [(input.address, 0, input.count)], (-1, *_NO_REDUCTION, targets_of(outputs))
        return self._start("allgather", pieces, input.shape, (input, *outputs), name, blocking, call, *more)

    def alltoall(
        self,
        inputs: Sequence[Buffer],
        splits: Sequence[int],
        outputs: Sequence[Buffer] = (),
        *,
        name: str = "",
        blocking: bool = True,
        root: int = -1,
    ) -> Work:
        """Send ``splits[r]`` rows to each rank r; ``Work.output()`` holds the received rows in rank order.

        Several ``inputs`` count as one, with elements as rows; on a device give one. ``outputs`` are as in `allgather`.
        A ``root``, the only group rank that sends or receives, is compared across ranks.
        """
        shape: tuple[int, ...] = inputs[0].shape
        if len(inputs) != 1:
            shape = (sum(input.count for input in inputs),)
        width = inputs[0].count // shape[0] if len(inputs) == 1 and shape and shape[0] else 1
        pieces = [(input.address, 0, input.count) for input in inputs]
        more = root, *_NO_REDUCTION, targets_of(outputs), [split * width for split in splits]
        return self._start("alltoall", pieces, shape, (*inputs, *outputs), name, blocking, None, *more)

    def broadcast(self, input: Buffer, output: Buffer, root: int, *, name: str = "", blocking: bool = True) -> Work:
        """Copy ``input`` of group rank ``root`` into ``output`` on every rank."""
        pieces = [(input.address, output.address, input.count)]
        return self._start("broadcast", pieces, input.shape, (input, output), name, blocking, None, root)

    def barrier(self, *, name: str = "", blocking: bool = True) -> Work:
        """Return when all ranks have called it."""
        return self._work(self._native.barrier(name, blocking, self._timeout), blocking)

    def commit(self, guard: Guard | None = None, *, name: str = "", newest: int = 0) -> BaseException | None:
        """Return when all ranks have called it. On one host it succeeds on all ranks, or raises on all of them.

        ``newest`` is the number of the newest change that this rank has received. Unless it is 0, ``guard.agreed``
        becomes the least ``newest`` of all ranks, or 0 while a rank has joined.

        Sets ``guard.held`` as soon as it succeeds, before another signal can be handled. Returns an exception that
        ended this rank meanwhile, such as the KeyboardInterrupt of a signal, for the caller to raise later; else None.

        After an abort or interrupt a host waits half a second for the other hosts' messages. If they take longer, or a
        rank or connection dies, ranks of one host may succeed while ranks of another raise.
        """
        return self._native.commit(name, newest, self._timeout, guard)

    def join(self) -> Work:
        """Contribute zeros to the others' allreduces until all ranks have joined (Horovod: ``join``)."""
        return Work(self._native.join(self._timeout), None)

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator over ``ranks`` (of this group); None on the others. All ranks of this group must call it."""
        members = list(ranks)
        if not members or len(set(members)) != len(members) or not all(0 <= r < self.size for r in members):
            raise ValueError(f"a group needs distinct ranks between 0 and {self.size - 1}, got {members}")
        offer = core.MemberGroup(self._native, members) if self.rank in members else None
        layout = layout_hash((tuple(members),))
        own = bytearray(_CARD.pack(*(offer.card() if offer else (0, 0, 0)), layout))
        gathered = self.allgather(from_memoryview(memoryview(own)), name="group")
        cards = list(_CARD.iter_unpack(bytes(gathered.output())))
        for rank, (*_, theirs) in zip(self.ranks, cards, strict=True):
            if theirs != layout:
                raise CollectiveMismatch(
                    f"rank {self.ranks[self.rank]}: expected a group of ranks {members}, and rank {rank} passed other "
                    "ones; pass the same ranks in the same order on every rank"
                )
        return self._enter(offer, [cards[member][:3] for member in members]) if offer else None

    def group_of_members(
        self, ranks: Sequence[int], exchange: Callable[[tuple[int, int, int]], Sequence[tuple[int, int, int]]]
    ) -> Communicator:
        """A communicator over ``ranks`` (of this group). Only these ranks call it.

        ``exchange`` takes this rank's value and returns those of all members in group order; it raises when one is
        missing. Raises ValueError where this rank is not among ``ranks``.
        """
        offer = core.MemberGroup(self._native, list(ranks))
        return self._enter(offer, exchange(offer.card()))

    def _enter(self, offer: _core.MemberGroup, cards: Sequence[tuple[int, int, int]]) -> Communicator:
        child = Communicator(offer.enter(cards), self._ring_memory)
        child.limit_time(self._timeout)
        child.barrier()  # no member may leave before all have entered
        # A new list each time: another thread may read the old one.
        self._children = [*(known for known in self._children if known() is not None), ref(child)]
        return child

    def match_in_order(self) -> None:
        """Match all later operations by order; their names are then only for errors and timelines."""
        self._native.match_in_order()

    def device_transport(self) -> tuple[str, str]:
        """What moves tensors on devices, "nccl" or "host", and the reason for "host"; ("", "") before the first."""
        return self._native.device_transport()

    def limit_time(self, seconds: float) -> None:
        """Let later operations raise CollectiveTimeout after ``seconds``; 0 sets no limit."""
        self._timeout = seconds

    @property
    def hosts(self) -> int:
        """The number of hosts of the group's ranks."""
        return len(set(self._native.host_of))

    def mates(self) -> Communicator:
        """The communicator of the group's ranks that share ring memory with this rank: on one host, the group itself.

        All ranks of this group must call it.
        """
        host_of = self._native.host_of
        own = self
        for host in sorted(set(host_of)):
            members = [index for index, at in enumerate(host_of) if at == host]
            own = self.group(members) or own
        return own

    def leaders(self) -> Communicator | None:
        """The communicator of the first rank of each host; None on other ranks. On one host, the group itself.

        All ranks of this group must call it.
        """
        host_of = self._native.host_of
        firsts = sorted(host_of.index(host) for host in set(host_of))
        return self.group(firsts) if firsts else self

    def abort(self, reason: str) -> None:
        """End the generation: pending and later operations of every rank raise CollectiveAborted with ``reason``."""
        self._native.abort(reason)

    @property
    def aborted(self) -> bool:
        """Whether the generation has ended by an abort."""
        return self._native.aborted

    def close(self) -> None:
        """Leave the group, after this rank's own queued operations have ended.

        Raises CollectiveAborted if one of them failed on its device after its call had returned, and no later call has
        raised.
        """
        try:
            self._native.close()
        finally:
            self._held.clear()

    def empty(self, nbytes: int) -> _core.Region:
        """``nbytes`` of ring memory as a writable object with the buffer protocol; freed with its last view.

        Raises OutOfRingMemoryError when the machine has too little memory left.
        """
        return self._ring_memory.allocate(nbytes)

    def snapshot(self) -> list[dict[str, Any]]:
        """The present activity of every rank of the group; may be called from any thread at any time.

        One dict per rank: ``rank``, ``state`` ("idle", "waiting", "moving", "left"), ``operation``, ``name``,
        ``sequence``, ``seconds`` (in that state) and ``missing``, the ranks that it waits for. The operation may be one
        of a smaller group. Operations by name are known for this rank only: the one that has waited longest is shown,
        with ``sequence`` 0.
        """
        entries = {entry["rank"]: entry for entry in _with_missing(self._native.activity())}
        own = self._named_wait()
        if own is not None and entries[own["rank"]]["state"] == "idle":
            entries[own["rank"]] = own
        for child in filter(None, [known() for known in self._children]):
            for entry in child.snapshot():
                if entry["state"] in ("waiting", "moving") and entry["rank"] in entries:
                    entries[entry["rank"]] = entry
        return list(entries.values())

    def _named_wait(self) -> dict[str, Any] | None:
        wait = self._native.named_wait()
        if wait is None:
            return None
        fields = ("operation", "name", "seconds", "missing")
        own = {"rank": self.ranks[self.rank], "state": "waiting", "sequence": 0}
        return {**own, **dict(zip(fields, wait, strict=True))}

    def named_counts(self) -> dict[str, int]:
        """Totals of the operations that were started with a name.

        ``names`` that all ranks had started, ``operations`` that carried them out (fewer where some were fused), and
        ``rounds`` in which the ranks agreed on them; the ``gates``, and the ``messages`` and ``bytes`` to other hosts,
        for all of these.
        """
        fields = ("rounds", "names", "operations", "gates", "messages", "bytes")
        return dict(zip(fields, self._native.named_counts(), strict=True))

    def seconds_spent(self) -> tuple[float, float]:
        """Seconds of this rank's callers in operations of the generation, and the part spent waiting for others."""
        return self._native.seconds_spent(), self._native.seconds_waited()

    def bytes_posted(self) -> int:
        """Bytes of the tensors in this rank's operations of the generation, in all groups."""
        return self._native.bytes_posted()

    def counts(self) -> dict[str, Any]:
        """Totals of this rank's operations that match by order, since the group began.

        ``operations``, ``gates`` (barriers within its host), and ``sent``: (messages, bytes) for each host; empty on
        one host.
        """
        return dict(zip(("operations", "gates", "sent"), self._native.counts(), strict=True))

    def record(self, capacity: int = 1 << 16) -> None:
        """Begin to record the events of operations of the generation; the newest ``capacity`` events are kept.

        Does nothing while a recording is under way. Raises ValueError for a capacity of 0.
        """
        self._native.record(capacity)

    def recorded(self, end: bool = True) -> list[tuple[int, int, str, str, str, int, int, int, int]]:
        """The events of the recording that have not been returned yet. ``end`` ends the recording.

        Each is (begin, end, phase, operation, name, sequence, bytes, group, last): nanoseconds of the monotonic clock;
        the phases are "queued", "negotiating" (until all ranks had started the name), "packing", "waiting", "moving"
        (which includes reducing) and "sending"; ``group`` numbers the groups of the generation, 0 being all ranks, with
        65536 added for their operations by name; ``last`` is the global rank that arrived last, -1 where the rank did
        not wait.
        """
        return self._native.recorded(end)


def _with_missing(activity: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts = {entry["rank"]: entry.pop("arrivals") for entry in activity}
    for entry in activity:
        waits = entry["state"] == "waiting"
        entry["missing"] = [rank for rank, count in counts.items() if waits and count < counts[entry["rank"]]]
    return activity


ANY = -1
"""The source for messages from any rank."""
_TAGS = 1 << 31


class Message(Work):
    """A message under way, matched by sender and tag.

    `wait` raises CollectiveMismatch where the other side has another size or dtype.
    """

    __slots__ = ("_peer", "_ranks", "_sends", "_tag")
    _native: Any

    def __init__(self, native: Any, keep: Buffer, ranks: tuple[int, ...], peer: int, tag: int, sends: bool) -> None:
        """A message to or from group rank ``peer``; ``ranks`` are the global ranks of the members."""
        super().__init__(native, keep)
        self._ranks, self._peer, self._tag, self._sends = ranks, peer, tag, sends

    def wait(self, timeout: float | None = None, stream: int | None = None) -> None:
        """As `Work.wait`. The time until the other side comes counts as this rank's bubble."""
        try:
            if self._native.done():
                self._native.wait()
            else:
                other_waits.message(lambda: self._native.wait(timeout or 0.0), self.title)
        finally:
            self._keep = None
            self.waited = True

    def title(self) -> str:
        """Its name in a timeline: "receive from rank 0, tag 3"."""
        source = self.source()
        peer = source if source >= 0 else self._peer
        rank = "any rank" if peer == ANY else f"rank {self._ranks[peer]}"
        return f"{'send to' if self._sends else 'receive from'} {rank}, tag {self._tag}"

    def source(self) -> int:
        """The group rank that sent a received message; -1 before it has arrived, and for a send."""
        return int(self._native.source())


def send(communicator: Communicator, buffer: Buffer, to: int, *, tag: int = 0, blocking: bool = True) -> Message:
    """Send ``buffer`` to group rank ``to``.

    Messages to one rank with one tag arrive in the order in which they are sent. Up to 64 KiB are copied, and the
    message is complete at once; a larger one is complete when it is received. If a receiver refused a small message for
    its size or dtype, a later call raises CollectiveMismatch, on one host the next one. Other errors are those of
    `Communicator`.
    """
    _check_tag(communicator, tag)
    native = core.send(
        communicator._native, buffer.address, buffer.count, buffer.dtype, to, tag, communicator._timeout, blocking
    )
    return _started(communicator, Message(native, buffer, communicator.ranks, to, tag, True), blocking)


def receive(
    communicator: Communicator, buffer: Buffer, source: int = ANY, *, tag: int = 0, blocking: bool = True
) -> Message:
    """Receive into ``buffer`` a message of this tag from group rank ``source``, or from `ANY` rank."""
    _check_tag(communicator, tag)
    native = core.receive(
        communicator._native, buffer.address, buffer.count, buffer.dtype, source, tag, communicator._timeout, blocking
    )
    return _started(communicator, Message(native, buffer, communicator.ranks, source, tag, False), blocking)


def _check_tag(communicator: Communicator, tag: int) -> None:
    if not 0 <= tag < _TAGS:
        rank = communicator.ranks[communicator.rank]
        raise ValueError(f"rank {rank}: the tag of a message must be between 0 and {_TAGS - 1}, got {tag}")


def _started(communicator: Communicator, message: Message, blocking: bool) -> Message:
    if blocking:
        message.wait()
    else:
        communicator._held.hold(message)
    return message
