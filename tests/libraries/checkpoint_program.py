"""A GPT of transformers with adapters of peft, whose checkpoints go to a bucket: ``python checkpoint_program.py URL``.

Prints what each rank has found wrong; nothing where all is well.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import ring_notebook.torch as ring


def made() -> tuple[Any, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    base = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.2))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    prepared: tuple[Any, Any] = ring.prepare(model, optimizer)
    return prepared


def train(model: Any, optimizer: Any, saved: Any, steps: int) -> None:
    tokens = torch.arange(32).reshape(2, 16) + ring.rank()
    while saved.steps < steps:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        saved.step()
        saved.wait()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


def check(url: str) -> list[str]:
    expected, optimizer = made()
    train(expected, optimizer, ring.checkpoint(expected, optimizer, folder=f"{url}/whole", background=True), 6)
    first, optimizer = made()
    saved = ring.checkpoint(first, optimizer, folder=f"{url}/part", every="2 steps", keep=1, background=True)
    train(first, optimizer, saved, 5)
    again, optimizer = made()
    saved = ring.checkpoint(
        again, optimizer, folder=f"{url}/part", every="2 steps", keep=1, background=True, resume=True
    )
    wrong = [] if saved.steps == 4 else [f"resumed after step {saved.steps}"]
    train(again, optimizer, saved, 6)
    found, right = weights(again), weights(expected)
    wrong += [name for name in right if not torch.equal(found[name], right[name])]
    if ring.rank() == 0:
        there = saved._place.file_system.find(saved._place._root, detail=True)
        names = {name.split("/")[-2] for name in there}
        wrong += [] if names == {"step-00000006"} else [f"there are {sorted(names)}"]
        frozen = sum(one.nbytes for one in again.parameters() if not one.requires_grad)
        wrong += [] if sum(one["size"] for one in there.values()) < frozen else ["frozen weights were written"]
    return wrong


ring.init()
torch.set_num_threads(1)
for line in check(sys.argv[1]):
    print(f"rank {ring.rank()}: {line}")  # noqa: T201
