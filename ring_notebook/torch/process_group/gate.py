"""The gate before the operations of groups that torch.distributed makes itself, such as Gloo's and NCCL's.

Every collective of such a group passes torch's dispatcher (``c10d::allreduce_`` and so on), also when C++ calls it, as
in functional collectives, compiled functions and DistributedDataParallel. There the members first exchange a header
through the core, which compares their calls, logs each call with its line, and ends the wait when a rank fails, leaves,
dies or is interrupted. Then torch's own operation starts, unchanged.

The two sides of a message exchange such a header, a *card*. Neither starts the message before it has the other's card.

An operation that a caller in Python does not wait for is *pending* until all members have called it. Then a thread that
polls, or `wait`, starts it.
"""

# mypy: disable-error-code="override"

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Condition, RLock, Thread, local
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ring_notebook.config import config
from ring_notebook.core import other_waits, world
from ring_notebook.core.buffers import Buffer, DType
from ring_notebook.core.communicator import ANY, Communicator, Message, receive, send
from ring_notebook.core.work import Work
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.torch.process_group.default_group import end_groups_of_failed_generation, tells_of_lost_rank
from ring_notebook.torch.process_group.members import communicator_of, shorter_limit
from ring_notebook.torch.process_group.ring_process_group import RingProcessGroup
from ring_notebook.torch.process_group.ring_work import BaseWork, in_backward
from ring_notebook.torch_private import arguments_of, private, uncompiled

_COMPARED: dict[str, tuple[str, str]] = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce_coalesced", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "allgather_coalesced_": ("all_gather_coalesced", "output_lists"),
    "_allgather_base_": ("all_gather_single", "output_tensor"),
    "allgather_into_tensor_coalesced_": ("all_gather_single", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter_single", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_single", "inputs"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all_single", "input"),
    "barrier": ("barrier", ""),
}
"""For each of torch's operations: its public name, and the argument whose tensors have equal sizes on all ranks."""
_UNEVEN = {"alltoall_", "alltoall_base_"}
"""Operations whose number of elements may differ by rank: only their dtype is compared."""
_Op: Any = c10d.ReduceOp.RedOpType
_REDUCTIONS = {int(op): name.lower() for name, op in _Op.__members__.items()}
_NO_TIMEOUT = timedelta(0)
_CARD = 64
"""Bytes of the text that the sides of a message exchange."""
_ANSWER = 1 << 30
"""Added to a message's tag for the receiver's card."""
_SOON, _LATE = 1e-4, 2e-3
"""Seconds between two looks at pending operations: at first, and after a long time without news."""
_PATIENCE = 2.0
"""Seconds to wait until the core notices a death, after a connection of another backend has broken."""


class Pending:
    """An operation of another backend that starts when ``gate``, an operation of the core, has completed."""

    __slots__ = ("_call", "_check", "_gate", "_lane", "_lock", "error", "real")

    def __init__(
        self,
        gate: Work,
        lane: deque[Pending],
        lock: Any,
        call: Callable[[], Any],
        check: Callable[[], object] | None = None,
    ) -> None:
        """``call`` starts it, after ``check`` and after earlier ones in ``lane``."""
        self._gate, self._lane, self._lock = gate, lane, lock
        self._call: Any = call
        self._check = check
        self.real: Any = None
        self.error: BaseException | None = None
        lane.append(self)

    def ready(self) -> bool:
        """Whether `start` would not wait."""
        return self._gate.done()

    def start(self) -> None:
        """Start it and earlier ones, whose gates have all completed. Errors are kept in ``error``."""
        with self._lock:
            while self._lane and not self.started():
                self._lane.popleft()._start()

    def started(self) -> bool:
        """Whether it has been started, or never will be."""
        return self.real is not None or self.error is not None

    def _start(self) -> None:
        try:
            with other_waits.own_words():
                self._gate.wait()
            if self._check is not None:
                self._check()
            self.real = self._call()
        except BaseException as error:
            self.error = error
        self._call = self._check = None  # they hold tensors

    def wait(self, timeout: float | None = None) -> Any:
        """The handle of the operation, once it has started. Raises the error of the gate."""
        if not self.started():
            try:
                with other_waits.own_words():
                    self._gate.wait(timeout)
            except BaseException:
                if not self._gate.done():  # an interrupt or a limit of this wait
                    raise
            self.start()
        if self.error is not None:
            raise self.error
        return self.real


