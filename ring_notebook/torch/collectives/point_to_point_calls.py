"""send, recv, isend and irecv: tensors from one rank to another, with our own signatures. Beyond Horovod."""

from __future__ import annotations

from torch import Tensor

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.handles import Handle
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ANY, receive
from ring_notebook.core.communicator import send as send_buffer
from ring_notebook.torch.tensors import buffer_of, check_tensor, copy_back, host_target, on_host


def send(tensor: Tensor, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Send ``tensor`` to the global rank ``dst``, which calls `recv` with a tensor of the same size and dtype.

    Returns when ``tensor`` may be changed: at once up to 64 KiB, else after it was received. Raises CollectiveMismatch
    on both sides where sizes or dtypes differ (for a small tensor in the sender's next call), and CollectiveAborted
    when the other rank failed, left or died.
    """
    _send(tensor, dst, tag, process_set, blocking=True)


def isend(tensor: Tensor, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> Handle:
    """Start `send`; do not change ``tensor`` until `synchronize` has returned."""
    return _send(tensor, dst, tag, process_set, blocking=False)


def recv(tensor: Tensor, src: int | None = None, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
    """Receive into ``tensor``, in place, from the global rank ``src``, or from any rank; returns the sender's rank.

    Messages of one rank with one tag arrive in the order in which they were sent. Raises the same errors as `send`.
    """
    source: int = _receive(tensor, src, tag, process_set, blocking=True).wait()
    return source


def irecv(tensor: Tensor, src: int | None = None, tag: int = 0, process_set: ProcessSet = global_process_set) -> Handle:
    """Start `recv`; `synchronize` returns the sender's rank."""
    return _receive(tensor, src, tag, process_set, blocking=False)


def _send(tensor: Tensor, dst: int, tag: int, process_set: ProcessSet, *, blocking: bool) -> Handle:
    check_tensor(tensor, "send")
    check_process_set(process_set)
    buffer = buffer_of(on_host(tensor.detach()).view(-1))
    message = send_buffer(process_set.communicator, buffer, process_set.group_rank(dst), tag=tag, blocking=blocking)
    return Handle(process_set.communicator, "", [message], lambda: None)


def _receive(tensor: Tensor, src: int | None, tag: int, process_set: ProcessSet, *, blocking: bool) -> Handle:
    check_tensor(tensor, "recv")
    check_process_set(process_set)
    communicator, ranks = process_set.communicator, process_set.ranks or []
    values = tensor.detach()
    host = host_target(values)
    source = ANY if src is None else process_set.group_rank(src)
    message = receive(communicator, buffer_of(host.view(-1)), source, tag=tag, blocking=blocking)

    def finish() -> int:
        copy_back(host, values)
        return ranks[message.source()]

    return Handle(communicator, "", [message], finish)
