"""What two ranks do with peft, compared with one process that has the batches of both; see harness/case_jobs.py."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
import torchao.quantization
from peft import (
    IA3Config,
    LoraConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torchao.optim import AdamW8bit
from transformers import GPT2Config, GPT2LMHeadModel

import ring_notebook.torch as ring

STRATEGIES = (None, "ddp", "fsdp")
TEXT = torch.tensor(list(inspect.getsource(argparse).encode())[: 8 * 33]).view(8, 33)
ROUNDING = 1e-5


def gpt(seed: int = 0) -> Any:
    """A GPT-2 of bytes whose head is tied to its embedding."""
    torch.manual_seed(seed)
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=2, n_head=2, **still, **ends))


def adapted(seed: int = 0, config: PeftConfig | None = None, **options: Any) -> Any:
    """It with adapters of rank 4 in the attention, or with what ``config`` says."""
    lora = {"r": 4, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    return get_peft_model(gpt(seed), config or LoraConfig(**lora, **options))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """For what is trained of ``model``."""
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


def train(model: Any, optimizer: Any, rows: Tensor, bf16: bool = False) -> None:
    """Three steps on ``rows``."""
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()


def own_rows() -> Tensor:
    """This rank's half of the text."""
    return TEXT.chunk(ring.size())[ring.rank()]


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which the rank may have a share."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def is_as_alone(
    prepare: Callable[[Any], None] = lambda _: None,
    limit: float = ROUNDING,
    bf16: bool = False,
    strategies: tuple[Any, ...] = STRATEGIES,
    **options: Any,
) -> None:
    """Training on two ranks gives the weights of one process, within ``limit``."""
    for strategy in strategies:
        # Other weights on every rank: prepare gives all of them those of rank 0.
        model, alone = adapted(ring.rank(), **options), adapted(0, **options)
        frozen = {name: one.detach().clone() for name, one in alone.named_parameters() if not one.requires_grad}
        prepare(model)
        model, optimizer = ring.prepare(model, adam(model), strategy=strategy)
        train(model, optimizer, own_rows(), bf16)
        train(alone, adam(alone), TEXT, bf16)
        inner = model.module if strategy == "ddp" else model
        for (name, one), other in zip(inner.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(one), other.detach(), atol=limit, rtol=limit, msg=f"{strategy}: {name}")
            assert name not in frozen or torch.equal(whole(one), frozen[name]), name
        ring.check(inner, optimizer)


def case_lora() -> None:
    """Adapters alone."""
    is_as_alone()


def case_lora_in_bf16() -> None:
    """Under autocast."""
    is_as_alone(bf16=True, limit=2e-2)


def case_lora_with_checkpointing() -> None:
    """Gradient checkpointing."""

    def plain(model: Any) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    is_as_alone(plain)


def case_lora_with_reentrant_checkpointing() -> None:
    """The older kind, which needs inputs that need gradients."""

    def reentrant(model: Any) -> None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})

    is_as_alone(reentrant)


def case_modules_to_save() -> None:
    """A layer that is trained whole beside the adapters; also the embedding, to which the head is tied."""
    is_as_alone(modules_to_save=["ln_f"])
    is_as_alone(modules_to_save=["wte"])


def case_other_methods() -> None:
    """Scales of activations, prompts and prefixes, which are held beside the model, and directions with lengths."""
    prompts: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    for config in (
        IA3Config(task_type="CAUSAL_LM", target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True),
        PromptTuningConfig(**prompts),
        PrefixTuningConfig(**prompts),
        PromptEncoderConfig(**prompts, encoder_hidden_size=8),
    ):
        is_as_alone(config=config)
    is_as_alone(use_dora=True)


def case_packed_rows() -> None:
    """Sequences of other lengths in a row, told apart by their positions."""
    places = torch.cat([torch.arange(length) for length in (7, 20, 6)]).expand(4, -1)

    def packed(model: Any) -> None:
        forward = model.forward
        model.forward = lambda **given: forward(**given, position_ids=places[: len(given["input_ids"])])

    model, alone = adapted(ring.rank()), adapted(0)
    packed(model)
    places_of_all = torch.cat([places, places])
    forward = alone.forward
    alone.forward = lambda **given: forward(**given, position_ids=places_of_all)
    model, optimizer = ring.prepare(model, adam(model))
    train(model, optimizer, own_rows())
    train(alone, adam(alone), TEXT)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=ROUNDING)


