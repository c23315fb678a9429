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

from ring_notebook.frameworks import default, named, names_in
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.style import rank_list

__all__ = ["Hint", "Lint", "html", "logs_metrics", "text"]

_SAME_LINES = 5  # lines that all ranks print alike before it is worth a word


class Hint(NamedTuple):
    """A line of the cell as the notebook counts it (0: no single one), and what to change there."""

    line: int
    text: str


class _Call(NamedTuple):
    name: str  # the last part: join for os.path.join
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
        framework = named(names_in(tree)) or default()
        self._words, self._advice = framework.vocabulary, framework.advice
        self._gpus = gpus
        self._calls = tuple(_calls(tree, guarded=False))
        self._names = {call.name for call in self._calls}
        self._static = (*self._of_source(), *(self._of_devices(tree) if gpus else ()))

    def hints(self, view: RunView) -> tuple[Hint, ...]:
        """What is to be said of the run so far. One rank alone has nothing to get wrong.

        A cell that failed before its first step has another fault, which its error names.
        """
        if view.size == 1 or (not view.names and any(rank.ended and rank.ended.status != "ok" for rank in view.ranks)):
            return ()
        return (*self._static, *self._of_steps(view), *self._of_output(view))

    def _first(self, names: frozenset[str]) -> _Call | None:
        return next((call for call in self._calls if call.name in names), None)

    def _first_optimizer(self) -> _Call | None:
        where = self._words.optimizers
        return next((call for call in self._calls if where and where in f".{call.whole}"), None)

    def _of_source(self) -> Iterator[Hint]:
        words, advice = self._words, self._advice
        gradients, optimizer = self._first(words.gradients), self._first_optimizer()
        if gradients and optimizer and not self._names & words.averaging:
            yield Hint(
                optimizer.line,
                f"the gradients of the ranks are never averaged: each trains a model of its own. {advice.average}",
            )
        wrapped = self._first(words.wrapping)
        if wrapped and not self._names & words.same_start:
            yield Hint(wrapped.line, f"the ranks may start from different weights: {advice.same_start}")
        loader = self._first(words.loading)
        by_hand = {"rank", "size"} <= self._names or (loader is not None and _has(loader, *words.sharding_keywords))
        if loader and gradients and not self._names & words.sharding and not by_hand:
            yield Hint(loader.line, f"every rank reads the whole data set: {advice.shard}")
        keywords = optimizer.node.keywords if optimizer else []
        rate = next((word.value for word in keywords if word.arg == words.rate), None)
        if wrapped and optimizer and optimizer.name in words.linear_rate and isinstance(rate, ast.Constant):
            lr = ast.unparse(rate)
            yield Hint(
                optimizer.line,
                f"{words.rate}={lr} was chosen for one process, the batch of a step is now `ring.size()` times as "
                f"large: try `{words.rate}={lr} * ring.size()`",
            )
        yield from self._of_reduction(wrapped)
        for call in self._calls:
            if call.whole in words.saving and not call.guarded:
                yield Hint(call.line, f"every rank writes this file at once: {advice.save}")

    def _of_reduction(self, wrapped: _Call | None) -> Iterator[Hint]:
        """What reads gradients, or averages over ranks, at another moment or by other means than our optimizer."""
        words, advice = self._words, self._advice
        prepared = self._first(words.preparing)
        ours = wrapped or (prepared if prepared and not _has(prepared, "strategy") else None)
        if ours is None or self._names & words.strategies:
            return
        clips = next((call for call in self._calls if call.name in words.clipping), None)
        if clips and not self._names & words.synchronizing:
            yield Hint(clips.line, advice.clip)
        if prepared and not self._gpus:
            return  # `prepare` replaces it there
        for call in self._calls:
            if call.whole in words.own_batch_norm or call.name in words.own_batch_norm:
                yield Hint(call.line, advice.batch_norm)
                return

    def _of_devices(self, tree: ast.Module) -> Iterator[Hint]:
        words, advice = self._words, self._advice
        optimizer, loader = self._first_optimizer(), self._first(words.loading)
        moved = self._names & words.moving or any(_has(call, "device") for call in self._calls)
        stays = bool(self._first(words.gradients)) and not moved
        prepared = self._names & words.preparing
        if stays and loader and prepared:
            yield Hint(loader.line, advice.move_batches)
        elif stays and optimizer and not prepared:
            yield Hint(optimizer.line, advice.move_model)
        if not words.choosing_device:
            return
        chosen = [call.line for call in self._calls if call.whole.endswith(words.choosing_device)]
        chosen += [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr) and _begins_with(node, words.device_prefix)
        ]
        if chosen:
            yield Hint(min(chosen), advice.own_device)

    def _of_steps(self, view: RunView) -> Iterator[Hint]:
        steps = {rank.rank: rank.step for rank in view.ranks}
        if not all(rank.ended and rank.ended.status == "ok" for rank in view.ranks) or len(set(steps.values())) == 1:
            return
        least, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        loader = self._first(self._words.loading)
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


def _begins_with(node: ast.JoinedStr, prefix: str) -> bool:
    """Whether it is ``f"PREFIX{something}"``."""
    first = node.values[0] if node.values else None
    return isinstance(first, ast.Constant) and first.value == prefix


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
