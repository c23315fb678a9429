"""send and recv of a process group."""

# Torch declares overloads for callers of other kinds; its own code calls what stands here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from torch import Tensor

from ring_notebook.core.communicator import ANY, receive, send
from ring_notebook.torch.process_group.movements import MovingGroup
from ring_notebook.torch.process_group.operands import Operand, check_on_host, moved_operand, operand
from ring_notebook.torch.process_group.ring_work import RingWork
from ring_notebook.torch.tensors import can_reduce


class SendingGroup(MovingGroup):
    """A process group whose ranks also send to one another."""

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
        """Receive from whichever rank's message comes first."""
        return self.recv(tensors, ANY, tag)


def _memory(tensor: Tensor) -> Operand:
    """As numbers where the core knows them, so that another dtype on the other side is found; else as bytes."""
    known = tensor.is_complex() or can_reduce(tensor.dtype)
    return operand(tensor) if known else moved_operand(tensor)
