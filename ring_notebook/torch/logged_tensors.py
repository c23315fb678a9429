"""Logged tensors of one number on a device: copied to the host in the background, read once the copy is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_notebook.torch.devices import has_streams

__all__ = ["LoggedTensor", "begin_copy"]


class LoggedTensor:
    """The value that a tensor has where its stream is now; the host does not wait for it."""

    __slots__ = ("_copy", "_event")

    def __init__(self, tensor: Tensor) -> None:
        module = getattr(torch, tensor.device.type)
        # Torch takes pinned memory for what nobody waits for: from pageable memory a copy would wait.
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._event = module.Event()
        self._event.record(module.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Whether the device has written the copy. Raises RuntimeError where the device has failed."""
        done: bool = self._event.query()
        return done

    def number(self) -> float:
        """The value, once it has arrived."""
        return float(self._copy)


def begin_copy(value: Any) -> LoggedTensor | None:
    """Begin to copy ``value``, a tensor of one number; None for all but tensors of a device that has streams.

    Raises RuntimeError while a CUDA graph is captured, whose replays would log nothing.
    """
    if not isinstance(value, Tensor) or not has_streams(value):
        return None
    if getattr(torch, value.device.type).is_current_stream_capturing():
        raise RuntimeError("log: a CUDA graph is being captured; log the tensor after the graph's replay")
    return LoggedTensor(value)