_returned = local()
"""Has as ``work`` the handle that the calling thread is returning."""


class GatedWork(BaseWork):
    """The handle of a pending operation for callers in Python, which hold it until they have waited.

    C++ would hold only its C++ side, and wait forever.
    """

    _errors = Exception  # the other backend's too

    def __init__(self, pending: Pending, result: Sequence[Tensor]) -> None:
        super().__init__()
        self._pending, self._result = pending, list(result)
        self._waited = False
        _returned.work = self  # until the caller has it

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the operation has completed; raise its error."""
        if self._waited:  # Gloo would block in a second wait for a message
            return True
        _returned.work = None
        other_waits.ours()
        seconds = timeout.total_seconds() if timeout is not None and timeout > _NO_TIMEOUT else None
        real = self._pending.wait(seconds)
        with _named_losses():
            real.wait() if seconds is None else real.wait(timeout)
        self._waited = True
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        pending = self._pending
        if self._waited:  # Gloo may still return False
            return True
        if not pending.started() and pending.ready():
            pending.start()
        return pending.error is not None or (pending.real is not None and pending.real.is_completed())

    def source_rank(self) -> int:
        """The group rank that a received tensor came from."""
        self.wait()
        return int(self._pending.real._source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors, complete: C++ waits for futures without looking at signals."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.wait()
        future.set_result(self._result)
        return future


class _Message(GatedWork):
    """The handle of a message whose other side has not sent its card yet."""

    def __init__(self, pending: Pending, result: Sequence[Tensor], card: Message, title: str) -> None:
        super().__init__(pending, result)
        self._card, self._title = card, title

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """As `GatedWork.wait`; the time until the other side comes counts as this rank's bubble."""
        if not self._pending.started() and not self._card.done():
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            native = self._card._native
            with other_waits.own_words():
                other_waits.message(lambda: float(native.wait(seconds)), lambda: self._title)
        return super().wait(timeout)

    def source_rank(self) -> int:
        """The group rank at the other side."""
        self.wait()
        return self._card.source()

    _source_rank = source_rank


@contextmanager
def _named_losses() -> Iterator[None]:
    """A context that replaces an error of a lost connection by the core's, which names the rank and the cause."""
    try:
        yield
    except RuntimeError as error:
        if not tells_of_lost_rank(error) or not world.is_initialized():
            raise
        end = time.monotonic() + _PATIENCE
        while not world.is_aborted() and time.monotonic() < end:
            time.sleep(_LATE)
        if world.is_aborted():
            world.current().communicator.barrier()  # raises with the reason
        raise


