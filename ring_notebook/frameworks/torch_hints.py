"""PyTorch in cells: its entry among the frameworks, and the hints to a cell that trains with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ring_notebook.frameworks.cell_calls import Call, CellCalls, Hint
from ring_notebook.frameworks.framework import Framework

# Ways of torch and of libraries over it to average gradients, which also start all ranks with equal weights.
_STRATEGIES = frozenset(
    {
        "DistributedDataParallel",
        "DDP",
        "FullyShardedDataParallel",
        "FSDP",
        "fully_shard",
        "Fabric",
        "Accelerator",
        "Trainer",
    }
)
_AVERAGING = _STRATEGIES | {
    "prepare",
    "DistributedOptimizer",
    "allreduce",
    "allreduce_",
    "grouped_allreduce",
    "grouped_allreduce_",
}
_SAME_START = frozenset({"prepare", "broadcast_parameters", "manual_seed", "load", "load_state_dict"})
_SHARDING = frozenset({"prepare", "DistributedSampler", "shard"})
_MOVING = frozenset({"to", "cuda", "to_empty", "set_default_device", "device"})
_CLIPPING = frozenset({"clip_grad_norm_", "clip_grad_value_"})
_OWN_BATCH_NORM = frozenset({"torch.nn.SyncBatchNorm", "nn.SyncBatchNorm"})
_LOADERS = frozenset({"DataLoader"})


def _hints(cell: CellCalls) -> Iterator[Hint]:
    """Only certain hints: none for something that an earlier cell may have set up."""
    optimizer = next((call for call in cell.calls if ".optim." in f".{call.whole}"), None)
    trains, loader = "backward" in cell.names, cell.first(_LOADERS)
    wrapped = cell.first({"DistributedOptimizer"})
    if trains and optimizer and not cell.names & _AVERAGING and not cell.returns(optimizer):
        yield _averaging(cell, optimizer, loader)
    if wrapped and not cell.names & _SAME_START:
        weights = _tensors_of(optimizer) or f"{_model_of(optimizer) or 'model'}.state_dict()"
        yield Hint(
            wrapped.line,
            "the ranks may start from different weights: before this line add "
            f"`ring.broadcast_parameters({weights}, root_rank=0)`",
        )
    if trains and loader and not cell.names & _SHARDING and not _shards_by_hand(cell, loader):
        yield Hint(
            loader.line,
            "every rank reads the whole data set: pass `sampler=torch.utils.data.distributed.DistributedSampler("
            "dataset, ring.size(), ring.rank())`, or use `ring.prepare`",
        )
    # Ranks that step alone keep the rate of one process.
    scales = wrapped is not None and not wrapped.keyword("sync_every")
    if scales and optimizer and optimizer.name == "SGD" and isinstance(rate := optimizer.keyword("lr"), ast.Constant):
        lr = ast.unparse(rate)
        yield Hint(
            optimizer.line,
            f"lr={lr} was chosen for one process, the batch of a step is now `ring.size()` times as large: try "
            f"`lr={lr} * ring.size()`",
        )
    yield from _of_reduction(cell, wrapped)
    for call in cell.calls:
        if call.whole == "torch.save" and not call.guarded:
            yield Hint(
                call.line,
                "every rank writes this file at once: use `ring.save`, which only rank 0 does, atomically",
            )
    if cell.gpus:
        yield from _of_devices(cell, optimizer, loader)


def _averaging(cell: CellCalls, optimizer: Call, loader: Call | None) -> Hint:
    """What to add after the last of model, optimizer and loader, with the names that the cell gives them."""
    names = [_model_of(optimizer), cell.result_of(optimizer)]
    line = optimizer.line
    if loader is not None and cell.result_of(loader):
        names.append(cell.result_of(loader))
        line = max(line, loader.line)
    if all(names):
        added = f"{', '.join(names)} = ring.prepare({', '.join(names)})"
    else:
        added = f"{names[1] or 'optimizer'} = ring.DistributedOptimizer({names[1] or 'optimizer'})"
    after = "this line" if line == optimizer.line else f"line {line}"
    return Hint(
        optimizer.line,
        f"the gradients of the ranks are never averaged: each trains a model of its own. After {after} add `{added}`",
    )


def _model_of(optimizer: Call | None) -> str:
    """The name of the model whose ``parameters()`` the optimizer gets; empty if it gets others."""
    first = optimizer.node.args[0] if optimizer is not None and optimizer.node.args else None
    if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "parameters":
        return ast.unparse(first.func.value) if isinstance(first.func.value, ast.Name) else ""
    return ""


def _tensors_of(optimizer: Call | None) -> str:
    """The list of variables that the optimizer gets, or empty."""
    first = optimizer.node.args[0] if optimizer is not None and optimizer.node.args else None
    named = isinstance(first, ast.List) and all(isinstance(one, ast.Name) for one in first.elts)
    return ast.unparse(first) if first is not None and named else ""


def _shards_by_hand(cell: CellCalls, loader: Call) -> bool:
    return {"rank", "size"} <= cell.names or loader.has("sampler", "batch_sampler")


def _of_reduction(cell: CellCalls, wrapped: Call | None) -> Iterator[Hint]:
    """Code that reads gradients or averages over ranks at the wrong moment, or fails with our optimizer."""
    prepared = cell.first({"prepare"})
    ours = wrapped or (prepared if prepared and not prepared.has("strategy") else None)
    if ours is None or cell.names & _STRATEGIES:
        return
    clips = cell.first(_CLIPPING)
    local = next((call for call in cell.calls if call.has("sync_every") or "Adasum" in ast.unparse(call.node)), None)
    if clips and local:
        yield Hint(
            clips.line,
            "this clips the gradients of each rank: with `sync_every` or `op=Adasum` the ranks average weights or "
            "steps. Without them gradients are averages when `backward()` returns",
        )
    if prepared and not cell.gpus:
        return  # `prepare` replaces it there
    for call in cell.calls:
        if call.whole in _OWN_BATCH_NORM or call.name == "convert_sync_batchnorm":
            yield Hint(
                call.line,
                "torch's SyncBatchNorm needs a process group of torch's and its own backward: make it "
                "`ring.SyncBatchNorm`",
            )
            return


def _of_devices(cell: CellCalls, optimizer: Call | None, loader: Call | None) -> Iterator[Hint]:
    moved = cell.names & _MOVING or any(call.has("device") for call in cell.calls)
    stays = "backward" in cell.names and not moved
    prepared = "prepare" in cell.names
    if stays and prepared and loader and _is_kept_from_prepare(cell, loader):
        yield Hint(
            loader.line,
            "`ring.prepare` moves the model to the rank's GPU, and the batches stay on the CPU: pass it the loader "
            "too, or move each batch in the loop, as in `x = x.to('cuda')`",
        )
    elif stays and optimizer and not prepared:
        model = _model_of(optimizer) or "model"
        yield Hint(
            optimizer.line,
            "every rank has a GPU, and the model stays on the CPU: before this line add "
            f"`{model}.to('cuda')`, and move each batch there too",
        )
    chosen = [call.line for call in cell.calls if call.whole.endswith("cuda.set_device")]
    chosen += [node.lineno for node in ast.walk(cell.tree) if isinstance(node, ast.JoinedStr) and _numbers_a_gpu(node)]
    if chosen:
        yield Hint(
            min(chosen),
            "every rank sees its own GPU as `cuda:0` and those of others after it: write `cuda`, whatever the rank",
        )


def _is_kept_from_prepare(cell: CellCalls, loader: Call) -> bool:
    """Whether the cell gives the loader a name, and certainly does not pass it to `prepare`."""
    passed = [one for call in cell.calls if call.name == "prepare" for one in ast.walk(call.node)]
    names = {one.id for one in passed if isinstance(one, ast.Name)}
    name = cell.result_of(loader)
    return bool(name) and name not in names and not any(isinstance(one, ast.Starred) for one in passed)


def _numbers_a_gpu(node: ast.JoinedStr) -> bool:
    """Whether ``node`` is ``f"cuda:{something}"``."""
    first = node.values[0] if node.values else None
    return isinstance(first, ast.Constant) and first.value == "cuda:"


_OVER_ACCELERATE = (
    "Accelerator",
    *("TrainingArguments", "Seq2SeqTrainingArguments", "SentenceTransformerTrainingArguments"),
    *(
        "SFTConfig",
        "DPOConfig",
        "GRPOConfig",
        "RLOOConfig",
        "RewardConfig",
        "KTOConfig",
        "DistillationConfig",
    ),  # trl's training arguments
)
"""Calls through which accelerate determines the ranks: its own, Hugging Face's Trainer's, and trl's."""

TORCH = Framework(
    name="torch",
    face="ring_notebook.torch",
    modules=("torch",),
    first_imports=("ring_notebook.torch.first_imports",),
    gpu_word="cuda",
    gpu_setup="""
import torch

if torch.cuda.is_available():
    torch.cuda.set_device(ring.local_rank() % torch.cuda.device_count())
""",
    # It raises where a group exists, and a cell may be run again.
    before={
        "init_process_group": "ring_notebook.torch.process_group.default_group:end_groups",
        **dict.fromkeys(_OVER_ACCELERATE, "ring_notebook.torch.process_group.default_group:forget_accelerate"),
    },
    count_waits="ring_notebook.torch.process_group.foreign_time:count_foreign_time",
    threads="torch:get_num_threads",
    modes="ring_notebook.torch.modes_after_failure:remember",
    held="ring_notebook.torch.memory_by_variable:held",
    empty_caches="ring_notebook.torch.memory_by_variable:empty_caches",
    lost_rank="ring_notebook.torch.process_group.default_group:tells_of_lost_rank",
    hints=_hints,
    loaders=_LOADERS,
)
