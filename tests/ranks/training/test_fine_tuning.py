"""Models of which a part is trained: frozen and quantized weights, states of 8 bits, tied weights, shares of FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_notebook.core import world
from ring_notebook.errors import DriftError
from ring_notebook.torch.steps.repair import Shared

CODES = [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


class Scaled(nn.Parameter):
    """A weight of codes that keeps its scales as attributes, one of them in an object, as bitsandbytes does."""

    def __new__(cls, codes: Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, codes, False)


class State:
    """What `Scaled` keeps."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


class Pair(Tensor):
    """A float tensor that is made of codes and a scale, as torchao's are."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func}")


class Quantized(nn.Module):
    """A frozen weight of codes with scales, and an adapter; other values on every rank."""

    def __init__(self, rank: int, codes: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(rank)
        numbers = torch.randint(0, 100, (8, 8)) + rank
        self.weight = nn.Parameter(numbers.to(codes), requires_grad=False)
        self.scaled = Scaled(numbers.to(codes))
        self.scaled.state, self.scaled.mean = State(torch.randn(8)), torch.randn(1)
        self.pair = nn.Parameter(Pair(numbers.to(codes), torch.randn(8)), requires_grad=False)
        self.register_buffer("scale", torch.randn(8))
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = self.scaled.state
        pairs = [(self.weight, self.scale), (self.scaled, state.scale + self.scaled.mean)]
        frozen = sum((codes.detach().float() * scale for codes, scale in pairs), torch.zeros(8, 8))
        return x @ (frozen + self.pair.codes.float() * self.pair.scale) / 1e3 + self.up(self.down(x))


class Momentum8(torch.optim.Optimizer):
    """The sign of a momentum that is kept in 8 bits, with a scale of another type than the parameter's."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                before = state["codes"].float() * state["scale"].float() if state else torch.zeros_like(parameter)
                mean = 0.9 * before + 0.1 * parameter.grad
                state["scale"] = mean.abs().max().double().clamp(min=1e-9) / 127
                state["codes"] = (mean / state["scale"]).round().to(torch.int8)
                parameter.add_(mean.sign(), alpha=-group["lr"])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def steps(model: Any, optimizer: Any, rank: int, number: int = 2) -> None:
    torch.manual_seed(100 + rank)
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_frozen_codes_and_their_scales_are_rank_0s_bit_for_bit(hvd: ModuleType, rank: int, codes: torch.dtype) -> None:
    model = Quantized(rank, codes)
    model, optimizer = hvd.prepare(model, torch.optim.Adam(trained(model)))
    x = torch.ones(2, 8)
    assert torch.equal(model(x), Quantized(0, codes)(x))
    hvd.check(model, optimizer)
    steps(model, optimizer, rank)
    hvd.check(model, optimizer)
    assert torch.equal(model.weight.view(torch.uint8), Quantized(0, codes).weight.view(torch.uint8))


