"""Data-parallel lint: what in a cell makes ranks train apart or do the same work twice, and the line to change.

Two sources: the cell's syntax tree (what it calls, in which order of nesting) and the run's view (what the ranks really
did). A hint is given only where both leave no doubt; what an earlier cell may have set up is no ground for one.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from IPython.core.inputtransformer2 import TransformerManager

from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.style import rank_list

__all__ = ["Hint", "Lint", "html", "logs_metrics", "text"]

_AVERAGING = {"prepare", "DistributedOptimizer", "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_"}
_SAME_START = {"prepare", "broadcast_parameters", "manual_seed", "load", "load_state_dict"}
_SHARDING = {"prepare", "DistributedSampler", "shard"}
_MOVING = {"to", "cuda", "to_empty", "set_default_device", "device"}
_SAME_LINES = 5  # lines that all ranks print alike before it is worth a word


class Hint(NamedTuple):
    """A line of the cell as the notebook counts it (0: no single one), and what to change there."""

    line: int
    text: str


class _Call(NamedTuple):
    name: str  # the last part: DataLoader for torch.utils.data.DataLoader
    whole: str
    line: int
    node: ast.Call
    guarded: bool  # inside an `if` that asks for the rank


class Lint:
    """The hints of one cell.

    ``first_line`` is the number of the first line of ``source`` in the notebook. With ``gpus`` each rank has one.
    """

    def __init__(self, source: str, first_line: int = 1, *, gpus: bool = False) -> None:
        try:
            tree = ast.parse("\n" * (first_line - 1) + TransformerManager().transform_cell(source))
        except SyntaxError:  # the ranks say so themselves
            tree = ast.Module([], [])
        self._calls = tuple(_calls(tree, guarded=False))
        self._names = {call.name for call in self._calls}
        self._static = (*self._of_source(), *(self._of_devices(tree) if gpus else ()))

    def hints(self, view: RunView) -> tuple[Hint, ...]:
        """What is to be said of the run so far. One rank alone has nothing to get wrong."""
        if view.size == 1:
            return ()
        return (*self._static, *self._of_steps(view), *self._of_output(view))

    def _first(self, *names: str) -> _Call | None:
        return next((call for call in self._calls if call.name in names), None)

    def _of_source(self) -> Iterator[Hint]:
        backward = self._first("backward")
        optimizer = next((call for call in self._calls if ".optim." in f".{call.whole}"), None)
        if backward and optimizer and not self._names & _AVERAGING:
            yield Hint(
                optimizer.line,
                "the gradients of the ranks are never averaged: each trains a model of its own. After this line add "
                "`model, optimizer, loader = ring.prepare(model, optimizer, loader)`",
            )
        wrapped = self._first("DistributedOptimizer")
        if wrapped and not self._names & _SAME_START:
            yield Hint(
                wrapped.line,
                "the ranks may start from different weights: before this line add "
                "`ring.broadcast_parameters(model.state_dict(), root_rank=0)`",
            )
        loader = self._first("DataLoader")
        by_hand = {"rank", "size"} <= self._names or (loader is not None and _has(loader, "sampler", "batch_sampler"))
        if loader and backward and not self._names & _SHARDING and not by_hand:
            yield Hint(
                loader.line,
                "every rank reads the whole data set: pass `sampler=torch.utils.data.distributed.DistributedSampler("
                "dataset, ring.size(), ring.rank())`, or use `ring.prepare`",
            )
        rate = next((word.value for word in optimizer.node.keywords if word.arg == "lr"), None) if optimizer else None
        if wrapped and optimizer and optimizer.name == "SGD" and isinstance(rate, ast.Constant):
            lr = ast.unparse(rate)
            yield Hint(
                optimizer.line,
                f"lr={lr} was chosen for one process, the batch of a step is now `ring.size()` times as large: "
                f"try `lr={lr} * ring.size()`",
            )
        for call in self._calls:
            if call.whole == "torch.save" and not call.guarded:
                yield Hint(
                    call.line,
                    "every rank writes this file at once: use `ring.save`, which only rank 0 does, atomically",
                )

    def _of_devices(self, tree: ast.Module) -> Iterator[Hint]:
        optimizer = next((call for call in self._calls if ".optim." in f".{call.whole}"), None)
        moved = self._names & _MOVING or any(_has(call, "device") for call in self._calls)
        stays = bool(self._first("backward")) and not moved
        loader = self._first("DataLoader")
        if stays and loader and "prepare" in self._names:
            yield Hint(
                loader.line,
                "`ring.prepare` moves the model to the rank's GPU, and the batches stay on the CPU: move each one in "
                "the loop, as in `x = x.to('cuda')`",
            )
        elif stays and optimizer and "prepare" not in self._names:
            yield Hint(
                optimizer.line,
                "every rank has a GPU, and the model stays on the CPU: before this line add `model.to('cuda')`, and "
                "move each batch there too",
            )
        chosen = [call.line for call in self._calls if call.whole.endswith("cuda.set_device")]
        chosen += [node.lineno for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) and _is_device(node)]
        if chosen:
            yield Hint(
                min(chosen),
                "every rank sees its own GPU as `cuda:0` and those of others after it: write `cuda`, whatever the rank",
            )

    def _of_steps(self, view: RunView) -> Iterator[Hint]:
        steps = {rank.rank: rank.step for rank in view.ranks}
        if not all(rank.ended and rank.ended.status == "ok" for rank in view.ranks) or len(set(steps.values())) == 1:
            return
        least, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        loader = self._first("DataLoader")
        yield Hint(
            loader.line if loader else 0,
            f"rank {least} ended at step {steps[least]} and rank {most} at step {steps[most]}: give every rank the "
            "same number of batches, or some average gradients with nobody",
        )

    def _of_output(self, view: RunView) -> Iterator[Hint]:
        said = Counter((piece.rank, line) for piece in view.output for line in piece.text.splitlines() if line.strip())
        alike = sum(
            min(said[rank, line] for rank in range(view.size)) for line in {line for rank, line in said if rank == 0}
        )
        call = next((call for call in self._calls if call.name == "print" and not call.guarded), None)
        if alike >= _SAME_LINES and call:
            ranks = rank_list(range(view.size))
            yield Hint(call.line, f"ranks {ranks} print the same {alike} lines: `if ring.rank() == 0:` makes it one")


def _calls(node: ast.AST, guarded: bool) -> Iterator[_Call]:
    if isinstance(node, ast.Call):
        whole = ast.unparse(node.func)
        yield _Call(whole.rpartition(".")[2], whole, node.lineno, node, guarded)
    if isinstance(node, ast.If):
        guarded = guarded or "rank" in ast.unparse(node.test)
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, guarded)


def _has(call: _Call, *keywords: str) -> bool:
    return any(word.arg in keywords for word in call.node.keywords)


def _is_device(node: ast.JoinedStr) -> bool:
    """Whether it is ``f"cuda:{something}"``."""
    first = node.values[0] if node.values else None
    return isinstance(first, ast.Constant) and first.value == "cuda:"


def text(hint: Hint) -> str:
    """The hint for a terminal."""
    return f"Hint, line {hint.line}: {hint.text}." if hint.line else f"Hint: {hint.text}."


def html(hints: tuple[Hint, ...]) -> str:
    """The hints for a page; what stands between backquotes is code."""
    notices = []
    for hint in hints:
        pieces = escape(text(hint)).split("`")
        said = "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
        notices.append(f"<div class='ring-notice ring-hint'>{said}</div>")
    return "".join(notices)


def logs_metrics(source: str) -> bool:
    """Whether the cell looks as if it would log metrics itself; functions that it calls may do so too."""
    return re.search(r"\.(log|track)\(", source) is not None
