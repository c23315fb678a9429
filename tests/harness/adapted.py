"""A layer with an adapter, where peft is not installed."""

from __future__ import annotations

from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen layer, and an adapter of ``rank`` beside it: as peft builds it, with its names."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.base_layer(inputs) + self.lora_B["default"](self.lora_A["default"](inputs))
        return found