@pytest.mark.sizes(3)
def test_codes_that_differ_are_counted(hvd: ModuleType, rank: int) -> None:
    model = nn.ParameterDict({"codes": nn.Parameter(torch.zeros(9, dtype=torch.uint8), requires_grad=False)})
    model["codes"][rank] = 7
    with pytest.raises(DriftError, match=r"codes \(9,\) differs between ranks in 3 elements"):
        hvd.check(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_of_8_bits_stay_what_they_are(hvd: ModuleType, rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(8, 8).to(dtype)
    optimizer = Momentum8(model.parameters())
    if rank == 0:
        model(torch.randn(3, 8, dtype=dtype)).sum().backward()
        optimizer.step()
    model, optimizer = hvd.prepare(model, optimizer)
    types = {name: one.dtype for name, one in optimizer.state[model.weight].items()}
    assert types == {"codes": torch.int8, "scale": torch.float64}
    hvd.check(model, optimizer)


@pytest.mark.sizes(3)
def test_only_what_is_trained_is_compared(hvd: ModuleType, rank: int) -> None:
    """Also where the optimizer was given all parameters; what has been trained and is frozen now still is."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    model, optimizer = hvd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shared = optimizer._shared()
    assert [name for name, _ in shared.parameters()] == ["1.weight", "1.bias"]
    model[0].weight.requires_grad_(True)
    model[1].weight.requires_grad_(False)
    assert [name for name, _ in shared.parameters()] == ["0.weight", "1.weight", "1.bias"]
    assert isinstance(shared, Shared)


@pytest.mark.sizes(3)
def test_only_what_is_trained_is_sent(hvd: ModuleType, rank: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    model[0].requires_grad_(False)
    model, optimizer = hvd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    assert model[0].weight.grad is None
    (layout,) = [optimizer._reducer._layout]
    names = {name for name, one in model.named_parameters() if one in layout.places}
    assert names == {"1.weight", "1.bias"}
    assert world.current().size == 3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp"])
def test_gradient_checkpointing(hvd: ModuleType, rank: int, size: int, strategy: Any, reentrant: bool) -> None:
    """With frozen weights below, as of adapters: reentrant checkpoints need an input that needs gradients."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.adapter = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.adapter(x).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    optimizer, its = (torch.optim.SGD(trained(one), lr=0.1) for one in (model, alone))
    data = torch.randn(3, 4 * size, 8)
    model, optimizer = hvd.prepare(model, optimizer, strategy=strategy)
    for batch in data:
        its.zero_grad()
        alone(batch).square().mean().backward()
        its.step()
        optimizer.zero_grad()
        model(batch[rank * 4 : (rank + 1) * 4]).square().mean().backward()
        optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor() if hasattr(one, "full_tensor") else one, other)


class Tied(nn.Module):
    """The shape of a GPT: blocks in a list within a dict within the body, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {"embed": nn.Embedding(12, 8), "blocks": nn.ModuleList(nn.Linear(8, 8) for _ in "ab")}
        )
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.body["embed"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body["embed"](tokens)
        for block in self.body["blocks"]:  # type: ignore[union-attr]
            x = x + block(x).tanh()
        return self.head(x)


class Held(nn.Module):
    """Parts in what is never called: a dict as of peft's prompts, plain modules as of VAEs, parameters in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.ModuleDict({"default": nn.Embedding(12, 8), "more": nn.ModuleDict({"last": nn.Linear(8, 8)})})
        self.middle, down = nn.Module(), nn.Module()
        self.middle.block = nn.Linear(8, 8)
        down.block = nn.Linear(8, 8)
        self.down = nn.ModuleList([down])
        self.scales = nn.ParameterDict({"one": nn.Parameter(torch.ones(8))})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.middle.block(self.prompt["default"](tokens)).tanh()
        more: Any = self.prompt["more"]
        return more["last"](self.down[0].block(x)) * self.scales["one"]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [Tied, Held])
@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp"])
def test_models_of_parts_train_as_alone(hvd: ModuleType, rank: int, strategy: Any, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model: Any = kind()
    alone = copy.deepcopy(model)
    optimizer, its = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone))
    tokens = torch.arange(12)
    model, optimizer = hvd.prepare(model, optimizer, strategy=strategy)
    for _ in range(3):
        for one, steps_it in ((model, optimizer), (alone, its)):
            steps_it.zero_grad()
            one(tokens).square().mean().backward()
            steps_it.step()
    inner: Any = model.module if strategy == "ddp" else model
    assert kind is Held or inner.head.weight is inner.body["embed"].weight
    for one, other in zip(inner.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor() if hasattr(one, "full_tensor") else one, other)


def test_a_sharded_model_is_prepared_again(hvd: ModuleType, rank: int) -> None:
    """As in a cell that is run again."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model, optimizer = hvd.prepare(model, optimizer, strategy="fsdp")
        steps(model, optimizer, rank)
    hvd.check(model, optimizer)
    assert optimizer.state[model[0].weight]["step"] == 6


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])  # one has state from the beginning
def test_state_is_sharded_as_its_parameters(hvd: ModuleType, kind: Any) -> None:
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = kind(model.parameters(), lr=0.1)
    steps(model, optimizer, 0)  # before `prepare`
    alone: Any = copy.deepcopy(model)
    its = kind(alone.parameters(), lr=0.1)
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model, optimizer = hvd.prepare(model, optimizer, strategy="fsdp")
    for one, one_optimizer in ((model, optimizer), (alone, its)):
        steps(one, one_optimizer, 0)
    for sharded, whole in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), whole)


def test_state_of_another_shape_is_refused(hvd: ModuleType) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adafactor(model.parameters())
    steps(model, optimizer, 0)
    with pytest.raises(ValueError, match="state of another shape than theirs already"):
        hvd.prepare(model, optimizer, strategy="fsdp")


def test_a_model_on_several_devices_is_refused(hvd: ModuleType, rank: int) -> None:
    model: Any = nn.Linear(2, 2)
    model.hf_device_map = {"": 0}
    assert hvd.prepare(model) is model
    model.hf_device_map = {"body": 0, "head": 1}
    with pytest.raises(ValueError, match=rf"rank {rank}: device_map has put .* devices 0, 1.*strategy='fsdp'"):
        hvd.prepare(model)
