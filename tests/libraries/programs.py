"""Programs of libraries over torch.distributed, as their documentation shows them, for cells and scripts of two ranks.

``FAIL`` stands where a test has a rank fail.
"""

from __future__ import annotations

__all__ = ["ACCELERATE", "HUGGING_FACE", "LEFT_OUT", "LIBRARIES", "PEERS", "SCRIPTS"]

DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
inputs = torch.randn(32, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
"""
ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2, accelerator.state
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    FAIL
    optimizer.step()
weights = accelerator.gather(model.module.weight.detach().flatten()).view(2, -1)
assert torch.equal(weights[0], weights[1])
"""
)
FABRIC = (
    DATA
    + """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
assert fabric.world_size == 2
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
for x, y in fabric.setup_dataloaders(DataLoader(data, batch_size=4)):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    fabric.backward(loss)
    FAIL
    optimizer.step()
weights = fabric.all_gather(model.module.weight.detach().flatten())
assert torch.equal(weights[0], weights[1])
"""
)
TRAINER = (
    DATA
    + """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        x, y = batch
        FAIL
        return torch.nn.functional.mse_loss(self.layer(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
assert trainer.world_size == 2
trainer.fit(Model(), DataLoader(data, batch_size=4))
assert trainer.global_step == 4
"""
)
# A language model of bytes, on Python's own sources.
HUGGING_FACE = """
import argparse, inspect, tempfile, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

text = torch.tensor(list(inspect.getsource(argparse).encode())[: 32 * 33]).view(32, 33)
data = [{"input_ids": row, "labels": row} for row in text]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=33, n_embd=16, n_layer=1, n_head=2))

class Own(Trainer):
    def compute_loss(self, *args, **options):
        FAIL
        return super().compute_loss(*args, **options)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-2, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )
    assert arguments.world_size == 2, arguments.world_size
    trainer = Own(model=model, args=arguments, train_dataset=data)
    trainer.train()
assert trainer.state.global_step == 4
weights = trainer.accelerator.gather(model.transformer.wte.weight.detach().flatten()).view(2, -1)
assert torch.equal(weights[0], weights[1])
"""
CHECKPOINT = (
    DATA
    + """
import os, shutil, torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group("ring")

def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def state(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}

model, optimizer = made(0)
model(inputs).sum().backward()
optimizer.step()
folder = os.environ["CHECKPOINT"]
for _ in range(1):
    FAIL
checkpoint.save(state(model, optimizer), checkpoint_id=folder)
other, its_optimizer = made(1)
loaded = state(other, its_optimizer)
checkpoint.load(loaded, checkpoint_id=folder)
set_state_dict(other, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
for one, two in zip(model.parameters(), other.parameters()):
    assert torch.equal(one.full_tensor(), two.full_tensor())
"""
)
# A reward in words is not needed: a tiny model of random weights learns to repeat sentences, with adapters of low rank.
TRL = """
import os, tempfile, torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = "one two three four five six seven eight".split()
known = {word: number for number, word in enumerate(["<pad>", "<end>", *words])}
tokenizer = Tokenizer(WordLevel(known, unk_token="<pad>"))
tokenizer.pre_tokenizer = Whitespace()
tokens = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
data = Dataset.from_list([{"text": " ".join((words * 2)[at % 8 : at % 8 + 8])} for at in range(32)])
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(known), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
)

class Own(SFTTrainer):
    def compute_loss(self, *args, **options):
        FAIL
        return super().compute_loss(*args, **options)

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, use_cpu=True, bf16=False, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-2,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )
    assert arguments.world_size == 2, arguments.world_size
    trainer = Own(
        model=model, args=arguments, train_dataset=data, processing_class=tokens,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
assert trainer.state.global_step == 4, trainer.state.global_step
(adapter,) = [one for name, one in trainer.model.named_parameters() if "v_proj.lora_B" in name]
assert adapter.abs().sum() > 0
weights = trainer.accelerator.gather(adapter.detach().flatten()).view(2, -1)
assert torch.equal(weights[0], weights[1])
"""
IGNITE = (
    DATA
    + """
import os
import ignite.distributed as idist
from ignite.engine import Engine, Events
from ignite.metrics import Average, MeanSquaredError

assert (idist.get_rank(), idist.get_world_size()) == (int(os.environ["RANK"]), 2)
assert idist.model_name() == "native-dist"
rank = idist.get_rank()
assert idist.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
assert idist.all_gather(f"rank {rank}") == ["rank 0", "rank 1"]
assert idist.broadcast("text" if rank == 0 else None, src=0, safe_mode=True) == "text"
loader = idist.auto_dataloader(data, batch_size=8, shuffle=True)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))

def update(engine, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    FAIL
    optimizer.step()
    return loss.item()

trainer = Engine(update)
trainer.run(loader, max_epochs=3)
weights = idist.all_gather(model.module.weight.detach().flatten()).view(2, -1)
assert torch.equal(weights[0], weights[1])

def predict(engine, batch):
    with torch.no_grad():
        return model(batch[0]), batch[1]

evaluator = Engine(predict)
MeanSquaredError().attach(evaluator, "error")
found = evaluator.run(idist.auto_dataloader(data, batch_size=8, shuffle=False)).metrics["error"]
with torch.no_grad():
    whole = torch.nn.functional.mse_loss(model.module(data.tensors[0]), data.tensors[1]).item()
assert abs(found - whole) < 1e-5, (found, whole)
"""
)
# Metrics of each rank's share are those of all samples; the shares are not equally long.
TORCHMETRICS = """
import os, torch, torchmetrics
from torchmetrics import classification, regression

rank = int(os.environ["RANK"])
torch.manual_seed(0)
scores, labels, values = torch.rand(50, 3), torch.randint(3, (50,)), torch.randn(50)
own = slice(0, 18) if rank == 0 else slice(18, 50)
for _ in range(1):
    FAIL
metrics = [
    (classification.MulticlassAccuracy(3), scores, labels),
    (classification.MulticlassConfusionMatrix(3), scores, labels),
    (classification.MulticlassAUROC(3), scores, labels),
    (classification.BinaryAveragePrecision(), scores[:, 0], labels.clamp(max=1)),
    (regression.MeanSquaredError(), scores[:, 1], values),
    (regression.PearsonCorrCoef(), scores[:, 1], values),
    (regression.SpearmanCorrCoef(), scores[:, 1], values),
    (regression.R2Score(), scores[:, 1], values),
]
for metric, predicted, target in metrics:
    whole = metric.clone()
    whole.distributed_available_fn = lambda: False
    whole.update(predicted, target)
    for part in range(2):
        metric.update(predicted[own][part::2], target[own][part::2])
    torch.testing.assert_close(metric.compute(), whole.compute(), msg=lambda text: f"{metric}: {text}")
both = torchmetrics.MetricCollection([classification.MulticlassF1Score(3), classification.MulticlassRecall(3)])
assert set(both(scores[own], labels[own])) == {"MulticlassF1Score", "MulticlassRecall"}
mean = torchmetrics.MeanMetric()
mean.update(values[own])
torch.testing.assert_close(mean.compute(), values.mean())
texts = torchmetrics.CatMetric()
texts.update(values[own])
assert torch.equal(texts.compute(), values)
"""
LIBRARIES = {
    "accelerate": ACCELERATE,
    "fabric": FABRIC,
    "trainer": TRAINER,
    "hugging_face": HUGGING_FACE,
    "checkpoint": CHECKPOINT,
}
"""Those that make a default group themselves."""
_CHOICES = [(one, two) for one in (True, False) for two in (True, False)]
SCRIPTS: dict[str, list[tuple[str, str, tuple[object, ...]]]] = {
    "accelerate's test_script": [("test_script", "main", ())],
    "accelerate's test_ops": [("test_ops", "main", ())],
    "accelerate's test_sync": [("test_sync", "main", ())],
    "accelerate's test_sync, parts for GPUs": [
        ("test_sync", name, (split, dispatch, each))
        for name in ("test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler")
        for split, dispatch in _CHOICES
        for each in (True, False)
    ],
    "accelerate's test_distributed_data_loop": [("test_distributed_data_loop", "main", ())],
    "accelerate's test_metrics": [("external_deps.test_metrics", "main", ())],
    "accelerate's test_metrics, parts for GPUs": [
        ("external_deps.test_metrics", "test_gather_for_metrics_with_iterable_dataset", ()),
        ("external_deps.test_metrics", "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset", ()),
    ],
}
"""Of `accelerate.test_utils.scripts`: modules, and what to call there."""
LEFT_OUT = {
    "test_distributed_data_loop": (
        "test_can_join_uneven_inputs",
        "test_join_can_override_even_batches",
        "test_join_can_override_for_mixed_type_dataloaders",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches",
    )
}
"""Functions of these scripts that are not called: on CPUs accelerate joins no uneven inputs, so ranks would wait."""
# Those of the script that need no NCCL, as bfloat16 does.
_HOOKS = """
from accelerate import DDPCommunicationHookType as Hook
from accelerate.test_utils.scripts.test_ddp_comm_hook import test_ddp_comm_hook
for hook, wrapper, options in (
    (Hook.NO, Hook.NO, {}),
    (Hook.FP16, Hook.NO, {}),
    (Hook.POWER_SGD, Hook.NO, {}),
    (Hook.POWER_SGD, Hook.FP16, {}),
    (Hook.POWER_SGD, Hook.NO, {"matrix_approximation_rank": 2}),
    (Hook.BATCHED_POWER_SGD, Hook.NO, {}),
    (Hook.BATCHED_POWER_SGD, Hook.FP16, {}),
):
    test_ddp_comm_hook(hook, wrapper, options)
"""
PEERS = {
    "accelerate's test_ddp_comm_hook, without bfloat16": _HOOKS,
    "accelerate, a training": ACCELERATE,
    "Hugging Face's Trainer": HUGGING_FACE,
    "trl's SFTTrainer with peft's LoRA": TRL,
    "Lightning Fabric": FABRIC,
    "Lightning's Trainer": TRAINER,
    "pytorch-ignite, a training and a metric": IGNITE,
    "torchmetrics, eleven metrics": TORCHMETRICS,
}
"""Those that use a default group that is there."""