class Gate:
    """The gate of one group of another backend: a communicator of the core over its members, new in each generation."""

    def __init__(self, ranks: Sequence[int], store: c10d.Store, timeout: timedelta, name: str) -> None:
        """``ranks`` are the members' ranks in the open generation; ``name`` ends the names of operations."""
        self._ranks = tuple(ranks)
        self._everyone = world.current().size
        self.name = name
        self._store = store
        self._seconds = shorter_limit(timeout)
        self._world: world.World | None = None
        self._communicator: Communicator | None = None
        self._bindings = 0
        self._lock = RLock()
        self._lanes: defaultdict[tuple[int, int, int], deque[Pending]] = defaultdict(deque)
        self._collectives: deque[Pending] = deque()

    def communicator(self) -> Communicator | None:
        """The communicator of the members in the open generation; None if that has other ranks than the group."""
        if not world.is_initialized():
            return None
        current = world.current()
        if self._world is current:
            return self._communicator
        with self._lock:
            if self._world is not current:
                self._communicator, self._world = None, current
                self._lanes.clear()
                self._collectives.clear()
                if current.size == self._everyone:
                    self._bindings += 1
                    name = f"gate {self._bindings}"
                    communicator = communicator_of(current.communicator, self._ranks, self._store, name)
                    communicator.limit_time(self._seconds)
                    communicator.match_in_order()
                    self._communicator = communicator
            return self._communicator

    def limit_time(self, timeout: timedelta) -> None:
        """Have operations that begin from now on raise CollectiveTimeout after ``timeout``."""
        self._seconds = shorter_limit(timeout)
        if (communicator := self.communicator()) is not None:
            communicator.limit_time(self._seconds)

    def pass_now(self, communicator: Communicator, name: str) -> None:
        """Return when all members have called ``name``, and pending operations of this group have started."""
        other_waits.ours()
        with other_waits.own_words():
            communicator.barrier(name=name)
        if self._collectives:
            with self._lock:
                while self._collectives and self._collectives[0].ready():
                    self._collectives[0].start()

    def pass_later(self, communicator: Communicator, name: str, call: Callable[[], Any], result: Any) -> GatedWork:
        """Have ``call`` start the operation ``name`` when all members have called it."""
        with self._lock:
            gate = communicator.barrier(name=name, blocking=False)
            pending = Pending(gate, self._collectives, self._lock, call)
        _look_after(self)
        return GatedWork(pending, _tensors(result))

    def message(
        self, communicator: Communicator, tensor: Tensor, peer: int, tag: int, sends: bool, call: Callable[[int], Any]
    ) -> GatedWork:
        """Exchange cards with group rank ``peer``, or `ANY`; ``call``, given the peer, starts the message."""
        own = tensor_text([tensor])
        mine, theirs = _card_of(own), bytearray(_CARD)
        way_out, way_in = (tag, tag | _ANSWER) if sends else (tag | _ANSWER, tag)
        what = f"dist.{'send' if sends else 'recv'}"
        who = "any rank" if peer == ANY else f"rank {self._ranks[peer]}"
        title = f"{what} {'to' if sends else 'from'} {who}, tag {tag}"
        if peer != ANY:
            send(communicator, mine, peer, tag=way_out, blocking=False)
        card = receive(communicator, _buffer(theirs), peer, tag=way_in, blocking=False)

        def check() -> None:
            other = card.source()
            if peer == ANY:
                send(communicator, mine, other, tag=way_out, blocking=False)
            came = bytes(theirs).rstrip(b"\0").decode()
            if came != own:
                verb = "receives" if sends else "sends"
                raise CollectiveMismatch(
                    f"rank {self._ranks[communicator.rank]}: {title}: expected {own}, rank {self._ranks[other]} {verb} "
                    f"{came}; give tensors of the same size and dtype on both sides"
                )

        with self._lock:
            lane = self._lanes[(sends, peer, tag)]
            pending = Pending(card, lane, self._lock, lambda: call(card.source()), check)
        _look_after(self)
        return _Message(pending, [tensor], card, title)

    def look(self) -> bool | None:
        """Start operations that are ready; returns whether some were, or None if nothing is pending."""
        with self._lock:
            heads = [lane[0] for lane in (self._collectives, *self._lanes.values()) if lane]
            ready = [head for head in heads if head.ready()]
            for head in ready:
                head.start()
            for key in [key for key, lane in self._lanes.items() if not lane]:
                del self._lanes[key]
        return bool(ready) if heads else None


_gates: WeakKeyDictionary[c10d.ProcessGroup, Gate] = WeakKeyDictionary()
_watched: WeakSet[Gate] = WeakSet()
_news = Condition()
_watch: Thread | None = None


def _look_after(gate: Gate) -> None:
    """Have a thread start the pending operations of ``gate``."""
    global _watch
    with _news:
        _watched.add(gate)
        if _watch is None or not _watch.is_alive():
            _watch = Thread(target=_look, name="ring-gate", daemon=True)
            _watch.start()
        _news.notify()


def _look() -> None:
    pause = _SOON
    while True:
        with _news:
            while not _watched:
                _news.wait()
                pause = _SOON
            gates = list(_watched)
        moved, gate = False, None
        for gate in gates:
            came = gate.look()
            moved |= bool(came)
            if came is None:
                with _news:
                    _watched.discard(gate)
                    if gate.look() is not None:
                        _watched.add(gate)
        gate, gates = None, []  # keep none alive while sleeping
        pause = _SOON if moved else min(_LATE, 1.5 * pause)
        time.sleep(pause)


def _tensors(given: Any) -> list[Tensor]:
    """The tensors in an argument of an operation, or in lists of lists in it."""
    if isinstance(given, Tensor):
        return [given]
    return [tensor for part in given for tensor in _tensors(part)]


