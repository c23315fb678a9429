"""Keras, TensorFlow and JAX in cells: their entries among the frameworks, and hints to cells that call `fit`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ring_notebook.frameworks.cell_calls import Call, CellCalls, Hint
from ring_notebook.frameworks.framework import Framework

_OPTIMIZERS = frozenset({"SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Nadam", "Ftrl", "Lion"})
_BROADCASTS = frozenset({"BroadcastGlobalVariablesCallback", "set_random_seed", "broadcast_variables", "load_weights"})
_SHARDING = frozenset({"shard", "rank", "size"})
_ORIGINAL = "ring_notebook.api.foreign_calls:original"


def _hints(cell: CellCalls) -> Iterator[Hint]:
    """Only certain hints: none for something that an earlier cell may have set up."""
    compiled, fits = cell.first({"compile"}), cell.first({"fit"})
    optimizer = next((call for call in cell.calls if call.name in _OPTIMIZERS and "optimizers" in call.whole), None)
    if compiled is None or fits is None or "prepare" in cell.names:
        return
    wrapped = cell.first({"DistributedOptimizer", "PartialDistributedOptimizer"})
    if wrapped is None:
        yield Hint(
            compiled.line,
            "the gradients of the ranks are never averaged: each trains a model of its own. Pass "
            f"`optimizer=ring.DistributedOptimizer({_source(compiled, optimizer)})`",
        )
    elif not cell.names & _BROADCASTS:
        yield Hint(
            fits.line,
            "the ranks may start from different weights: pass "
            "`callbacks=[ring.callbacks.BroadcastGlobalVariablesCallback(0)]` to `fit`",
        )
    if not cell.names & _SHARDING:
        yield Hint(
            fits.line,
            "every rank trains on the same data: give each its part, as in `x[ring.rank()::ring.size()]`, or "
            "`dataset.shard(ring.size(), ring.rank())`",
        )
    rate = None
    if optimizer is not None:
        rate = optimizer.keyword("learning_rate") or next(iter(optimizer.node.args), None)
    if wrapped and optimizer and optimizer.name == "SGD" and isinstance(rate, ast.Constant):
        lr = ast.unparse(rate)
        yield Hint(
            optimizer.line,
            f"learning rate {lr} was chosen for one process, the batch of a step is now `ring.size()` times as large: "
            f"try `{lr} * ring.size()`",
        )


def _source(compiled: Call, optimizer: Call | None) -> str:
    given = compiled.keyword("optimizer") or (compiled.node.args[0] if compiled.node.args else None)
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        return f"keras.optimizers.get({given.value!r})"
    if given is not None:
        return ast.unparse(given)
    return "optimizer" if optimizer is None else ast.unparse(optimizer.node)


KERAS = Framework(
    name="keras",
    face="ring_notebook.keras",
    modules=("keras", "tf_keras", "tensorflow.keras"),
    gpu_word="gpu",
    original=_ORIGINAL,
    hints=_hints,
)
TENSORFLOW = Framework(
    name="tensorflow",
    face="ring_notebook.tensorflow",
    modules=("tensorflow",),
    gpu_word="gpu",
    original=_ORIGINAL,
    hints=_hints,
)
JAX = Framework(
    name="jax",
    face="ring_notebook.jax",
    modules=("jax", "optax", "flax", "equinox"),
    gpu_word="gpu",
    original=_ORIGINAL,
)
