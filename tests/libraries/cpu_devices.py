"""Puts what PyTorch's tests ask for on GPUs into CPU memory: their DDP tests want a GPU for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

__all__ = ["OnCPU", "Wrapped", "on_cpu"]


class OnCPU(TorchFunctionMode):
    """Reads ``cuda`` and the number of a GPU as ``cpu`` in whatever makes or moves a tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by PyTorch in place of ``func``."""
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to("cpu")
        if func is torch.Tensor.to:
            args = (args[0], *(_on_cpu(value) for value in args[1:]))
        if func is torch._C._nn._parse_to:  # of Module.to
            args = tuple(_on_cpu(value) for value in args)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    """``device``, or the CPU where it is a GPU."""
    if isinstance(device, bool):
        return device
    named = isinstance(device, str) and device.startswith("cuda")
    is_gpu = isinstance(device, int) or named or (isinstance(device, torch.device) and device.type == "cuda")
    return torch.device("cpu") if is_gpu else device


class Wrapped(DistributedDataParallel):
    """A wrapper of a module whose ``device_ids`` are those of GPUs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["device_ids"] = options["output_device"] = None
        super().__init__(*args, **options)


@contextmanager
def on_cpu(module: Any) -> Iterator[None]:
    """Run tests of ``module`` that ask for GPUs."""
    changes = [
        mock.patch.object(torch.nn.parallel, "DistributedDataParallel", Wrapped),
        mock.patch.object(module, "DistributedDataParallel", Wrapped),
        mock.patch.object(module, "init_multigpu_helper", lambda size, backend: {rank: [rank] for rank in range(size)}),
        mock.patch.object(torch.cuda, "set_device", return_value=None),
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.nn.Module, "cuda", lambda self, device=None: self),
    ]
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        stack.enter_context(OnCPU())
        yield