def tensor_text(tensors: Sequence[Tensor]) -> str:
    """A text for comparison: "float32 [12]", "float32 2 x [12]", or for unequal sizes their sum and hash."""
    dtypes = {str(tensor.dtype).removeprefix("torch."): None for tensor in tensors}
    sizes = [tensor.numel() for tensor in tensors]
    if not tensors:
        return "no tensors"
    if len(set(sizes)) == 1:
        number = f"[{sizes[0]}]" if len(sizes) == 1 else f"{len(sizes)} x [{sizes[0]}]"
    else:
        number = f"{len(sizes)} tensors, {sum(sizes)} elements, sizes {crc32(repr(sizes).encode()):08x}"
    return f"{'/'.join(dtypes)} {number}"


def _buffer(card: bytearray) -> Buffer:
    memory = torch.frombuffer(card, dtype=torch.uint8)
    return Buffer(memory.data_ptr(), (len(card),), DType.UINT8, memory)


def _card_of(text: str) -> Buffer:
    return _buffer(bytearray(text.encode()[:_CARD].ljust(_CARD, b"\0")))


def _gate(group: c10d.ProcessGroup, ranks: Sequence[int], timeout: timedelta) -> Gate:
    whole = len(ranks) == world.current().size and dist.group.WORLD in (None, group)
    described = group.group_desc if group.group_desc != "undefined" else group.group_name
    return Gate(ranks, group.get_group_store(), timeout, "" if whole else f", group {described}")


def limit_time(group: c10d.ProcessGroup, timeout: timedelta) -> None:
    """Set the limit of the gate of a group, if it has one."""
    if not isinstance(group, RingProcessGroup) and (gate := _gate_of(group)) is not None:
        gate.limit_time(timeout)


def _gate_of(group: c10d.ProcessGroup) -> Gate | None:
    """The gate of a group; None if torch.distributed has other ranks than our job or run."""
    gate = _gates.get(group)
    if gate is None and world.is_initialized() and group.size() > 1 and dist.is_initialized():
        current = world.current()
        if (dist.get_rank(), dist.get_world_size()) == (current.rank, current.size):
            try:
                ranks = dist.get_process_group_ranks(group)
            except (KeyError, ValueError):
                return None
            gate = _gates[group] = _gate(group, ranks, c10d.default_pg_timeout)
    return gate


def _collective(operation: str, below: Any) -> Callable[..., Any]:
    """The kernel that runs before torch's ``operation`` of `_COMPARED`; ``below`` are the keys of torch's kernels."""
    public, compared = _COMPARED[operation]
    original = getattr(torch.ops.c10d, operation).default
    names, results = arguments_of(original)
    at = {name: index for index, name in enumerate(names)}
    group_at, async_at, tensors_at = at["process_group"], at["async_op"], at.get(compared, -1)
    op_at, root_at = at.get("reduce_op", -1), at.get("root_rank", -1)
    returns_tensors, uneven = results > 1, operation in _UNEVEN

    def gated(keys: Any, *args: Any) -> Any:
        keys = keys & below
        gate = _gate_of(c10d.ProcessGroup.unbox(args[group_at]))
        communicator = None if gate is None else gate.communicator()
        if gate is None or communicator is None:
            return original.redispatch(keys, *args)
        name = f"dist.{public}"
        if op_at >= 0:
            name += f" {_REDUCTIONS.get(args[op_at].op(), 'unknown')}"
        on_host = "tensor" not in at or args[at["tensor"]].is_cpu
        if tensors_at >= 0:
            tensors = _tensors(args[tensors_at])
            name += f" {tensor_text(tensors)}" if not uneven else f" {_dtype_text(tensors)}"
            on_host = all(tensor.is_cpu for tensor in tensors)
        if root_at >= 0:
            name += f", root {args[root_at]}"
        name += gate.name
        waits = async_at < len(args) and not args[async_at]
        # C++, backward passes and devices start their operations in the same order on all ranks anyway.
        if waits or not on_host or in_backward() or not _is_called_by_python(sys._getframe(1)):
            gate.pass_now(communicator, name)
            result = original.redispatch(keys, *args)
            if waits and on_host:
                with _named_losses():
                    c10d.Work.unbox(result[-1] if returns_tensors else result).wait()
            return result

        def call() -> Any:
            started = original.redispatch(keys, *args)
            return c10d.Work.unbox(started[-1] if returns_tensors else started)

        work = gate.pass_later(communicator, name, call, args[0]).boxed()
        return (args[0], work) if returns_tensors else work

    return gated