def case_after_training() -> None:
    """The state of the adapter, the loss of all ranks, a text from each, and the merged model."""
    texts, losses, states = [], [], []
    for strategy in (None, "fsdp"):
        model = adapted(0)
        model, optimizer = ring.prepare(model, adam(model), strategy=strategy)
        train(model, optimizer, own_rows())
        count, every = model.get_nb_trainable_parameters()
        assert (count, every) == (512, sum(one.numel() for one in gpt().parameters()) + 512)
        if strategy is None:
            states.append(get_peft_model_state_dict(model))
        else:
            options = StateDictOptions(full_state_dict=True)
            states.append(get_peft_model_state_dict(model, get_model_state_dict(model, options=options)))
        model.eval()
        # Rank 1 makes a longer text: what is gathered for a text is gathered by all.
        new = 5 if strategy is None else 3
        texts.append(model.generate(input_ids=own_rows()[:1, :8], max_new_tokens=new, do_sample=False)[0, :11])
        with torch.no_grad():
            losses.append(ring.allreduce(model(input_ids=own_rows(), labels=own_rows()).loss))
            before = model(input_ids=own_rows()).logits
            merged = model.merge_and_unload()
            torch.testing.assert_close(merged(input_ids=own_rows()).logits, before, atol=ROUNDING, rtol=ROUNDING)
    assert torch.equal(*texts)
    torch.testing.assert_close(*losses)
    assert len(states[0]) == 4
    torch.testing.assert_close(states[0], states[1], atol=ROUNDING, rtol=ROUNDING)


def case_several_adapters() -> None:
    """Switched between steps, disabled, and one that is added later."""
    model = adapted(ring.rank())
    model.add_adapter("other", LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    adapters = [one for name, one in model.named_parameters() if "lora_" in name]
    model, optimizer = ring.prepare(model, torch.optim.AdamW(adapters, lr=1e-2))
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        train(model, optimizer, own_rows())
    ring.check(model, optimizer)
    model.add_adapter("later", LoraConfig(r=2, target_modules=["c_proj"], fan_in_fan_out=True))
    model.set_adapter("later")
    model, optimizer = ring.prepare(model, adam(model))
    train(model, optimizer, own_rows())
    with model.disable_adapter(), torch.no_grad():
        model(input_ids=own_rows())
    ring.check(model, optimizer)


class Beside(nn.Module):
    """A frozen layer and an adapter beside it."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape [rows, 64]."""
        return self.frozen(x) + self.up(self.down(x))


def _quantized(kind: str) -> nn.Module:
    """A layer of other weights on every rank, quantized there."""
    torch.manual_seed(ring.rank())
    if kind == "4 bits of bitsandbytes":
        four: nn.Module = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32).to("cpu")
        return four
    if kind == "8 bits of bitsandbytes":
        eight: nn.Module = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu")
        return eight
    layer = nn.Sequential(nn.Linear(64, 64))
    torchao.quantization.quantize_(layer, torchao.quantization.Int8WeightOnlyConfig())
    return layer


def case_quantized_weights() -> None:
    """Codes and scales are those of rank 0, and the model computes the same on all ranks."""
    for kind in ("4 bits of bitsandbytes", "8 bits of bitsandbytes", "8 bits of torchao"):
        frozen = _quantized(kind)
        for parameter in frozen.parameters():
            parameter.requires_grad_(False)
        model = Beside(frozen)
        model, optimizer = ring.prepare(model, adam(model))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().sum().backward()
            optimizer.step()
        first, second = ring.allgather(model(torch.ones(1, 64)).detach())
        assert torch.equal(first, second), kind
        ring.check(model, optimizer)


def case_states_of_8_bits() -> None:
    """Optimizers whose states are codes and scales: those of the rank that has made steps."""
    for kind in (bitsandbytes.optim.Adam8bit, AdamW8bit):
        model = nn.Linear(64, 128)
        optimizer = kind(model.parameters(), lr=1e-2)
        torch.manual_seed(ring.rank())
        for turn in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().sum().backward()
            optimizer.step()
            if turn == 0:
                model, optimizer = ring.prepare(model, optimizer)
            ring.check(model, optimizer)
