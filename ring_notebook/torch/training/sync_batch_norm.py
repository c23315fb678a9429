"""Batch normalization over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.basics import size
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.torch.collectives.allreduce import allreduce

_BatchNorm: Any = torch.nn.BatchNorm1d.__base__  # of all layers of this kind

_PLAIN = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch normalization by the mean and variance over the batches of all ranks together.

    Takes ``(N, C)`` or ``(N, C, ...)``; N may differ by rank. Works as torch's BatchNorm in evaluation and at size 1.
    Gradients flow through the statistics of all ranks. In training all ranks must run it; each forward pass makes two
    small allreduces. (Horovod: ``SyncBatchNorm``, which needs a GPU; this one does not.)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replace each BatchNorm layer of ``module``, also torch's SyncBatchNorm, by one of this class, in place.

        Parameters and buffers stay the same objects, so that an optimizer made before still has them. Returns
        ``module``, or its replacement where it is such a layer itself. Raises ValueError for a SyncBatchNorm with a
        ``process_group``, which synchronizes within that, and for a layer of a class that also does something else in
        ``forward``, as timm's BatchNormAct2d. (torch: ``SyncBatchNorm.convert_sync_batchnorm``.)
        """
        return cls._convert(module, _BatchNorm)

    @classmethod
    def convert_torchs(cls, module: torch.nn.Module) -> torch.nn.Module:
        """`convert_sync_batchnorm` only for layers of torch.nn.SyncBatchNorm."""
        return cls._convert(module, torch.nn.SyncBatchNorm)

    @classmethod
    def _convert(cls, module: torch.nn.Module, kind: type[torch.nn.Module]) -> torch.nn.Module:
        if isinstance(module, kind) and not isinstance(module, cls):
            return cls._like(module)
        for name, child in module.named_children():
            converted = cls._convert(child, kind)
            if converted is not child:
                setattr(module, name, converted)
        return module

    @classmethod
    def _like(cls, layer: Any) -> SyncBatchNorm:
        if getattr(layer, "process_group", None) is not None:
            raise ValueError(
                "a torch.nn.SyncBatchNorm with a process_group synchronizes within that group, ours over all ranks; "
                "make it without process_group"
            )
        if type(layer).forward not in _PLAIN:
            raise ValueError(
                f"a layer of class {type(layer).__name__} cannot be replaced by SyncBatchNorm: its own forward() may do"
                " more than normalize, such as an activation, which would be lost; build the model with torch's layers"
            )
        made = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(made, name, getattr(layer, name))
        made.train(layer.training)
        return made

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected an input of {self.num_features} channels, got {input.shape[1]}")

    def forward(self, input: Tensor) -> Tensor:
        """``input`` normalized per channel (dimension 1), same shape and dtype."""
        if not self.training or size() == 1:
            plain: Tensor = super().forward(input)
            return plain
        self._check_input_dim(input)
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        # Half precision cannot hold the sums.
        values = input if input.dtype.itemsize >= 4 else input.float()
        count = values.new_full([1], values.numel() // values.shape[1])  # filled on the device: a copy would wait
        # Two passes over the data: the difference of two sums of squares would lose the precision of the variance.
        sums = allreduce(torch.cat([values.sum(dims), count]), op=ReduceOp.SUM, name="batch norm mean")
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = values - mean.view(shape)
        squares = allreduce(centred.square().sum(dims), op=ReduceOp.SUM, name="batch norm variance")
        variance = squares / total
        self._track(mean.detach(), (squares / (total - 1).clamp(min=1)).detach())
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # Without momentum the running values are plain averages over all batches.
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased_variance)):
            # The number of batches stays on its device, because reading it would make the host wait.
            weight = 1 / self.num_batches_tracked.to(running.dtype) if self.momentum is None else self.momentum
            running.lerp_(new.to(running.dtype), weight)