def _message(operation: str, below: Any) -> Callable[..., Any]:
    """As `_collective`, for an ``operation`` that sends or receives a message."""
    original, receives = getattr(torch.ops.c10d, operation).default, torch.ops.c10d.recv_.default
    sends, names = operation == "send", arguments_of(original)[0]
    at = {name: index for index, name in enumerate(names)}
    group_at, tag_at, peer_at = at["process_group"], at["tag"], at.get("dst", at.get("src", -1))

    def gated(keys: Any, *args: Any) -> Any:
        keys = keys & below
        gate = _gate_of(c10d.ProcessGroup.unbox(args[group_at]))
        communicator = None if gate is None else gate.communicator()
        tensors, tag = args[0], args[tag_at]
        known = gate is not None and communicator is not None and tensors[0].is_cpu and 0 <= tag < _ANSWER
        if not known or not _is_called_by_python(sys._getframe(1)):
            return original.redispatch(keys, *args)

        assert gate is not None
        assert communicator is not None

        def call(peer: int) -> Any:
            if sends:
                return c10d.Work.unbox(original.redispatch(keys, *args))
            return c10d.Work.unbox(receives.redispatch(keys, tensors, args[group_at], peer, tag))

        peer = args[peer_at] if peer_at >= 0 else ANY
        return gate.message(communicator, tensors[0], peer, tag, sends, call).boxed()

    return gated


def _is_called_by_python(frame: FrameType | None) -> bool:
    """Whether ``frame``, the caller of an operation, is a Python function of torch.distributed."""
    return frame is not None and frame.f_code.co_filename == c10d.__file__


def _dtype_text(tensors: Sequence[Tensor]) -> str:
    return tensor_text(tensors).split(" ")[0]


_HELPER = "make_group_with_gate"
_library: Any = None


def install() -> None:
    """From now on all operations of other backends pass the gate. Does nothing the second time, or with RING_GATE=off.

    New groups bind their gates at once, existing groups at their first collective of a generation.
    """
    global _library
    if _library is not None or config().gate == "off":
        return
    before_devices, keys_behind = private("before_devices"), private("keys_behind")
    if before_devices is None or keys_behind is None or not arguments_of(torch.ops.c10d.barrier.default)[0]:
        return
    below, key = keys_behind(before_devices), before_devices.name
    world.at_close(end_groups_of_failed_generation)
    _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    # `redispatch` releases the GIL: a thread of Gloo may need the GIL while it holds a lock that the operation needs.
    for operation in _COMPARED:
        if hasattr(torch.ops.c10d, operation):
            _library.impl(operation, uncompiled(_collective(operation, below)), key, with_keyset=True)
    for operation in ("send", "recv_", "recv_any_source_"):
        _library.impl(operation, uncompiled(_message(operation, below)), key, with_keyset=True)
    _bind_new_groups()


def remove() -> None:
    """Undo `install`."""
    global _library
    _library = None  # torch restores its own kernels


def _bind_new_groups() -> None:
    make = private("new_group_helper")
    if make is None or make.__name__ == _HELPER:
        return

    def helper(group_size: int, group_rank: int, global_ranks_in_group: Any, *args: Any, **options: Any) -> Any:
        made = make(group_size, group_rank, global_ranks_in_group, *args, **options)
        if _library is not None and group_size > 1 and world.is_initialized() and not world.is_aborted():
            ranks = list(global_ranks_in_group) or list(range(group_size))
            _bind(made[0], ranks, group_rank, options.get("timeout"))
        return made

    name = make.__name__
    helper.__name__ = _HELPER
    setattr(c10d, name, helper)


def _bind(group: Any, ranks: Sequence[int], own: int, timeout: timedelta | None) -> None:
    """Make the gate of a new group, of which this process is member ``own``."""
    if not isinstance(group, c10d.ProcessGroup) or isinstance(group, RingProcessGroup) or group in _gates:
        return
    current = world.current()
    everyone = dist.get_world_size() if dist.is_initialized() else len(ranks)
    if (everyone, ranks[own]) == (current.size, current.rank):
        gate = _gates[group] = _gate(group, ranks, timeout or c10d.default_pg_timeout)
        gate.communicator()
